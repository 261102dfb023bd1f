"""The middleware around small ASGI applications: what it reads from bodies and what it adds to answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from serving import metrics
from serving.account import CURRENT, Report, RequestAccount
from serving.answer import with_layouts
from serving.middleware import LohaMiddleware, prepare_body
from serving.options import RequestOptions
from serving.state import BODY_VARIABLE, CHECKPOINT_VARIABLE, FOLDER_VARIABLE, set_mark

REPORT = Report(
    options=RequestOptions(),
    observations=2,
    full_text_tokens=100,
    context_tokens=40,
    latent_tokens=5,
    encoder_tokens=70,
    encoder_tokens_new=30,
)
ACCOUNT = REPORT.usage()


def call(
    app: Any, chunks: list[bytes], path: str = "/v1/chat/completions", method: str = "POST", served: Any = None
) -> tuple[dict[str, Any], list[bytes]]:
    """Run one request through the middleware; return the response start and its body messages."""
    incoming = [
        {"type": "http.request", "body": chunk, "more_body": i < len(chunks) - 1} for i, chunk in enumerate(chunks)
    ]
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "app": served}
    asyncio.run(LohaMiddleware(app)(scope, receive, send))
    assert CURRENT.get() is None
    return sent[0], [message["body"] for message in sent[1:]]


def answering(
    *bodies: bytes,
    kind: bytes = b"application/json",
    status: int = 200,
    report: Report | None = REPORT,
    seen: Any = None,
) -> Callable[..., Any]:
    """Return an application that reads its body, sets the report as the renderer would, and answers."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        account = CURRENT.get()
        assert account is not None
        if seen is not None:
            seen.append((body, account.body_options))
        if report is not None:
            account.add(report)
        headers = [(b"content-type", kind), (b"content-length", b"1")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for i, part in enumerate(bodies):
            await send({"type": "http.response.body", "body": part, "more_body": i < len(bodies) - 1})

    return app


def test_options_are_read_and_the_body_arrives_as_it_was() -> None:
    body = json.dumps({"messages": [], "loha": {"k": 1}}).encode()
    for cut in ([body], [body[:5], body[5:9], body[9:]], [body, b""]):
        seen: list[Any] = []
        call(answering(b"{}", seen=seen), cut)
        assert seen == [(body, {"k": 1})]


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (b"", None),
        (b'{"loha": ', None),
        (b'["loha"]', None),
        (b'{"messages": [{"content": "\\"loha\\""}]}', None),
        (b'{"x": {"loha": 1}}', None),
        (b'{"loha": null}', None),
        (b'{"loha": 5}', 5),
        (b'{"loha": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    ],
)
def test_any_body_passes(body: bytes, options: Any) -> None:
    assert prepare_body(body, ["m"]) == (body, options, None)


def test_null_contents_of_results_become_empty_strings() -> None:
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    messages = [{"role": "tool", "content": None, "tool_call_id": "c"}, said, {"role": "user", "content": "x"}, 3]
    body, *_ = prepare_body(json.dumps({"messages": messages}).encode())
    assert json.loads(body)["messages"] == [{**messages[0], "content": ""}, said, messages[2], 3]  # type: ignore[dict-item]
    kept = json.dumps({"messages": [said]}).encode()
    assert prepare_body(kept) == (kept, None, None)


def test_account_is_added_to_a_json_answer() -> None:
    usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}
    answer = json.dumps({"id": "é", "usage": usage}, ensure_ascii=False).encode()
    start, (body,) = call(answering(answer[:7], answer[7:]), [b"{}"])
    assert json.loads(body) == {"id": "é", "usage": {**usage, "loha": {**ACCOUNT, "cached_tokens": 32}}}
    headers = dict(start["headers"])
    assert headers[b"content-length"] == str(len(body)).encode()
    assert headers[b"x-loha-context-tokens"] == b"40" and headers[b"x-loha-k"] == b"3"


