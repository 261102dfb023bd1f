"""From chat messages as scaffolds record them to the canonical form; shared by all readers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from loha.errors import LohaError
from loha.messages import ROLES, clean_text, content_text
from loha.readers.row import BadRow, RowContext, decoded

HUGE_OBSERVATION_CHARS = 1_000_000


def canonical_messages(raw: Any, context: RowContext, *, column: str = "messages") -> list[dict[str, Any]]:
    """Return messages in canonical form, tool results matched to their calls.

    Args:
        raw: a list of messages, or its JSON text. Contents may be null or lists of text parts, arguments dicts or
            JSON strings, roles as in `loha.messages.ROLES`; results may come out of call order and without ids.
        context: collects notes on what was changed.
        column: names `raw` in errors.

    Raises:
        BadRow: for anything that is no agent run.
    """
    messages = decoded(raw, column)
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise BadRow("no messages", f"{column} must be a list, got {type(messages).__name__}")
    if not messages:
        raise BadRow("empty trajectory", f"{column} is an empty list")
    canonical = [_message(message, index, context) for index, message in enumerate(messages)]
    if not any(message["role"] == "assistant" for message in canonical):
        raise BadRow("no assistant turn", f"{len(canonical)} messages, none by the assistant")
    _link_results(canonical)
    return canonical


def canonical_tools(raw: Any) -> list[dict[str, Any]] | None:
    """Return tool definitions, or None when there are none.

    Args:
        raw: a list of definitions, a list of their JSON texts, the JSON text of the list, or None; bare functions
            (without the `{"type": "function"}` around them) are wrapped.

    Raises:
        BadRow: for anything else.
    """
    tools = decoded(raw, "tools") if raw else None
    if not tools:
        return None
    if not isinstance(tools, Sequence):
        raise BadRow("bad tools", f"tools must be a list, got {type(tools).__name__}")
    return [_tool(decoded(tool, "tools"), index) for index, tool in enumerate(tools)]


def outcome(row: Mapping[str, Any]) -> bool | None:
    """Return whether the row's run solved its instance: reward or resolved 1 is yes, -1 or nothing is unknown."""
    for key in ("resolved", "reward", "target", "success"):
        value = row.get(key)
        if isinstance(value, bool):
            return value
        if isinstance(value, (int, float)) and not math.isnan(value):
            return None if value < 0 else value == 1
    return None


