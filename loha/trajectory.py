"""The canonical trajectory: one recorded agent run in OpenAI chat form, one JSON object a line.

Every reader produces this form and everything downstream reads only this form. A `Trajectory` that exists is valid:
the checks run when it is made.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from loha.atomic import atomic_path
from loha.errors import LohaError
from loha.tools import normalize_tools

_MESSAGE_KEYS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls", "reasoning_content"},
    "tool": {"role", "content", "tool_call_id", "name"},
}
_FIELD_TYPES = {
    "id": ((str,), "a non-empty string"),
    "instance_id": ((str,), "a non-empty string"),
    "resolved": ((bool, type(None)), "true, false or null"),
    "source": ((str,), "a string"),
    "licence": ((str, type(None)), "a string or null"),
}
_REQUIRED = ("id", "instance_id", "messages")


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One recorded agent run.

    Raises:
        LohaError: when a field has the wrong type or the messages are not in canonical form; names the message.
    """

    id: str
    """Unique within a file; the teacher cache is keyed by it."""

    instance_id: str
    """The SWE-bench-style task that the run tried; several runs share it."""

    resolved: bool | None = None
    """Whether the run solved its instance; None when the source does not say."""

    messages: list[dict[str, Any]]
    """OpenAI chat messages. Role system, user, assistant or tool; content always a string; assistant `tool_calls`
    `[{"id", "type": "function", "function": {"name", "arguments": JSON string}}]`; tool messages with
    `tool_call_id` and `name` where known."""

    tools: list[dict[str, Any]] | None = None
    """OpenAI tool definitions that the agent had; None for text-mode agents."""

    source: str = ""
    """The format or data set that the run came from."""

    licence: str | None = None
    """Licence of the row, as its source states it."""

    tool_seconds: list[float | None] | None = None
    """How long the tools of each assistant turn took, one entry per assistant turn, None where it is not known; left
    out of the row where the source does not say. `loha bench` can wait as long."""

    def __post_init__(self) -> None:
        for name, (types, expected) in _FIELD_TYPES.items():
            value = getattr(self, name)
            if type(value) not in types or (name in _REQUIRED and not value):
                raise LohaError(f"{name} must be {expected}, got {value!r}")
        check_tools(self.tools)
        check_messages(self.messages)
        check_tool_seconds(self.tool_seconds, self.assistant_turns)

    @classmethod
    def from_json(cls, row: Any) -> Trajectory:
        """Return the trajectory that a parsed canonical row holds.

        Raises:
            LohaError: for a missing or unknown key, or a value that is not canonical.
        """
        if not isinstance(row, Mapping):
            raise LohaError(f"expected a JSON object, got {type(row).__name__}")
        missing = [key for key in _REQUIRED if key not in row]
        if missing:
            raise LohaError(f"no {missing[0]!r}: not a canonical trajectory; make one with `loha data import`")
        names = [field.name for field in fields(cls)]
        for key in row:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1)
                hint = f", did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(names)}"
                raise LohaError(f"unknown key {key!r}{hint}")
        return cls(**row)

    def to_json(self) -> dict[str, Any]:
        """Return the row as a plain dict, keys in canonical order."""
        row = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.tool_seconds is None:
            del row["tool_seconds"]
        return row

    def to_line(self) -> str:
        """Return the row as one line of UTF-8-encodable JSON, without the newline."""
        line = json.dumps(self.to_json(), ensure_ascii=False)
        try:
            line.encode("utf-8")
        except UnicodeEncodeError:  # lone surrogates survive only as escapes
            return json.dumps(self.to_json(), ensure_ascii=True)
        return line

    @property
    def assistant_turns(self) -> int:
        """Number of assistant turns."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def characters(self) -> int:
        """Characters of all contents and call arguments."""
        return sum(_message_characters(message) for message in self.messages)


def read_trajectories(path: str | os.PathLike[str]) -> Iterator[Trajectory]:
    """Yield the trajectories of a canonical JSONL file, in order, one in memory at a time.

    Raises:
        LohaError: while iterating, for a missing or empty file, and for the first row that is not canonical or
            whose id was used before; names the file and the row (1-based line number).
    """
    file = Path(path)
    if not file.is_file():
        raise LohaError(f"{file}: no such trajectory file; make one with `loha data import`")
    seen: dict[str, int] = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            trajectory = parse_line(line, where=f"{file}: row {number}")
            if trajectory.id in seen:
                raise LohaError(
                    f"{file}: row {number}: id {trajectory.id!r} is already used in row {seen[trajectory.id]}; "
                    "ids must be unique, `loha data import` on this file makes them so"
                )
            seen[trajectory.id] = number
            yield trajectory
    if not seen:
        raise LohaError(f"{file}: holds no trajectory; expected one JSON object a line")


def parse_line(line: bytes | str, *, where: str) -> Trajectory:
    """Return the trajectory of one line of canonical JSONL.

    Args:
        line: one JSON object, UTF-8.
        where: names file and row in errors.

    Raises:
        LohaError: when the line is not canonical.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError covers bad JSON and bad UTF-8
        raise LohaError(f"{where}: not a JSON object on one line ({error}); is the file cut off?") from error
    try:
        return Trajectory.from_json(row)
    except LohaError as error:
        name = f" (id {row['id']!r})" if isinstance(row, Mapping) and isinstance(row.get("id"), str) else ""
        raise LohaError(f"{where}{name}: {error}") from error


