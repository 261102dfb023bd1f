"""SWE-Master training rows: `input` is a list of role and content.

Source: demo data of RUCAIBox/SWE-Master. Two system messages, results with role `tool` but without ids or calls
before them, `<think>` text inside contents; no instance id and no outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loha.readers.chat import canonical_messages, canonical_tools, outcome, run_id, task_id
from loha.readers.row import Reader, RowContext, text_of
from loha.trajectory import Trajectory


def _matches(row: Mapping[str, Any]) -> bool:
    value = row.get("input")
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))


def _read(row: Mapping[str, Any], context: RowContext) -> Trajectory:
    messages = canonical_messages(row.get("input"), context, column="input")
    instance_id = text_of(row, "instance_id") or task_id(messages)
    return Trajectory(
        id=text_of(row, "id") or run_id(instance_id, messages),
        instance_id=instance_id,
        resolved=outcome(row),
        messages=messages,
        tools=canonical_tools(row.get("tools")),
        source="swe-master-sft",
        licence=text_of(row, "licence", "license"),
    )


READER = Reader(
    name="swe-master-sft",
    about="SWE-Master training rows (input: a list of role and content)",
    matches=_matches,
    read=_read,
)
