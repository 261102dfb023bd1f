"""What the middleware adds to answers: the account of a request, suffixed names in the list of models."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from serving import metrics
from serving.account import Report, RequestAccount
from serving.model_name import LISTED
from serving.options import server_defaults
from serving.state import CHECKPOINT_VARIABLE

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_HEADER_PREFIX = b"x-loha-"
_TOO_LONG = b"Please reduce the length of the input prompt."
_TOO_LONG_CHAT = b"Please reduce the length of the messages."
"""What OpenAI says, and what some agents look for."""


class Answer:
    """Sends the answer of one request, with the account added.

    Args:
        account: filled by the renderer before the answer starts.
        send: the server's.
    """

    def __init__(self, account: RequestAccount, send: Send) -> None:
        self._account = account
        self._send = send
        self._start: Message | None = None
        self._stream = False
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        """Handle one message of the application."""
        report = self._account.report
        if message["type"] == "http.response.start" and report is not None and message["status"] in (200, 400):
            await self._begin(message, report)
        elif message["type"] == "http.response.body" and self._start is not None:
            await self._pass_body(message, self._account.report)
        elif message["type"] == "http.response.start" and message["status"] == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            # The rest of the body is never read, so no other request can follow on this connection.
            await self._send({**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]})
        else:
            await self._send(message)

    async def _begin(self, message: Message, report: Report) -> None:
        kind = dict(message.get("headers", ())).get(b"content-type", b"")
        headers = list(message.get("headers", ()))
        if message["status"] == 200:
            headers += _report_headers(report)
        self._start = {**message, "headers": headers}
        self._stream = kind.startswith(b"text/event-stream")
        if self._stream:
            await self._send(self._start)
        elif not kind.startswith(b"application/json"):
            start, self._start = self._start, None
            await self._send(start)

    async def _pass_body(self, message: Message, report: Report | None) -> None:
        assert report is not None
        self._body += message.get("body", b"")
        more = message.get("more_body", False)
        if self._stream:
            events = self._take_events(report, everything=not more)
            if not more:
                self._count(report)
            await self._send({**message, "body": events})
        elif not more:
            assert self._start is not None
            body = bytes(self._body)
            if self._start["status"] == HTTPStatus.OK:
                answer = _with_account(body, report)
                if answer is not body:  # null where the client hung up
                    self._count(report)
            else:
                answer = body.replace(_TOO_LONG, _TOO_LONG_CHAT)
            await _send_whole(self._send, self._start, answer)

    def _count(self, report: Report) -> None:
        """Count the request as answered, when its answer is whole."""
        if self._account.counted:
            metrics.count_request(report)

    def _take_events(self, report: Report, *, everything: bool) -> bytes:
        """Return the whole server-sent events received so far, those with a final usage rewritten."""
        end = len(self._body) if everything else self._body.rfind(b"\n\n") + 2
        if not everything and end < 2:
            return b""
        events = bytes(self._body[:end])
        del self._body[:end]
        if b'"usage"' not in events:
            return events
        return b"\n\n".join(_event_with_account(event, report) for event in events.split(b"\n\n"))


class ModelList:
    """Sends the answer of /v1/models, with the checkpoint's hash, the server's defaults and the suffixed names.

    Args:
        send: the server's.
        dtype: number format that the model computes in, where it is known.
    """

    def __init__(self, send: Send, dtype: str | None) -> None:
        self._send = send
        self._dtype = dtype
        self._start: Message | None = None
        self._body = b""

    async def send(self, message: Message) -> None:
        """Handle one message of the application."""
        if message["type"] == "http.response.start" and message["status"] == 200:
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await _send_whole(self._send, self._start, with_layouts(self._body, self._dtype))
        else:
            await self._send(message)


def with_layouts(body: bytes, dtype: str | None) -> bytes:
    """Return a list of models with our facts on the base models, and their suffixed names after all others."""
    try:
        listed = json.loads(body)
        bases = [card for card in listed["data"] if card.get("parent") is None]
    except (ValueError, LookupError, TypeError, AttributeError):
        return body
    for card in bases:
        checkpoint = os.environ.get(CHECKPOINT_VARIABLE)
        card["loha"] = {"checkpoint": checkpoint, "dtype": dtype, "defaults": server_defaults()}
    listed["data"] += [
        {**card, "id": f"{card['id']}:{suffix}", "parent": card["id"]} for card in bases for suffix in LISTED
    ]
    return json.dumps(listed).encode()


async def send_json(send: Send, status: int, value: Any, *headers: tuple[bytes, bytes]) -> None:
    """Send a whole JSON answer of our own."""
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", b"application/json"), *headers],
    }
    await _send_whole(send, start, json.dumps(value).encode())


async def _send_whole(send: Send, start: Message, body: bytes) -> None:
    headers = [(k, v) for k, v in start["headers"] if k != b"content-length"]
    await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
    await send({"type": "http.response.body", "body": body})


def _event_with_account(event: bytes, report: Report) -> bytes:
    lines = event.split(b"\n")
    for i, line in enumerate(lines):
        if line.startswith(b"data: {") and b'"usage"' in line:
            lines[i] = b"data: " + _with_account(line[6:], report)
    return b"\n".join(lines)


def _with_account(body: bytes, report: Report) -> bytes:
    """Return a JSON body with `usage.loha`; anything without a final usage comes back as it was."""
    try:
        value = json.loads(body)
    except ValueError:
        return body
    usage = _final_usage(value)
    if usage is None:
        return body
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    usage["loha"] = report.usage(details.get("cached_tokens", usage.get("cache_read_input_tokens")))
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _final_usage(value: Any) -> dict[str, Any] | None:
    """Return the usage object of a whole answer or of the last chunk of a stream."""
    if not isinstance(value, dict):
        return None
    if value.get("object") == "chat.completion.chunk" and value.get("choices"):
        return None
    if value.get("type") == "response.completed":
        value = value.get("response") or {}
    usage = value.get("usage")
    return usage if isinstance(usage, dict) else None


def _report_headers(report: Report) -> list[tuple[bytes, bytes]]:
    return [
        (_HEADER_PREFIX + name.replace("_", "-").encode(), str(value).encode())
        for name, value in report.usage().items()
    ]
