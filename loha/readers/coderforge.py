"""CoderForge rows: `trajectory_id`, `reward`, and `messages` and `tools` as JSON text.

Source: data card and sample rows of togethercomputer/CoderForge-Preview, config `trajectories`. Call arguments are
dicts there, contents of turns that only call a tool are null, and results may come out of call order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from loha.readers.chat import canonical_messages, canonical_tools
from loha.readers.row import BadRow, ExcludedRow, Reader, RowContext, text_of
from loha.trajectory import Trajectory

_RUN = re.compile(r"_run\d+\Z", re.ASCII)
_INCOMPLETE = re.compile(r"_incomplete_\d{8}_\d{6}\Z", re.ASCII)


def instance_of(trajectory_id: str) -> str:
    """Return the instance id in a trajectory id: less one `_run<N>` and one `_incomplete_<8 digits>_<6 digits>`.

    They are taken off the end in whichever order they stand. An id that is nothing else is returned whole.
    """
    first = _RUN.sub("", trajectory_id)
    second = _INCOMPLETE.sub("", first)
    if first == trajectory_id:
        second = _RUN.sub("", second)
    return second or trajectory_id


def _matches(row: Mapping[str, Any]) -> bool:
    return "trajectory_id" in row and "reward" in row and ("messages" in row or "chat_template_applied" in row)


def _read(row: Mapping[str, Any], context: RowContext) -> Trajectory:
    trajectory_id = text_of(row, "trajectory_id")
    if trajectory_id is None:
        raise BadRow("no trajectory_id")
    if "messages" not in row:
        raise BadRow("tokenised row", "has input_ids of another template; take the config `trajectories` instead")
    return Trajectory(
        id=trajectory_id,
        instance_id=instance_of(trajectory_id),
        resolved=_resolved(row.get("reward")),
        messages=canonical_messages(row["messages"], context),
        tools=canonical_tools(row.get("tools")),
        source="coderforge",
        licence=text_of(row, "license", "licence"),
    )


def _resolved(reward: Any) -> bool:
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise BadRow("no reward", f"reward must be a number, got {reward!r}")
    if reward == -1:
        raise ExcludedRow("reward -1", "the run was not scored")
    return reward == 1


READER = Reader(
    name="coderforge",
    about="CoderForge rows (trajectory_id, reward, messages and tools as JSON text)",
    matches=_matches,
    read=_read,
)
