"""The server's process as the launcher sees it: waiting until it answers, passing signals on, ending all of it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import httpx

from loha.errors import LohaError

_POLL_S = 0.25
_GRACE_S = 30
_PR_SET_PDEATHSIG = 1


def start_server(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the server in a process group of its own; it ends with this process."""
    return subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_ends_with_this_process())


def wait_ready(server: subprocess.Popen[bytes], client: httpx.Client, timeout_s: float) -> int | None:
    """Return None once the server is healthy, or the status with which it ended.

    Raises:
        LohaError: when it is neither by then.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        status = server.poll()
        if status is not None:
            return exit_status(status)
        with suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                return None
        time.sleep(_POLL_S)
    raise LohaError(
        f"the server was not ready after {timeout_s:g} s; raise --startup-timeout-s or read its messages above"
    )


@contextmanager
def forwarded_signals(server: subprocess.Popen[bytes], before: Callable[[], None]) -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the server, which drains and ends.

    Args:
        server: started.
        before: called first.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        before()
        if server.poll() is None:
            server.send_signal(number)

    old = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and everything that it started."""
    if server.poll() is None:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(timeout=_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)  # engine processes that outlived it
    server.wait()


def exit_status(returncode: int) -> int:
    """Return 0 for an end that a signal asked for, else the status (128 + signal number for a crash)."""
    if returncode in (-signal.SIGINT, -signal.SIGTERM):
        return 0
    return returncode if returncode >= 0 else 128 - returncode


def _ends_with_this_process() -> Callable[[], object] | None:
    """Return what a child must call so that it gets SIGTERM when the launcher is killed; Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork: the child should do nothing but call it
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
