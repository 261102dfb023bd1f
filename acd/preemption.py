"""A preempted job saves and exits 0: SIGTERM and SIGUSR1 end the run at the next step boundary."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1
log = logging.getLogger(__name__)


class Preemption:
    """Remembers, inside a `with` block, that the job was asked to end."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Preemption:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        _end_with_launcher()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        log.warning("%s: saving a checkpoint at the next step, then ending", signal.Signals(number).name)


def _end_with_launcher() -> None:
    """Have the kernel send SIGTERM when `accelerate launch` dies, which does not pass signals on to its child.

    Without this, a scheduler that signals only the launcher leaves the trainer running without a parent.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        if b"accelerate" in command:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except OSError:
        log.debug("the launcher cannot be watched", exc_info=True)
