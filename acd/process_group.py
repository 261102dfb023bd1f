"""How long the processes of a command wait for each other."""

from __future__ import annotations

import datetime

from accelerate.utils import InitProcessGroupKwargs

WAIT = datetime.timedelta(hours=3)
"""NCCL's own ten minutes are too short: one process measures the views of 35,140 trajectories while the others wait,
and a process that has written its share of a teacher cache waits for the slowest."""


def long_wait() -> InitProcessGroupKwargs:
    """Return what to pass to `Accelerator` among its handlers."""
    return InitProcessGroupKwargs(timeout=WAIT)
