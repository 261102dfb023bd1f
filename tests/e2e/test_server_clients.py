"""The openai package, and the message shapes that OpenHands sends, against the real server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from histories import TOOLS, one_observation
from live_server import Server, options
from tiny_checkpoint import text

BODY = text(43, 90)


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    """The openai package on the server."""
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def test_whole_and_streamed_replies_agree(server: Server, client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"messages": one_observation(BODY), "temperature": 0.0, "max_tokens": 10}
    request["extra_body"] = {"loha": options(0), "ignore_eos": True}
    whole = client.chat.completions.create(model=server.model, **request)
    assert whole.usage is not None and whole.usage.model_dump()["loha"]["latent_tokens"] > 0
    stream = client.chat.completions.create(
        model=server.model, stream=True, stream_options={"include_usage": True}, **request
    )
    said, last = "", None
    for chunk in stream:
        said += "".join(choice.delta.content or "" for choice in chunk.choices)
        last = chunk
    assert said == whole.choices[0].message.content
    assert last is not None and last.usage is not None
    assert last.usage.model_dump()["loha"]["latent_tokens"] == whole.usage.model_dump()["loha"]["latent_tokens"]


def test_tools_by_name_and_models(server: Server, client: openai.OpenAI) -> None:
    called = client.chat.completions.create(
        model=f"{server.model}:k0p1",
        messages=one_observation(BODY),  # type: ignore[arg-type]
        tools=TOOLS,  # type: ignore[arg-type]
        tool_choice={"type": "function", "function": {"name": "bash"}},
        max_tokens=60,
    )
    calls = called.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls] == ["bash"]  # type: ignore[union-attr]
    assert f"{server.model}:k8" in [model.id for model in client.models.list()]


def test_refusals_arrive_as_the_package_s_exceptions(server: Server, client: openai.OpenAI) -> None:
    for error, suffix in ((openai.NotFoundError, "latest"), (openai.BadRequestError, "k-1")):
        with pytest.raises(error, match="k3p8"):
            client.chat.completions.create(
                model=f"{server.model}:{suffix}", messages=[{"role": "user", "content": "x"}]
            )
    with pytest.raises(openai.BadRequestError, match="reduce the length of the messages"):
        client.chat.completions.create(model=server.model, messages=[{"role": "user", "content": text(51, 5000) * 8}])


def test_the_shapes_of_openhands_read_like_plain_ones(server: Server) -> None:
    """With native tool calling: contents are lists of parts, an assistant that only calls has an empty list."""

    def parts(content: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": content}]

    plain: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, *one_observation(BODY)]
    shaped: list[dict[str, Any]] = [{**message, "content": parts(message["content"])} for message in plain]
    shaped[2]["content"] = []
    shaped[2]["tool_calls"][0]["index"] = 0
    shaped[3]["name"] = "bash"
    follow: dict[str, Any] = {"role": "user", "content": "go on"}
    assert server.reply([*shaped, {**follow, "content": parts("go on")}], loha=options(0)) == server.reply(
        [*plain, follow], loha=options(0)
    )
