"""A proxy in front of a real server that decides what the model says, so that an agent runs to its end on any weights.

Each chat request is passed on with one more field, `structured_outputs: {"choice": [TEXT]}`: constrained decoding then
generates exactly the next text of the script. Rendering, latents, scheduling, decoding, tool parsing and the account
are the server's own. Standard library only.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def bash_call(thought: str, command: str) -> str:
    """Return a turn in Hermes format that says something and calls bash."""
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"{thought}\n<tool_call>\n{call}\n</tool_call>"


@contextmanager
def scripted_model(server: str, script: Sequence[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run the proxy while the block runs.

    Args:
        server: its URL without /v1.
        script: the model's turns; the n-th turn of a history gets the n-th text, the last one from then on.

    Yields:
        The proxy's URL with /v1, and the `usage` objects of the answers so far.
    """
    usages: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            turn = sum(message["role"] == "assistant" for message in body["messages"])
            body["structured_outputs"] = {"choice": [script[min(turn, len(script) - 1)]]}
            headers = {"Content-Type": "application/json"}
            if key := self.headers.get("Authorization"):
                headers["Authorization"] = key
            request = urllib.request.Request(server + self.path, json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request) as response:
                    status, content = response.status, response.read()
            except urllib.error.HTTPError as error:
                status, content = error.code, error.read()
            if status == 200:
                usages.append(json.loads(content)["usage"])
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}/v1", usages
    finally:
        proxy.shutdown()
        thread.join()
