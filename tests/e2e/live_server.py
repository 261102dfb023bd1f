"""A running `loha serve`, the reference that its replies are compared with, and how the tests talk to both."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loha.layout import Window, format_k
from loha.rendering import Rendering
from serving.liveness import read_counter

NEW_TOKENS = 8
MAX_MODEL_LEN = 16384
START_S = 900  # three processes import torch and vLLM one after the other, on a machine that may be busy


@dataclass(frozen=True)
class Server:
    """A running `loha serve`."""

    client: httpx.Client
    model: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def base_url(self) -> str:
        """Of the OpenAI API."""
        return f"{str(self.client.base_url).rstrip('/')}/v1"

    def post(
        self, messages: Any, *, loha: Any = None, path: str = "/v1/chat/completions", **body: Any
    ) -> httpx.Response:
        """Send one greedy chat request of NEW_TOKENS tokens."""
        request = {"model": self.model, "messages": messages, "temperature": 0.0, "max_tokens": NEW_TOKENS}
        request |= {"ignore_eos": True, "return_token_ids": True} | body
        if loha is not None:
            request["loha"] = loha
        return self.client.post(path, json=request)

    def reply(self, messages: Any, *, loha: Any = None, **body: Any) -> list[int]:
        """Return the token ids of a greedy reply."""
        response = self.post(messages, loha=loha, **body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    def counter(self, name: str) -> float:
        """Return one of our counters."""
        return read_counter(self.client, f"loha_{name}_total")

    def engine_counter(self, name: str) -> float:
        """Return one of vLLM's counters."""
        return read_counter(self.client, f"vllm:{name}_total")


@dataclass(frozen=True)
class Reference:
    """The transformers path over the same checkpoint."""

    model: Any

    def render(self, messages: Any, *, k: int | None, polling: int = 1, **kwargs: Any) -> Any:
        """Return the rendering that the server should make of a request."""
        window = Window(k=k, polling=polling)
        rendering: Rendering = self.model.renderer.render(messages, window=window, add_generation_prompt=True, **kwargs)
        return rendering

    def reply(self, messages: Any, *, k: int | None, polling: int = 1, **kwargs: Any) -> list[int]:
        """Return the token ids of a greedy reply."""
        rendering = self.render(messages, k=k, polling=polling, **kwargs)
        return self.model.greedy(rendering, NEW_TOKENS, ignore_eos=True)


def options(k: int | None, polling: int = 1, **more: Any) -> dict[str, Any]:
    """Return the `loha` object of a request."""
    return {"k": format_k(k), "polling": polling, **more}


@contextmanager
def running_server(
    checkpoint: Path, log: Path, vllm_args: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run `loha serve` with K=1 and P=2, and end it with SIGTERM."""
    port = free_port()
    command = [sys.executable, "-c", "from loha.cli import main; main()", "serve", str(checkpoint)]
    command += ["--k", "1", "--polling", "2", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), *vllm_args]
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=quiet_environment() | dict(environment or {})
        )
    try:
        wait_for_line(log, "ready: ", process)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300.0) as client:
            yield Server(client, checkpoint.name, process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=300)


def quiet_environment() -> dict[str, str]:
    """Return an environment for a child: one thread, nothing sent anywhere."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_line(log: Path, start: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a line of the log begins with `start`."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        lines = log.read_text(errors="replace").splitlines()
        if any(line.startswith(start) for line in lines):
            return
        assert process.poll() is None, "the server ended:\n" + "\n".join(lines[-60:])
        time.sleep(0.5)
    raise AssertionError(f"no line {start!r} in {log} after {START_S} s")
