"""Ending a server: small real HTTP servers in place of vLLM's, signals sent to this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from serving import supervise
from serving.launch import NOT_LIVE, Options, attend
from serving.options import RequestOptions
from serving.state import FOLDER_VARIABLE, has_mark
from serving.supervise import Drain, start_server, stop

IDLE = b"loha_requests_in_flight 0.0\n"
WAITING = [sys.executable, "-c", "import time; time.sleep(600)"]


@contextmanager
def metrics_server(answer: Callable[[], bytes]) -> Iterator[httpx.Client]:
    """Serve what `answer` returns, however long it takes; yield a client."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = answer()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing."""

        def handle(self) -> None:
            with suppress(OSError):  # the client did not wait for the answer
                super().handle()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        with httpx.Client(base_url=f"http://127.0.0.1:{served.server_port}") as client:
            yield client
        served.shutdown()


def drained(client: httpx.Client, server: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Send SIGTERM to this process and wait for the drain that it begins."""
    with Drain(server, client, timeout_s, begin=lambda: None) as drain:
        os.kill(os.getpid(), signal.SIGTERM)
        drain.wait()
        assert server.wait() == -signal.SIGTERM


def test_a_server_that_is_too_busy_to_answer_is_not_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_ASK_S", 0.2)
    server = start_server(WAITING, dict(os.environ))
    second = threading.Event()
    running: list[bool] = []

    def answer() -> bytes:
        running.append(server.poll() is None)
        if len(running) == 1:
            second.wait(60)  # longer than it is waited for
        second.set()
        return IDLE

    try:
        with metrics_server(answer) as client:
            drained(client, server, 60)
    finally:
        second.set()
        stop(server)
    assert running == [True, True]


def test_a_server_that_never_answers_is_ended_when_the_time_is_over() -> None:
    server = start_server(WAITING, dict(os.environ))
    over = threading.Event()
    try:
        with metrics_server(lambda: IDLE if over.wait(60) else b"") as client:
            drained(client, server, 0.5)
            over.set()
    finally:
        over.set()
        stop(server)


SERVER = """
import os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

port, healthy, signal_at = int(sys.argv[1]), sys.argv[2] == "healthy", sys.argv[3]
signal.signal(signal.SIGTERM, lambda *_: os._exit(1))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        global signal_at
        if self.path.startswith(signal_at):
            signal_at = "never"
            os.kill(os.getppid(), signal.SIGTERM)
        body = b"loha_engine_live 0.0\\n"
        self.send_response(200 if healthy else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.mark.parametrize(
    ("health", "signal_at", "status"),
    [("waiting", "/health", 0), ("healthy", "/metrics", 0), ("healthy", "never", NOT_LIVE)],
)
def test_sigterm_before_it_is_ready_ends_it_with_0_and_no_word(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    health: str,
    signal_at: str,
    status: int,
) -> None:
    """While it starts and while it is checked; the last case is the same server without a signal."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as probe:
        port = probe.server_port
    server = start_server([sys.executable, "-c", SERVER, str(port), health, signal_at], dict(os.environ))
    options = Options(checkpoint=tmp_path, port=port, drain_timeout_s=30)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        assert attend(server, client, options, RequestOptions(), str(tmp_path)) == status
    assert server.poll() is not None and not has_mark("ready") and has_mark("draining") == (status == 0)
    assert ("error:" in capsys.readouterr().err) == (status != 0)


def test_sigterm_before_the_server_is_started_ends_the_launcher_with_0() -> None:
    program = "import os, signal; from serving.supervise import ending_quietly\n"
    program += "with ending_quietly(): os.kill(os.getpid(), signal.SIGTERM); signal.pause()"
    assert subprocess.run([sys.executable, "-c", program], timeout=100, check=False).returncode == 0
