"""The server's life: an engine that is killed, a restart with its latents, key and root path, a drained end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from histories import growing
from live_server import Server, options, running_server
from tiny_checkpoint import TinyCheckpoint

HISTORY = growing(4, seed=9000)[-1]
KEY = "a-key-4711"
slow = pytest.mark.skipif(os.environ.get("LOHA_E2E_SLOW", "") != "1", reason="starts servers; LOHA_E2E_SLOW=1 runs it")


def descendants(pid: int) -> dict[int, str]:
    """Return the processes below one, with their command lines."""
    found: dict[int, str] = {}
    listing = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()[1:]]
    family = {pid}
    for _ in range(8):
        for child, parent, command in rows:
            if int(parent) in family:
                family.add(int(child))
                found[int(child)] = command
    return found


def stream(server: Server, tokens: int, headers: dict[str, str], lines: list[str], first: threading.Event) -> None:
    """Read a streamed reply into `lines`."""
    body = {"model": server.model, "messages": HISTORY, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    try:
        with server.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            for line in response.iter_lines():
                lines.append(line)
                first.set()
    except httpx.TransportError as error:
        lines.append(repr(error))
    first.set()


def streaming(server: Server, tokens: int, **headers: str) -> tuple[threading.Thread, list[str]]:
    """Start a stream and return when its first line is there."""
    lines: list[str] = []
    first = threading.Event()
    thread = threading.Thread(target=stream, args=(server, tokens, headers, lines, first))
    thread.start()
    assert first.wait(300)
    return thread, lines


@slow
def test_a_killed_engine_ends_the_server_and_a_restart_replies_the_same(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    storage = {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}
    storage |= {"ec_connector_extra_config": {"shared_storage_path": str(tmp_path / "latents")}}  # type: ignore[dict-item]
    vllm_args = ["--", "--ec-transfer-config", json.dumps(storage)]
    with running_server(tiny.serving, tmp_path / "first.log", vllm_args) as server:
        before = server.counter("encoded_observations")
        reply = server.reply(HISTORY, loha=options(1))
        assert server.counter("encoded_observations") - before == 3
        assert server.client.get("/ready").status_code == 200
        thread, lines = streaming(server, 4000)
        engines = [pid for pid, command in descendants(server.process.pid).items() if "EngineCore" in command]
        assert len(engines) == 1
        os.kill(engines[0], signal.SIGKILL)
        assert server.process.wait(timeout=300) == 5  # it neither hangs nor says that all is well
        thread.join(60)
        assert not thread.is_alive()
        # vLLM closes the stream with an error or says "abort", and [DONE]; it must not look like a whole answer.
        ends = [line for line in lines if '"finish_reason":"' in line and '"finish_reason":"abort"' not in line]
        assert not ends, (len(lines), ends)
        assert not descendants(server.process.pid)

    environment = {"VLLM_API_KEY": KEY}
    vllm_args += ["--root-path", "/llm"]
    with running_server(tiny.serving, tmp_path / "second.log", vllm_args, environment) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        assert server.post(HISTORY).status_code == 401
        assert server.client.get("/v1/models").status_code == 401
        server.client.headers.update(headers)
        before = server.counter("encoded_observations")
        assert server.reply(HISTORY, loha=options(1)) == reply
        assert server.counter("encoded_observations") == before  # latents outlive the server in the shared storage
        assert server.reply(HISTORY, loha=options(1), path="/llm/v1/chat/completions") == reply
        assert server.client.get("/llm/v1/models").json()["data"][0]["loha"]["checkpoint"]
        check_that_streams_finish(server, headers)
        assert KEY not in (tmp_path / "second.log").read_text(errors="replace")


def check_that_streams_finish(server: Server, headers: dict[str, str]) -> None:
    """SIGTERM: the running stream goes on to its end, new requests are refused, the exit status is 0."""
    thread, lines = streaming(server, 300, **headers)
    server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while server.client.get("/ready").status_code == 200:
        assert time.monotonic() < deadline
    assert thread.is_alive()  # else the next lines would test nothing
    refused: Any = server.post(HISTORY)
    assert refused.status_code == 503 and "shutting down" in refused.json()["error"]["message"]
    thread.join(300)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert '"completion_tokens":300' in [line for line in lines if line][-2]
    assert server.process.wait(timeout=300) == 0


@slow
def test_a_server_that_runs_other_weights_than_it_says_never_gets_ready(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """The engine alone gets a patched rope; see test_server_self_test.py for what the comparison notices."""
    patch = '{"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}}'
    with (
        pytest.raises(AssertionError, match="error: self-test failed: on a latent request the server differs"),
        running_server(tiny.serving, tmp_path / "server.log", ["--", "--hf-overrides", patch]) as server,
    ):
        assert server.process.poll() == 4