def write_trajectories(path: str | os.PathLike[str], trajectories: Iterable[Trajectory]) -> int:
    """Write a canonical JSONL file, all of it or none, and return the number of rows."""
    count = 0
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as file:
        for trajectory in trajectories:
            file.write(trajectory.to_line() + "\n")
            count += 1
    return count


def check_messages(messages: Any) -> None:
    """Check that messages are in canonical form.

    Legal, because real runs hold them: several system messages, tool results without ids when the agent calls in
    text, results out of call order, and calls of the last assistant turn without a result.

    Raises:
        LohaError: naming the message by its 0-based index.
    """
    if not isinstance(messages, list) or not messages:
        raise LohaError("no messages: expected a list of chat messages")
    open_calls: list[str] = []
    turns = 0
    for index, message in enumerate(messages):
        where = f"message {index}"
        role = _check_message(message, where)
        if role == "assistant":
            if open_calls:
                raise LohaError(f"{where}: call {open_calls[0]!r} of an earlier turn has no result before this turn")
            turns += 1
            open_calls = [_check_call(call, where) for call in message.get("tool_calls", ())]
        elif role == "tool":
            _close(open_calls, message.get("tool_call_id"), where)
    if not turns:
        raise LohaError("no assistant turn: an agent run needs at least one")


def check_tools(tools: Any) -> None:
    """Check that tools are OpenAI tool definitions or None.

    Raises:
        LohaError: naming the tool by its 0-based index.
    """
    if tools is None:
        return
    if not isinstance(tools, list) or not tools:
        raise LohaError("tools must be null or a non-empty list of tool definitions")
    normalize_tools(tools)


def check_tool_seconds(seconds: Any, turns: int) -> None:
    """Check the times of the tools: None, or one entry per assistant turn.

    Raises:
        LohaError: for another number of entries, or one that is no time.
    """
    if seconds is None:
        return
    if not isinstance(seconds, list) or len(seconds) != turns:
        got = f"{len(seconds)} entries" if isinstance(seconds, list) else type(seconds).__name__
        raise LohaError(f"tool_seconds must hold one entry per assistant turn ({turns}) or be left out, got {got}")
    for turn, value in enumerate(seconds):
        if value is not None and (type(value) not in (int, float) or not 0 <= value < math.inf):
            raise LohaError(f"tool_seconds of turn {turn} must be a number of seconds or null, got {value!r}")


def _check_message(message: Any, where: str) -> str:
    if not isinstance(message, Mapping):
        raise LohaError(f"{where}: must be an object, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _MESSAGE_KEYS:
        raise LohaError(f"{where}: role must be one of {', '.join(_MESSAGE_KEYS)}, got {role!r}")
    if not isinstance(message.get("content"), str):
        raise LohaError(f"{where}: content must be a string, got {type(message.get('content')).__name__}")
    unknown = set(message) - _MESSAGE_KEYS[role]
    if unknown:
        raise LohaError(f"{where}: unknown key {min(map(str, unknown))!r} in a {role} message")
    for key in ("tool_call_id", "name", "reasoning_content"):
        if key in message and not isinstance(message[key], str):
            raise LohaError(f"{where}: {key} must be a string, got {message[key]!r}")
    if "tool_calls" in message and (not isinstance(message["tool_calls"], list) or not message["tool_calls"]):
        raise LohaError(f"{where}: tool_calls must be a non-empty list, or be left out")
    return role


def _check_call(call: Any, where: str) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if (
        not isinstance(function, Mapping)
        or not isinstance(call.get("id"), str)
        or call.get("type") != "function"
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments"), str)
    ):
        raise LohaError(
            f'{where}: a tool call must be {{"id", "type": "function", "function": {{"name", "arguments"}}}} '
            "with arguments as a JSON string"
        )
    return call["id"]


def _close(open_calls: list[str], call_id: str | None, where: str) -> None:
    if call_id is None:
        del open_calls[:1]
    elif call_id in open_calls:
        open_calls.remove(call_id)
    else:
        raise LohaError(f"{where}: result of call {call_id!r}, which the assistant turn before it did not make")


def _message_characters(message: Mapping[str, Any]) -> int:
    calls = sum(
        len(call["function"]["name"]) + len(call["function"]["arguments"]) for call in message.get("tool_calls", ())
    )
    return len(message["content"]) + calls