def task_id(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return an instance id for a row that names none: the same prompt gives the same id."""
    prompt = []
    for message in messages:
        if message["role"] == "assistant":
            break
        prompt.append(message["content"])
    return "task-" + _digest(prompt)[:12]


def run_id(instance_id: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return an id for a run that has none: the instance and a digest of the messages."""
    return f"{instance_id}-{_digest(list(messages))[:8]}"


def _message(message: Any, index: int, context: RowContext) -> dict[str, Any]:
    where = f"message {index}"
    if not isinstance(message, Mapping):
        raise BadRow("bad message", f"{where}: must be an object, got {type(message).__name__}")
    raw_role = message.get("role")
    role = ROLES.get(raw_role) if isinstance(raw_role, str) else None
    if role is None:
        raise BadRow("unknown role", f"{where}: role {raw_role!r}, expected one of {', '.join(sorted(ROLES))}")
    content = _content(message, where, context)
    canonical: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        _add_assistant_fields(canonical, message, where)
    elif role == "tool":
        _add_tool_fields(canonical, message)
    if role != "assistant" and len(content) > HUGE_OBSERVATION_CHARS:
        context.note("message over 1,000,000 characters")
    return canonical


def _content(message: Mapping[str, Any], where: str, context: RowContext) -> str:
    # nebius' SWE-agent rows keep the text under `text`, and that of the system turn under `system_prompt`.
    raw = next((message[key] for key in ("content", "text", "system_prompt") if message.get(key) is not None), None)
    try:
        content = content_text(raw, where)
    except LohaError as error:
        raise BadRow("content is not text", str(error)) from error
    if "\ufffd" in content and _has_surrogates(raw):
        context.note("lone surrogates replaced by U+FFFD")
    return content


def _has_surrogates(raw: Any) -> bool:
    parts = [raw] if isinstance(raw, (str, Mapping)) else raw
    texts = [part["text"] if isinstance(part, Mapping) else part for part in parts]
    return any(clean_text(text) != text for text in texts)


def _add_assistant_fields(canonical: dict[str, Any], message: Mapping[str, Any], where: str) -> None:
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        canonical["reasoning_content"] = clean_text(reasoning)
    calls = message.get("tool_calls")
    if not calls and isinstance(message.get("function_call"), Mapping):  # the form before tool_calls
        calls = [{"function": message["function_call"]}]
    if not calls:
        return
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise BadRow("bad tool call", f"{where}: tool_calls must be a list, got {type(calls).__name__}")
    canonical["tool_calls"] = [_call(call, f"{where}: tool call {i}") for i, call in enumerate(calls)]


def _add_tool_fields(canonical: dict[str, Any], message: Mapping[str, Any]) -> None:
    call_id = message.get("tool_call_id")
    listed = message.get("tool_call_ids")  # SWE-agent: a list of one
    if not call_id and isinstance(listed, Sequence) and not isinstance(listed, str) and listed:
        call_id = listed[0]
    for key, value in (("tool_call_id", call_id), ("name", message.get("name"))):
        if isinstance(value, str) and value:
            canonical[key] = clean_text(value)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name or not isinstance(function, Mapping):
        raise BadRow("bad tool call", f"{where}: has no function name")
    call_id = call.get("id")
    return {
        "id": clean_text(call_id) if isinstance(call_id, str) else "",
        "type": "function",
        "function": {"name": clean_text(name), "arguments": _arguments(function.get("arguments"), where)},
    }


def _arguments(arguments: Any, where: str) -> str:
    if arguments is None:
        return "{}"
    if isinstance(arguments, str):
        return clean_text(arguments) if arguments.strip() else "{}"
    if isinstance(arguments, Mapping):
        return clean_text(json.dumps(arguments, ensure_ascii=False))
    raise BadRow("bad tool call", f"{where}: arguments must be an object or its JSON, got {type(arguments).__name__}")


def _link_results(messages: list[dict[str, Any]]) -> None:
    """Give every call an id, and every result the id and the tool name of its call."""
    open_calls: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            if open_calls:
                name = open_calls[0]["function"]["name"]
                raise BadRow("call without result", f"message {index}: call of {name!r} was never answered before it")
            open_calls = list(message.get("tool_calls", ()))
        elif message["role"] == "tool":
            call = _take_call(open_calls, message.get("tool_call_id"), index)
            if call is not None:
                call["id"] = call["id"] or message.get("tool_call_id") or f"call_{index}"
                message["tool_call_id"] = call["id"]
                message.setdefault("name", call["function"]["name"])
    for position, call in enumerate(open_calls):
        call["id"] = call["id"] or f"call_{len(messages)}_{position}"


def _take_call(open_calls: list[dict[str, Any]], call_id: str | None, index: int) -> dict[str, Any] | None:
    """Remove and return the open call that a result answers: by id, else the first in order."""
    for position, call in enumerate(open_calls):
        if call_id is None or call["id"] == call_id:
            return open_calls.pop(position)
    for position, call in enumerate(open_calls):
        if not call["id"]:  # recorded without an id: the result's id is as good as any
            return open_calls.pop(position)
    if call_id is not None:
        raise BadRow("result without call", f"message {index}: no open call has the id {call_id!r}")
    return None


def _tool(tool: Any, index: int) -> dict[str, Any]:
    if isinstance(tool, Mapping) and isinstance(tool.get("name"), str) and "function" not in tool:
        tool = {"type": "function", "function": dict(tool)}
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRow("bad tools", f"tool {index}: has no function name")
    return dict(tool)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
