"""ASGI middleware: reads the top-level `loha` object of a request body and adds the account to the answer.

The options reach the renderer, in the same task, through a context variable, and so work on every route that renders
chat messages (chat completions, responses, Anthropic messages, tokenize). The body is read only when vLLM asks for it,
after it has checked the API key. The renderer checks the options; what is wrong with them is answered as HTTP 400 by
vLLM's own error handlers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from serving import metrics
from serving.account import CURRENT, Report, RequestAccount

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_OPTIONS = b'"loha"'
_NULL_CONTENT = re.compile(rb'"content"\s*:\s*null')
_UNCOUNTED = ("/tokenize", "/detokenize", "/render")
_HEADER_PREFIX = b"x-loha-"


class LohaMiddleware:
    """Added by the launcher with vLLM's `--middleware serving.middleware.LohaMiddleware`."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope.get("method") != "POST":
            await self.app(scope, receive, send)
            return
        account = RequestAccount()
        token = CURRENT.set(account)
        try:
            counted = not scope["path"].endswith(_UNCOUNTED)
            answer = _Answer(account, send, counted=counted)
            await self.app(scope, _whole_body(receive, account), answer.send)
        finally:
            CURRENT.reset(token)


def _whole_body(receive: Receive, account: RequestAccount) -> Receive:
    """Hand the body over whole, with its options read, when the application asks for it."""
    delivered = False

    async def whole() -> Message:
        nonlocal delivered
        if delivered:
            return await receive()
        chunks: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            chunks.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        delivered = True
        body, account.body_options = prepare_body(b"".join(chunks))
        return {"type": "http.request", "body": body, "more_body": False}

    return whole


def prepare_body(body: bytes) -> tuple[bytes, Any]:
    """Return the body that vLLM gets, and the value of its top-level key `loha` (None without one).

    vLLM refuses null contents of tool results, which some agents send; they become empty strings. Broken JSON is
    left for vLLM to report.
    """
    if _OPTIONS not in body and not _NULL_CONTENT.search(body):
        return body, None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body, None
    if not isinstance(value, dict):
        return body, None
    changed = _fill_null_contents(value.get("messages"))
    return (json.dumps(value).encode() if changed else body), value.get("loha")


def _fill_null_contents(messages: Any) -> bool:
    changed = False
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") != "assistant" and message.get("content", "") is None:
            message["content"] = ""
            changed = True
    return changed


class _Answer:
    """Sends the answer of one request, with the account added.

    Args:
        account: filled by the renderer before the answer starts.
        send: the server's.
        counted: whether a success counts as an answered request.
    """

    def __init__(self, account: RequestAccount, send: Send, *, counted: bool) -> None:
        self._account = account
        self._send = send
        self._counted = counted
        self._start: Message | None = None
        self._stream = False
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        """Handle one message of the application."""
        report = self._account.report
        if message["type"] == "http.response.start" and report is not None and message["status"] == 200:
            await self._begin(message, report)
        elif message["type"] == "http.response.body" and self._start is not None:
            await self._pass_body(message, self._account.report)
        else:
            await self._send(message)

    async def _begin(self, message: Message, report: Report) -> None:
        if self._counted:
            metrics.count_request(report)
        headers = list(message.get("headers", ())) + _report_headers(report)
        kind = dict(message.get("headers", ())).get(b"content-type", b"")
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
            await self._send({**message, "body": self._take_events(report, everything=not more)})
        elif not more:
            await self._finish_json(report)

    async def _finish_json(self, report: Report) -> None:
        assert self._start is not None
        body = _with_account(bytes(self._body), report)
        headers = [(k, v) for k, v in self._start["headers"] if k != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

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
    usage["loha"] = report.usage(details.get("cached_tokens"))
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
