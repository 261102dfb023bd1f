"""Chat templates that a client sends: only with vLLM's --trust-request-chat-template. No server is started here."""

from __future__ import annotations

from typing import Any

import pytest
from histories import one_observation
from live_server import Reference
from tiny_checkpoint import TEMPLATE, TinyCheckpoint, text
from vllm.config import DeviceConfig, ModelConfig, VllmConfig
from vllm.renderers.params import ChatParams

from loha.errors import LohaError
from loha.serving_checkpoint import ServingCheckpoint
from serving import plugin
from serving.renderer import LohaChatRenderer

HISTORY = one_observation(text(41, 80))


@pytest.fixture(scope="module")
def renderer(tiny: TinyCheckpoint) -> LohaChatRenderer:
    """The server's renderer, with its defaults K=3 and P=1."""
    plugin.register()
    model = ModelConfig(model=str(tiny.serving), tokenizer_mode="loha", dtype="float32", max_model_len=16384)
    tokenizer = ServingCheckpoint.open(tiny.serving).renderer().tokenizer
    return LohaChatRenderer(VllmConfig(model_config=model, device_config=DeviceConfig("cpu")), tokenizer)


def ids(renderer: LohaChatRenderer, template: str | None) -> list[int]:
    arguments: dict[str, Any] = {"loha": {"k": 0, "polling": 1}}
    params = ChatParams(chat_template=template, chat_template_kwargs=arguments)
    return renderer.render_messages(HISTORY, params)[1]["prompt_token_ids"]


def test_another_template_is_rendered_like_the_own_one(renderer: LohaChatRenderer, reference: Reference) -> None:
    own = ids(renderer, None)
    assert own == reference.render(HISTORY, k=0).token_ids
    assert ids(renderer, TEMPLATE + "{# the same #}") == own
    assert ids(renderer, TEMPLATE.replace("<|im_start|>", "<|im_start|> ")) != own


@pytest.mark.parametrize("template", ["{{ 1/0 }}", "{{", "hello", "{{ messages[99].x.y }}", "{{ 'a' + 1 }}"])
def test_a_template_that_fails_is_told(renderer: LohaChatRenderer, template: str) -> None:
    with pytest.raises(LohaError, match="the chat template"):
        ids(renderer, template)
