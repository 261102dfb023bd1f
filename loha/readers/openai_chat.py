"""Plain OpenAI chat rows: `messages` (or another name for them), and whatever else the row tells.

Covers our own canonical rows, and the data sets of nebius (`trajectory`, role `ai`, `target`), SWE-smith
(`messages` as JSON text, `resolved`), SWE-Gym (`resolved`, `run_id`) and SWE-agent's `.traj` files (`history`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loha.readers.chat import canonical_messages, canonical_tools, outcome, run_id, task_id
from loha.readers.row import BadRow, Reader, RowContext, text_of
from loha.trajectory import Trajectory

COLUMNS = ("messages", "history", "trajectory", "conversation", "conversations")


def _matches(row: Mapping[str, Any]) -> bool:
    return _column(row) is not None


def _read(row: Mapping[str, Any], context: RowContext) -> Trajectory:
    column = _column(row)
    if column is None:
        raise BadRow("no messages", f"expected a column named one of {', '.join(COLUMNS)}, got {_names(row)}")
    messages = canonical_messages(row[column], context, column=column)
    # SWE-agent names the instance only in the name of its .traj file.
    named = text_of(row, "instance_id", "task_id") or (context.file.stem if context.file.suffix == ".traj" else None)
    instance_id = named or task_id(messages)
    return Trajectory(
        id=text_of(row, "id", "trajectory_id", "traj_id") or _run(row, named) or run_id(instance_id, messages),
        instance_id=instance_id,
        resolved=outcome(row),
        messages=messages,
        tools=canonical_tools(row.get("tools")),
        source=text_of(row, "source") or "openai-chat",
        licence=text_of(row, "licence", "license"),
    )


def _column(row: Mapping[str, Any]) -> str | None:
    found = next((column for column in COLUMNS if _holds_messages(column, row.get(column))), None)
    return found or ("messages" if "messages" in row else None)


def _holds_messages(column: str, value: Any) -> bool:
    if column == "messages" or not value or isinstance(value, str):
        return isinstance(value, (list, str))
    # Other scaffolds keep events or steps under these names.
    return isinstance(value, list) and isinstance(value[0], Mapping) and "role" in value[0]


def _run(row: Mapping[str, Any], instance_id: str | None) -> str | None:
    run = text_of(row, "run_id")
    return f"{instance_id}@{run}" if instance_id and run else None


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, row))[:12]) or "no columns"


READER = Reader(
    name="openai-chat",
    about="plain OpenAI chat rows ({messages, tools, ...}), canonical rows, nebius, SWE-smith, SWE-Gym",
    matches=_matches,
    read=_read,
)