def test_answers_without_a_report_are_untouched() -> None:
    answer = b'{"usage": {"prompt_tokens": 1}}'
    for app in (answering(answer, report=None), answering(answer, status=400)):
        start, (body,) = call(app, [b"{}"])
        assert body == answer and b"x-loha-k" not in dict(start["headers"])


def test_an_overflow_is_told_in_words_that_clients_look_for() -> None:
    answer = b'{"error": {"message": "Too much. Please reduce the length of the input prompt.", "code": 400}}'
    _, (body,) = call(answering(answer, status=400), [b"{}"])
    assert json.loads(body)["error"]["message"] == "Too much. Please reduce the length of the messages."


def test_a_suffix_is_taken_off_the_name_and_read() -> None:
    for model in ("m:k3p8", "m\\u003ak3p8"):
        body = b'{"model": "%s", "messages": []}' % model.encode()
        prepared = prepare_body(body, ["m"])
        assert json.loads(prepared.body) == {"model": "m", "messages": []}
        assert prepared.model_options == {"k": "3", "polling": "8"}
        assert prepare_body(body, ["other"]).body == body


@pytest.mark.parametrize(("model", "status"), [("m:k-1", 400), ("m:k3p0", 400), ("m:kthree", 400), ("m:latest", 404)])
def test_a_refused_name_is_a_400_when_its_layout_is_impossible(model: str, status: int) -> None:
    models = SimpleNamespace(base_model_paths=[SimpleNamespace(name="m")])  # where vLLM keeps its served names
    served = SimpleNamespace(state=SimpleNamespace(openai_serving_models=models))
    with pytest.raises(HTTPException) as refused:
        call(answering(b"{}"), [json.dumps({"model": model, "messages": []}).encode()], served=served)
    assert refused.value.status_code == status and "k3p8 (K=3, P=8)" in refused.value.detail


def test_a_body_over_the_limit_is_refused_while_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BODY_VARIABLE, "1")
    call(answering(b"{}"), [b" " * 2**20])
    with pytest.raises(HTTPException) as refused:
        call(answering(b"{}"), [b" " * 2**20, b" ", b" " * 2**20])
    assert refused.value.status_code == 413 and "--max-body-mib" in refused.value.detail


def test_readiness_and_draining_follow_the_marks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})

    assert call(app, [b""], "/ready", method="GET")[0]["status"] == 503
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert call(app, [b""], "/ready", method="GET")[0]["status"] == 503
    set_mark(tmp_path, "ready")
    assert call(app, [b""], "/ready", method="GET")[0]["status"] == 200
    assert call(app, [b"{}"])[0]["status"] == 204
    set_mark(tmp_path, "draining")
    assert call(app, [b""], "/ready", method="GET")[0]["status"] == 503
    start, (body,) = call(app, [b"{}"])
    assert start["status"] == 503 and b"shutting down" in body
    assert call(app, [b""], "/health", method="GET")[0]["status"] == 204


def test_the_list_of_models_names_suffixes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECKPOINT_VARIABLE, "abc")
    cards = [{"id": "m", "parent": None, "max_model_len": 9}, {"id": "lora", "parent": "m"}]
    listed = json.loads(with_layouts(json.dumps({"data": cards}).encode(), "float32"))["data"]
    assert [card["id"] for card in listed[:3]] == ["m", "lora", "m:k0"]
    assert {"m:k8", "m:kinf", "m:mask", "m:full"} < {card["id"] for card in listed}
    assert all(card["parent"] == "m" and card["max_model_len"] == 9 for card in listed[2:])
    assert listed[0]["loha"]["checkpoint"] == "abc" and listed[0]["loha"]["dtype"] == "float32"
    for body in (b"", b"[]", b'{"data": 3}'):
        assert with_layouts(body, None) == body


