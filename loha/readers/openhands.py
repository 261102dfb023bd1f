"""OpenHands `llm_completions` files: one call each; the last of a conversation holds all of it.

Source: OpenHands 0.62. A file is `{messages, response, args, kwargs, timestamp, cost}` and lies in
`llm_completions/<instance id>/<model>-<time>.json`. In text mode `messages` and `response` are the text that was
exchanged (`fncall_*` beside them are the converted form), and the stop string has cut `</function>` off the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loha.readers.chat import canonical_messages, canonical_tools, outcome, run_id, task_id
from loha.readers.row import BadRow, Reader, RowContext, decoded, text_of
from loha.trajectory import Trajectory

_NO_INSTANCE = {"", ".", "..", "/", "llm_completions", "completions", "logs"}


def matches(row: Mapping[str, Any]) -> bool:
    """Return whether a row is one recorded OpenHands call."""
    return "messages" in row and "response" in row and ("kwargs" in row or "args" in row)


def _read(row: Mapping[str, Any], context: RowContext) -> Trajectory:
    recorded = decoded(row.get("messages"), "messages")
    if not isinstance(recorded, list):
        raise BadRow("no messages", f"messages must be a list, got {type(recorded).__name__}")
    messages = canonical_messages([*recorded, *_answer(row)], context)
    _close_function(messages[-1])
    options = row.get("kwargs")
    own_file = context.file.suffix == ".json"
    folder = context.file.resolve().parent.name if own_file else ""
    instance_id = text_of(row, "instance_id") or (folder if folder not in _NO_INSTANCE else task_id(messages))
    return Trajectory(
        id=f"{instance_id}@{context.file.stem}" if own_file else run_id(instance_id, messages),
        instance_id=instance_id,
        resolved=outcome(row),
        messages=messages,
        tools=canonical_tools(options.get("tools")) if isinstance(options, Mapping) else None,
        source="openhands",
        licence=text_of(row, "licence", "license"),
    )


def _answer(row: Mapping[str, Any]) -> list[Any]:
    response = decoded(row.get("response"), "response")
    choices = response.get("choices") if isinstance(response, Mapping) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, Mapping) else None
    if message is None:
        raise BadRow("no answer", "response.choices[0].message is missing: the call failed, take an earlier file")
    return [message]


def _close_function(message: dict[str, Any]) -> None:
    content = message["content"]
    if message["role"] == "assistant" and content.rfind("<function=") > content.rfind("</function"):
        message["content"] = content.rstrip("\n") + "\n</function>"


READER = Reader(
    name="openhands",
    about="OpenHands llm_completions files, or a folder of them",
    matches=matches,
    read=_read,
)
