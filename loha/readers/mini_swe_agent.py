"""mini-swe-agent runs: one `.traj.json` file each.

Source: mini-swe-agent 2.4.6. Messages carry an `extra` record and the last has role `exit`; neither was sent to the
model. The file does not record the one tool, `bash`, that its native-call models send with every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loha.readers.chat import canonical_messages, outcome, run_id, task_id
from loha.readers.row import BadRow, Reader, RowContext, decoded, text_of
from loha.trajectory import Trajectory

_COMMAND = {"type": "string", "description": "The bash command to execute"}
BASH_TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {"type": "object", "properties": {"command": _COMMAND}, "required": ["command"]},
    },
}


def _matches(row: Mapping[str, Any]) -> bool:
    kind = row.get("trajectory_format")
    info = row.get("info")
    return (isinstance(kind, str) and kind.startswith("mini-swe-agent")) or (
        "messages" in row and isinstance(info, Mapping) and "mini_version" in info
    )


def _read(row: Mapping[str, Any], context: RowContext) -> Trajectory:
    recorded = decoded(row.get("messages"), "messages")
    if not isinstance(recorded, list):
        raise BadRow("no messages", "a mini-swe-agent run needs a list of messages")
    if any(isinstance(message, Mapping) and message.get("object") == "response" for message in recorded):
        raise BadRow("Responses API run", "only runs over chat completions can be imported")
    kept = [m for m in recorded if not (isinstance(m, Mapping) and m.get("role") == "exit")]
    messages = canonical_messages(kept, context)
    instance_id = text_of(row, "instance_id")
    native = any("tool_calls" in message for message in messages)
    return Trajectory(
        id=instance_id or run_id(task_id(messages), messages),
        instance_id=instance_id or task_id(messages),
        resolved=outcome(row),
        messages=messages,
        tools=[BASH_TOOL] if native else None,
        source="mini-swe-agent",
        licence=text_of(row, "licence", "license"),
    )


READER = Reader(name="mini-swe-agent", about="mini-swe-agent .traj.json files", matches=_matches, read=_read)
