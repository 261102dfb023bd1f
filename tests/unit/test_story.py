"""The demo's runner waits for the launcher's own word, and says which log explains a server that died."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loha.errors import LohaError

HEALTHY_THEN_READY = """
import http.server, threading, time
server = http.server.ThreadingHTTPServer(("127.0.0.1", {port}), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print("INFO: Application startup complete", flush=True)
time.sleep(1.5)
{then}
"""


@pytest.fixture(scope="module")
def story() -> Any:
    path = Path(__file__).resolve().parents[2] / "scripts/story.py"
    spec = importlib.util.spec_from_file_location("story", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["story"] = module
    spec.loader.exec_module(module)
    return module


def start(story: Any, log: Path, then: str) -> subprocess.Popen[bytes]:
    program = HEALTHY_THEN_READY.format(port=story.free_port(), then=then)
    with log.open("w") as sink:
        return subprocess.Popen([sys.executable, "-c", program], stdout=sink, stderr=sink)


def test_waits_for_the_ready_line_of_a_server_that_answers_before(story: Any, tmp_path: Path) -> None:
    process = start(story, tmp_path / "log", "print('ready: http://x/v1 serves m', flush=True); time.sleep(60)")
    try:
        story.wait_ready(process, tmp_path / "log", 60)
        assert "ready: " in (tmp_path / "log").read_text()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_server_that_dies_first_names_its_log(story: Any, tmp_path: Path) -> None:
    process = start(story, tmp_path / "log", "print('error: not live'); raise SystemExit(3)")
    with pytest.raises(
        LohaError, match=rf"exit status 3 before it was ready; see {tmp_path}/log\n(.*\n)*error: not live"
    ):
        story.wait_ready(process, tmp_path / "log", 60)