def event(**value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


CHUNK = event(object="chat.completion.chunk", choices=[{"delta": {"content": '"usage"'}}], usage={"prompt_tokens": 1})
PLAIN = event(object="chat.completion.chunk", choices=[{"delta": {"content": "hé"}}])
LAST = event(object="chat.completion.chunk", choices=[], usage={"prompt_tokens": 40})
DONE = b"data: [DONE]\n\n"


def parsed(stream: bytes) -> list[Any]:
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n") if line]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


def test_only_the_last_chunk_of_a_stream_changes() -> None:
    stream = PLAIN + CHUNK + LAST + DONE
    expected = [*parsed(PLAIN + CHUNK), {**parsed(LAST)[0], "usage": {"prompt_tokens": 40, "loha": ACCOUNT}}, b"[DONE]"]
    for size in (1, 13, len(stream)):
        parts = [stream[i : i + size] for i in range(0, len(stream), size)]
        start, bodies = call(answering(*parts, b"", kind=b"text/event-stream; charset=utf-8"), [b"{}"])
        assert parsed(b"".join(bodies)) == expected
        assert dict(start["headers"])[b"x-loha-latent-tokens"] == b"5"


def counted(monkeypatch: pytest.MonkeyPatch, app: Any, path: str = "/v1/chat/completions") -> int:
    counted: list[Report] = []
    monkeypatch.setattr(metrics, "count_request", counted.append)
    call(app, [b"{}"], path)
    return len(counted)


def test_only_whole_answers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = b'{"usage": {"prompt_tokens": 40}}'
    assert counted(monkeypatch, answering(usage)) == 1
    assert counted(monkeypatch, answering(usage), "/v1/messages/count_tokens") == 0
    assert counted(monkeypatch, answering(b"null")) == 0, "what vLLM sends to a client that has hung up"
    assert counted(monkeypatch, answering(b"{}", status=400)) == 0
    assert counted(monkeypatch, answering(PLAIN, DONE, kind=b"text/event-stream")) == 1

    async def cut_off(scope: Any, receive: Any, send: Any) -> None:
        account = CURRENT.get()
        assert account is not None
        account.add(REPORT)
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": PLAIN, "more_body": True})

    assert counted(monkeypatch, cut_off) == 0


def test_several_renderings_of_a_request_add_up() -> None:
    account = RequestAccount()
    account.add(REPORT)
    account.add(REPORT)
    assert account.report is not None and account.report.usage() == {
        **{name: 2 * value if isinstance(value, int) else value for name, value in ACCOUNT.items()},
        "k": 3,
        "polling": 1,
    }


def test_vllm_cuts_error_texts_before_it_cleans_them() -> None:
    from vllm.entrypoints.serve.exception_handling import error_response
    from vllm.entrypoints.serve.exception_handling.handlers import http, validation

    LohaMiddleware(None)
    LohaMiddleware(None)
    for module in (error_response, http, validation):
        cleaned = module.sanitize_message("see /tmp/x.py: " + "/a" * 500_000)
        assert cleaned.startswith("see <path>: /a/a") and len(cleaned) < 1100


def test_stream_events_are_not_held_back() -> None:
    _, bodies = call(answering(PLAIN, PLAIN, DONE, kind=b"text/event-stream"), [b"{}"])
    assert bodies == [PLAIN, PLAIN, DONE]


def test_events_of_the_other_apis_get_the_account() -> None:
    completed = b"event: response.completed\n" + event(
        type="response.completed", response={"usage": {"input_tokens": 1}}
    )
    delta = b"event: message_delta\n" + event(type="message_delta", usage={"output_tokens": 1})
    _, bodies = call(answering(completed, delta, kind=b"text/event-stream"), [b"{}"], path="/v1/responses")
    first, second = (json.loads(body.split(b"data: ")[1]) for body in bodies)
    assert first["response"]["usage"]["loha"] == ACCOUNT
    assert second["usage"]["loha"] == ACCOUNT
