"""What vLLM's server offers, on prompts with latents: n, logprobs, structured output, parallel calls, other routes."""

from __future__ import annotations

import json
import math
from typing import Any

import httpx
import pytest
from histories import TOOLS, growing, one_observation
from live_server import Reference, Server, options
from tiny_checkpoint import text

BODY = text(41, 80)
ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize")


def request_on(route: str, model: str, body: str, **more: Any) -> dict[str, Any]:
    """Return the same history as each route writes it: a task, one call, its result."""
    if route == "/v1/responses":
        result = {"type": "function_call_output", "call_id": "c", "output": body}
        call = {"type": "function_call", "call_id": "c", "name": "bash", "arguments": '{"command": "ls"}'}
        return {
            "model": model,
            "max_output_tokens": 4,
            "input": [{"role": "user", "content": "task"}, call, result],
        } | more
    if route == "/v1/messages":
        call = {"type": "tool_use", "id": "c", "name": "bash", "input": {"command": "ls"}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": body}
        messages = [
            {"role": "user", "content": "task"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        return {"model": model, "max_tokens": 4, "messages": messages} | more
    limit = {} if route == "/tokenize" else {"max_tokens": 4, "temperature": 0.0}
    return {"model": model, "messages": one_observation(body), **limit} | more


def post(server: Server, route: str, **more: Any) -> httpx.Response:
    return server.client.post(route, json=request_on(route, more.pop("model", server.model), BODY, **more))


def events(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def test_several_choices_differ_and_share_the_prompt(server: Server) -> None:
    answer = post(server, ROUTES[0], n=3, temperature=2.0, max_tokens=12, seed=1, loha=options(0)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["loha"]["latent_tokens"] > 0


def test_log_probabilities_are_those_of_the_reference(server: Server, reference: Reference) -> None:
    more = {"logprobs": True, "top_logprobs": 5, "return_tokens_as_token_ids": True, "loha": options(0)}
    first = post(server, ROUTES[0], **more).json()["choices"][0]["logprobs"]["content"][0]
    rendering = reference.render(one_observation(BODY), k=0)
    expected = reference.model.logits(rendering)[-1].log_softmax(-1)
    for entry in first["top_logprobs"]:
        assert math.isclose(entry["logprob"], float(expected[int(entry["token"].split(":")[1])]), abs_tol=1e-3)


def test_structured_output_holds_on_a_latent_prompt(server: Server) -> None:
    wanted = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    schema = {"type": "json_schema", "json_schema": {"name": "pick", "schema": wanted, "strict": True}}
    answer = post(server, ROUTES[0], response_format=schema, max_tokens=100, loha=options(0)).json()
    choice = answer["choices"][0]
    if choice["finish_reason"] == "stop":
        assert json.loads(choice["message"]["content"])["a"] in ("x", "y")
    else:  # a random model may fill the object with white space until its tokens are used up
        assert choice["message"]["content"].lstrip()[:1] == "{"
    picked = post(server, ROUTES[0], structured_outputs={"choice": ["left", "right"]}, max_tokens=20, loha=options(0))
    assert picked.json()["choices"][0]["message"]["content"] in ("left", "right")


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_calls_are_parsed(server: Server, stream: bool) -> None:
    commands = ["ls", "pwd"]
    said = "\n".join(
        f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'
        for command in commands
    )
    more = {"tools": TOOLS, "structured_outputs": {"choice": [said]}, "max_tokens": 300, "stream": stream}
    response = post(server, ROUTES[0], loha=options(0), **more)
    assert response.status_code == 200, response.text
    arguments: dict[int, str] = {}
    if stream:
        for chunk in events(response):
            for call in (chunk["choices"] or [{"delta": {}}])[0]["delta"].get("tool_calls") or []:
                arguments[call["index"]] = arguments.get(call["index"], "") + (call["function"].get("arguments") or "")
    else:
        calls = response.json()["choices"][0]["message"]["tool_calls"]
        arguments = {index: call["function"]["arguments"] for index, call in enumerate(calls)}
    assert [json.loads(arguments[index])["command"] for index in sorted(arguments)] == commands


def test_results_of_parallel_calls_in_any_order_are_observations(server: Server, reference: Reference) -> None:
    ask = [{"id": f"c{i}", "type": "function", "function": {"name": "bash", "arguments": "{}"}} for i in range(2)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": text(60 + i, 70)} for i in (1, 0)]
    history = [{"role": "user", "content": "task"}, {"role": "assistant", "content": "", "tool_calls": ask}, *results]
    assert server.post(history, loha=options(0)).json()["usage"]["loha"]["observations"] == 2
    assert server.reply(history, loha=options(1)) == reference.reply(history, k=1)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_takes_options_in_the_body_and_in_the_name(
    server: Server, reference: Reference, route: str
) -> None:
    latent = post(server, route, loha=options(0))
    named = post(server, route, model=f"{server.model}:k0p1")
    assert latent.status_code == named.status_code == 200, latent.text + named.text
    if route == "/tokenize":
        assert latent.json()["tokens"] == named.json()["tokens"]
        assert latent.json()["count"] == reference.render(one_observation(BODY), k=0).context_tokens
        return
    assert latent.json()["usage"]["loha"]["latent_tokens"] > 0
    assert named.json()["usage"]["loha"]["context_tokens"] == latent.json()["usage"]["loha"]["context_tokens"]
    full = post(server, route, model=f"{server.model}:full").json()["usage"]["loha"]
    assert (full["view"], full["latent_tokens"]) == ("full", 0)


@pytest.mark.parametrize("route", ROUTES[1:3])
def test_streams_of_the_other_routes_end_with_the_account(server: Server, route: str) -> None:
    response = post(server, route, stream=True, loha=options(0))
    assert response.status_code == 200, response.text
    found = [each for each in events(response) if each.get("type") in ("response.completed", "message_delta")]
    usage = found[-1].get("usage") or found[-1]["response"]["usage"]
    assert usage["loha"]["latent_tokens"] > 0


def test_the_system_prompt_of_the_anthropic_route_and_token_counts(server: Server) -> None:
    body = request_on(ROUTES[2], server.model, BODY, system="Be brief.")
    counted = server.client.post("/v1/messages/count_tokens", json={**body, "loha": options(0)})
    answered = server.client.post("/v1/messages", json={**body, "loha": options(0)})
    assert counted.json()["input_tokens"] == answered.json()["usage"]["loha"]["context_tokens"]


def test_names_with_layouts_are_listed_and_precede_only_the_defaults(server: Server) -> None:
    names = [card["id"] for card in server.client.get("/v1/models").json()["data"]]
    assert names[0] == server.model and {f"{server.model}:k8", f"{server.model}:kinf"} < set(names)
    for name in names:
        assert post(server, ROUTES[0], model=name).status_code == 200, name

    def layout(**more: Any) -> tuple[Any, int]:
        account = post(server, ROUTES[0], **more).json()["usage"]["loha"]
        return account["k"], account["polling"]

    name = f"{server.model}:k5p3"
    assert layout(model=f"{server.model}:k5") == (5, 2)  # what the name leaves out is the server's default
    assert layout(model=name) == (5, 3)
    assert layout(model=name, chat_template_kwargs={"loha": {"k": 6}}) == (6, 3)
    assert layout(model=name, chat_template_kwargs={"loha": {"k": 6}}, loha={"k": 7}) == (7, 3)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("suffix", "status"), [("k-1", 400), ("k3p0", 400), ("kthree", 400), ("latest", 404)])
def test_refused_suffixes_say_what_is_allowed(server: Server, route: str, suffix: str, status: int) -> None:
    response = post(server, route, model=f"{server.model}:{suffix}")
    assert response.status_code == status
    assert "k3p8 (K=3, P=8)" in response.json()["error"]["message"]


@pytest.mark.parametrize("more", [{"loha": {"k": "/a" * 100_000}}, {"model": "/a" * 100_000}], ids=["k", "model"])
@pytest.mark.parametrize("route", ROUTES)
def test_what_looks_like_a_path_costs_nothing(server: Server, route: str, more: dict[str, Any]) -> None:
    """vLLM searches error texts for paths; 200 KB would take it hours."""
    response = post(server, route, **more)
    assert response.status_code in (400, 404)
    assert len(response.text) < 2000


def test_the_batch_route_reports_the_sum(server: Server) -> None:
    messages = [one_observation(BODY), one_observation(text(43, 60))]
    alone = [
        server.client.post(ROUTES[0], json={"model": server.model, "messages": each, "max_tokens": 2}).json()["usage"]
        for each in messages
    ]
    body = {"model": server.model, "messages": messages, "max_tokens": 2}
    usage = server.client.post("/v1/chat/completions/batch", json=body).json()["usage"]
    assert usage["prompt_tokens"] == usage["loha"]["context_tokens"] == sum(each["prompt_tokens"] for each in alone)


def test_counting_tokens_is_no_answer_and_meets_nothing(server: Server) -> None:
    body = request_on("/v1/messages", server.model, f"new {text(47, 80)}", loha=options(0))
    before = server.counter("requests")
    assert server.client.post("/v1/messages/count_tokens", json=body).status_code == 200
    assert server.counter("requests") == before
    assert server.client.post("/v1/messages", json=body).json()["usage"]["loha"]["encoder_tokens_new"] > 0
    assert server.counter("requests") == before + 1


def test_an_overflow_says_what_clients_look_for_on_every_route(server: Server) -> None:
    flood = text(51, 5000) * 8
    for route in ROUTES[:3]:
        response = server.client.post(route, json=request_on(route, f"{server.model}:kinf", flood))
        message = response.json()["error"]["message"]
        assert response.status_code == 400
        assert "This model's maximum context length is 16384 tokens." in message
        assert "Please reduce the length of the messages" in message


def test_between_moves_the_context_only_grows_and_the_engine_reuses_all_of_it(
    server: Server, reference: Reference
) -> None:
    """vLLM's own counter of prefix hits, in blocks of 32, against the positions that two contexts share."""
    histories = growing(17, seed=7000)
    before: list[int] = []
    moves = []
    for step, history in enumerate(histories):
        rendering = reference.render(history, k=1, polling=8)
        ids = [*rendering.token_ids]
        for latent in rendering.latents:  # a latent position is what its observation is, not its placeholder
            for position in range(latent.start, latent.start + latent.count + 2):
                ids[position] = hash((latent.encoder_ids, position - latent.start))
        shared = next((i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before))
        hits = server.engine_counter("prefix_cache_hits")
        server.reply(history, loha=options(1, 8), max_tokens=1)
        assert server.engine_counter("prefix_cache_hits") - hits == shared // 32 * 32, step
        if shared < len(before):
            moves.append(step)
        before = ids
    assert moves == [7, 15]  # 0-based: at every eighth observation


def test_messages_never_reach_the_log(server: Server) -> None:
    secret = "xyzzy-plugh-4711"
    bad: list[Any] = [
        {"model": server.model, "messages": one_observation(f"{secret} {BODY}")},
        {"model": server.model, "messages": [{"role": "user", "content": {"type": secret}}]},
        {"model": server.model, "messages": [{"role": secret, "content": secret}]},
        {"model": server.model, "messages": one_observation(secret + text(51, 5000) * 8), "loha": options(None)},
        {"model": server.model, "messages": secret},
        {"model": server.model, "messages": one_observation(secret), "loha": {"view": secret}},
        {"model": server.model, "messages": one_observation(secret), "tools": [{"type": secret}]},
        {"model": f"{server.model}:{secret}", "messages": one_observation(secret)},
        {"model": server.model, "messages": one_observation(secret), "structured_outputs": {"regex": f"({secret}"}},
    ]
    for route in ROUTES[1:3]:
        for more in ({"loha": {"view": BODY}}, {"tools": [{"type": secret}]}, {"model": f"{server.model}:{secret}"}):
            response = server.client.post(route, json=request_on(route, server.model, secret) | more)
            assert 400 <= response.status_code < 500, response.text
    statuses = [server.client.post(ROUTES[0], json=body).status_code for body in bad]
    statuses.append(server.client.post(ROUTES[0], content=b'{"messages": "' + secret.encode()).status_code)
    assert statuses[0] == 200 and all(400 <= status < 500 for status in statuses[1:]), statuses
    assert secret not in server.log.read_text(errors="replace")
    assert "POST /v1/chat/completions" in server.log.read_text(errors="replace")
