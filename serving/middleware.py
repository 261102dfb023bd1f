"""ASGI middleware: reads options of a request from its body and its model's name, adds the account to the answer.

The options reach the renderer, in the same task, through a context variable, and so work on every route that renders
chat messages (chat completions, responses, Anthropic messages, tokenize). The body is read only when vLLM asks for it,
after it has checked the API key. The renderer checks the options; what is wrong with them is answered as HTTP 400 by
vLLM's own error handlers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

from fastapi import HTTPException

from loha.errors import LohaError
from serving import metrics
from serving.account import CURRENT, RequestAccount
from serving.answer import Answer, ModelList, Receive, Send, send_json
from serving.error_texts import bound_error_texts
from serving.model_name import ImpossibleLayout, read_model_name
from serving.state import BODY_VARIABLE, DEFAULT_BODY_MIB, has_mark

_OPTIONS = b'"loha"'
_NULL_CONTENT = re.compile(rb'"content"\s*:\s*null')
_SUFFIXED_MODEL = re.compile(rb'"model"\s*:\s*"[^"]*(?::|\\)')
_UNCOUNTED = ("/tokenize", "/detokenize", "/render", "/count_tokens")
"""Routes that render without generating."""
_DRAINING = {
    "message": "The server is shutting down and takes no new requests; try again in a moment.",
    "type": "ServiceUnavailableError",
    "param": None,
    "code": 503,
}


class LohaMiddleware:
    """Added by the launcher with vLLM's `--middleware serving.middleware.LohaMiddleware`."""

    def __init__(self, app: Any) -> None:
        self.app = app
        bound_error_texts()  # vLLM's handlers are imported by now

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope.get("method") == "POST":
            await self._post(scope, receive, send)
        elif scope["path"].endswith("/v1/models"):
            await self.app(scope, receive, ModelList(send, _dtype(scope)).send)
        elif scope["path"].removeprefix(scope.get("root_path", "")) == "/ready":
            ready = has_mark("ready") and not has_mark("draining")
            await send_json(send, 200 if ready else 503, {"ready": ready})
        else:
            await self.app(scope, receive, send)

    async def _post(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if has_mark("draining"):
            await send_json(send, 503, {"error": _DRAINING}, (b"retry-after", b"5"), (b"connection", b"close"))
            return
        account = RequestAccount(counted=not scope["path"].endswith(_UNCOUNTED))
        token = CURRENT.set(account)
        try:
            answer = Answer(account, send)
            with metrics.in_flight():
                await self.app(scope, _whole_body(receive, account, _served_names(scope)), answer.send)
        finally:
            CURRENT.reset(token)


class PreparedBody(NamedTuple):
    """A request body as vLLM gets it, and what was found in it."""

    body: bytes
    options: Any = None
    """The value of its top-level key `loha`."""
    model_options: dict[str, Any] | None = None
    """What the suffix of its model's name asks for."""


def _whole_body(receive: Receive, account: RequestAccount, served: Sequence[str]) -> Receive:
    """Hand the body over whole, with its options read, when the application asks for it."""
    delivered = False
    limit = int(os.environ.get(BODY_VARIABLE, DEFAULT_BODY_MIB)) << 20

    async def whole() -> MutableMapping[str, Any]:
        nonlocal delivered
        if delivered:
            return await receive()
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit:
                raise HTTPException(413, f"the request body is larger than {limit >> 20} MiB (--max-body-mib)")
            if not message.get("more_body", False):
                break
        delivered = True
        try:
            prepared = prepare_body(b"".join(chunks), served)
        except ImpossibleLayout as error:
            raise HTTPException(400, str(error)) from error
        except LohaError as error:
            raise HTTPException(404, str(error)) from error
        account.body_options, account.model_options = prepared.options, prepared.model_options
        return {"type": "http.request", "body": prepared.body, "more_body": False}

    return whole


def prepare_body(body: bytes, served: Sequence[str] = ()) -> PreparedBody:
    """Read our options from a body.

    vLLM refuses null contents of tool results, which some agents send; they become empty strings. A suffix is taken off
    the model's name. Broken JSON is left for vLLM to report.

    Args:
        body: as the client sent it.
        served: names of the served models.

    Raises:
        ImpossibleLayout: for a K or P in a served model's name that cannot be.
        LohaError: for another unknown suffix of it.
    """
    if _OPTIONS not in body and not _NULL_CONTENT.search(body) and not _SUFFIXED_MODEL.search(body):
        return PreparedBody(body)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return PreparedBody(body)
    if not isinstance(value, dict):
        return PreparedBody(body)
    changed = _fill_null_contents(value.get("messages"))
    model_options = None
    if isinstance(value.get("model"), str):
        named = read_model_name(value["model"], served)
        changed |= named.model != value["model"]
        value["model"], model_options = named.model, named.options
    return PreparedBody(json.dumps(value).encode() if changed else body, value.get("loha"), model_options)


def _fill_null_contents(messages: Any) -> bool:
    changed = False
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, list):  # a conversation of the batch route
            changed |= _fill_null_contents(message)
        elif isinstance(message, dict) and message.get("role") != "assistant" and message.get("content", "") is None:
            message["content"] = ""
            changed = True
    return changed


def _served_names(scope: MutableMapping[str, Any]) -> list[str]:
    """Return the names under which vLLM serves its model; empty outside vLLM."""
    models = _served_models(scope)
    return [] if models is None else [path.name for path in models.base_model_paths]


def _dtype(scope: MutableMapping[str, Any]) -> str | None:
    models = _served_models(scope)
    return None if models is None else str(models.model_config.dtype).removeprefix("torch.")


def _served_models(scope: MutableMapping[str, Any]) -> Any:
    return getattr(getattr(scope.get("app"), "state", None), "openai_serving_models", None)
