"""SWE-Master raw runs (the R2E-Gym runner's JSONL): `trajectory_steps` with thought, action and observation.

Source: demo data of RUCAIBox/SWE-Master. The agent calls tools in text (`<function=...>`). Results get role `tool`
without ids, as in the project's own training rows. The runner's tool docs are not recorded in these rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from loha.readers.chat import canonical_messages, outcome, run_id, task_id
from loha.readers.row import BadRow, Reader, RowContext, decoded, text_of
from loha.trajectory import Trajectory

WORKING_DIRECTORY = "/testbed"


def _matches(row: Mapping[str, Any]) -> bool:
    return "trajectory_steps" in row


def _read(row: Mapping[str, Any], context: RowContext) -> Trajectory:
    steps = decoded(row.get("trajectory_steps"), "trajectory_steps")
    if not isinstance(steps, list) or not steps:
        raise BadRow("empty trajectory", "trajectory_steps must be a non-empty list")
    messages = canonical_messages(_prompt(row) + _turns(steps), context)
    task = _mapping(row, "ds")
    instance_id = text_of(task, "instance_id") or text_of(row, "instance_id") or task_id(messages)
    experiment = text_of(row, "exp_name")
    return Trajectory(
        id=f"{instance_id}@{experiment}" if experiment else run_id(instance_id, messages),
        instance_id=instance_id,
        resolved=outcome({"reward": row.get("reward")}),
        messages=messages,
        source="swe-master-run",
        licence=text_of(task, "license_name"),
        tool_seconds=_tool_seconds(steps),
    )


def _prompt(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    arguments = _mapping(row, "agent_args")
    problem = text_of(row, "problem_statement") or text_of(_mapping(row, "ds"), "problem_statement") or ""
    template = text_of(arguments, "instance_prompt") or "{problem_statement}"
    # The issue text goes in last: it may itself hold the other placeholder.
    before, placeholder, after = template.replace("{working_dir}", WORKING_DIRECTORY).partition("{problem_statement}")
    user = before + (problem if placeholder else "") + after
    if not user.strip():
        raise BadRow("no task", "neither problem_statement nor agent_args.instance_prompt holds text")
    system = text_of(arguments, "system_prompt")
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": user}]


def _turns(steps: list[Any]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for index, step in enumerate(steps):
        if not isinstance(step, Mapping):
            raise BadRow("bad step", f"step {index}: must be an object, got {type(step).__name__}")
        parts = [text_of(step, "thought"), text_of(step, "action")]
        turns.append({"role": "assistant", "content": "\n\n".join(part for part in parts if part)})
        # What the runner prints after the closing call was never read by the model.
        if step.get("done") and index == len(steps) - 1:
            continue
        observation = step.get("observation")
        if not isinstance(observation, str):
            raise BadRow("bad step", f"step {index}: observation must be a string, got {type(observation).__name__}")
        turns.append({"role": "tool", "content": observation})
    return turns


def _tool_seconds(steps: list[Mapping[str, Any]]) -> list[float | None] | None:
    """Return how long the environment took in each step, or None when no step says."""
    seconds = [_seconds(step.get("env_exec_time")) for step in steps]
    return seconds if any(value is not None for value in seconds) else None


def _seconds(value: Any) -> float | None:
    is_time = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
    return float(value) if is_time else None


def _mapping(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = decoded(row.get(key), key)
    return value if isinstance(value, Mapping) else {}


READER = Reader(
    name="swe-master-run",
    about="SWE-Master / R2E-Gym raw runs (trajectory_steps)",
    matches=_matches,
    read=_read,
)
