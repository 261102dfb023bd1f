"""The server's process as the launcher sees it: waiting until it answers, passing signals on, ending all of it."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

import httpx

from loha.errors import LohaError
from serving.liveness import read_counter

_POLL_S = 0.25
_GRACE_S = 30
_ASK_S = 5.0
_PR_SET_PDEATHSIG = 1


def start_server(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start the server in a process group of its own; it ends with this process."""
    return subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=_ends_with_this_process())


@contextmanager
def ending_quietly() -> Iterator[None]:
    """Make SIGTERM end the process with status 0 while nothing is running that has to be drained."""
    old = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


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


class Drain:
    """Ends the server after SIGTERM or SIGINT: running requests finish, within a limit; a second signal ends it now.

    vLLM has a drain of its own (`--shutdown-timeout`), which drops requests that are still being rendered and takes
    long to tear down; so requests are drained here, and vLLM is told to stop when it is idle.

    Args:
        server: started.
        client: with the server's base URL, for its metrics.
        timeout_s: after which running requests are cut off.
        begin: called first; from then on the server must refuse new requests.

    Attributes:
        asked: whether a signal has come.
    """

    def __init__(
        self, server: subprocess.Popen[bytes], client: httpx.Client, timeout_s: float, begin: Callable[[], None]
    ) -> None:
        self._server, self._client, self._timeout_s, self._begin = server, client, timeout_s, begin
        self.asked = False
        self._old: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._drain, daemon=True)

    def __enter__(self) -> Drain:
        self._old = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self._terminate()
            return
        self.asked = True
        self._begin()
        self._thread.start()  # a handler must not wait

    def wait(self) -> None:
        """Once asked: wait until running requests have finished, or their time is over."""
        self._thread.join()

    def _drain(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while (left_s := deadline - time.monotonic()) > 0 and self._busy(min(_ASK_S, left_s)):
            time.sleep(_POLL_S)
        self._terminate()

    def _busy(self, timeout_s: float) -> bool:
        if self._server.poll() is not None:
            return False
        try:
            return read_counter(self._client, "loha_requests_in_flight", timeout_s=timeout_s) > 0
        except httpx.ConnectError:
            return False  # not up yet, or gone
        except httpx.HTTPError:
            return True  # too busy to answer in time

    def _terminate(self) -> None:
        if self._server.poll() is None:
            self._server.terminate()


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
