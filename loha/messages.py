"""Bring chat messages of any client or scaffold into the one form that the renderer renders.

The same function serves training and serving: vLLM joins text parts with a newline and parses the arguments of
recorded calls before it renders, so a trainer that kept them verbatim would see other tokens than the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from loha.errors import LohaError, shown

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
}
_KEPT = ("name", "tool_call_id", "reasoning_content")
_SURROGATES = re.compile("[\ud800-\udfff]")


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with string contents, plain roles and dict arguments.

    Args:
        messages: OpenAI chat messages as clients send and scaffolds record them: content may be a string, null,
            or a list of text parts; call arguments may be a JSON string or a dict.

    Returns:
        New messages with `role`, `content` (never null), and where present `name`, `tool_call_id`,
        `reasoning_content`, `tool_calls` (`[{"id"?, "type", "function": {"name", "arguments": dict}}]`).

    Raises:
        LohaError: for an unknown role, a content that is not text, or a call without a name; names the message.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise LohaError("messages must be a list of at least one chat message")
    return [_normalize(message, index) for index, message in enumerate(messages)]


def clean_text(text: str) -> str:
    """Replace lone surrogates, which no tokenizer can encode, by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return _SURROGATES.sub("\ufffd", text)
    return text


def clean_value(value: Any) -> Any:
    """Return a JSON-like value with lone surrogates replaced in every string, keys included.

    Raises:
        LohaError: when it is nested deeper than any template could print.
    """
    try:
        return _clean(value)
    except RecursionError:
        raise LohaError("call arguments or tool definitions are nested too deeply") from None


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, Mapping):
        return {clean_text(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value


def content_text(content: Any, where: str) -> str:
    """Return the text of a message content.

    Args:
        content: a string, None, or a list of strings and text parts (joined with a newline, as vLLM does).
        where: names the message in errors.

    Raises:
        LohaError: for a part that is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return clean_text(content)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise LohaError(
            f"{where}: content must be a string, null or a list of text parts, got {type(content).__name__}"
        )
    return "\n".join(_part_text(part, where) for part in content)


def call_arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a recorded call as a dict; malformed JSON becomes {} (as in vLLM)."""
    if isinstance(arguments, Mapping):
        return clean_value(dict(arguments))
    if isinstance(arguments, str) and arguments.strip():
        try:
            parsed = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError):
            return {}
        return clean_value(parsed) if isinstance(parsed, dict) else {}
    return {}


def _normalize(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    where = f"message {index}"
    if not isinstance(message, Mapping):
        raise LohaError(f"{where}: must be an object with role and content, got {type(message).__name__}")
    raw_role = message.get("role")
    role = ROLES.get(raw_role) if isinstance(raw_role, str) else None
    if role is None:
        raise LohaError(f"{where}: unknown role {shown(raw_role)}, expected one of {', '.join(sorted(ROLES))}")
    clean: dict[str, Any] = {"role": role, "content": content_text(message.get("content"), where)}
    for key in _KEPT:
        if isinstance(message.get(key), str):
            clean[key] = clean_text(message[key])
    calls = message.get("tool_calls")
    if role == "assistant" and calls:
        clean["tool_calls"] = [_normalize_call(call, f"{where}: tool call {i}") for i, call in enumerate(calls)]
    return clean


def _normalize_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not isinstance(function, Mapping):
        raise LohaError(f'{where}: expected {{"function": {{"name": ..., "arguments": ...}}}} with a string name')
    clean: dict[str, Any] = {
        "type": "function",
        "function": {"name": clean_text(name), "arguments": call_arguments(function.get("arguments"))},
    }
    if isinstance(call.get("id"), str):
        clean["id"] = call["id"]
    return clean


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return clean_text(part)
    if isinstance(part, Mapping):
        for key in ("text", "refusal"):  # a refusal is text that the assistant wrote
            if isinstance(part.get(key), str):
                return clean_text(part[key])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise LohaError(f"{where}: content part of type {shown(kind)} is not supported, only text parts are")
