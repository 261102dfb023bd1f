"""Tool definitions: what vLLM's server makes of a request's tools renders like the recorded tools themselves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from loha.errors import LohaError
from loha.render import Renderer
from loha.tokenizer_dir import load_tokenizer
from loha.tools import normalize_tools

PARAMETERS = {"type": "object", "required": ["b"], "properties": {"b": {"description": "x", "type": "string"}}}
FULL = {"type": "function", "function": {"name": "bash", "description": "runs é", "parameters": PARAMETERS}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "full": [FULL],
    "name only": [{"type": "function", "function": {"name": "ls"}}],
    "other key order": [
        {"function": {"parameters": PARAMETERS, "name": "bash", "description": ""}, "type": "function"},
    ],
    "no type": [{"function": {"name": "ls", "description": None, "parameters": {}}}],
    "further keys": [
        {**FULL, "id": 7, "cache_control": {"type": "x"}, "function": {**FULL["function"], "returns": {"a": 1}}},
        FULL,
    ],
    "strict": [{"type": "function", "function": {"strict": True, "name": "a", "parameters": None}}],
    "not strict": [{"type": "function", "function": {"strict": False, "name": "a"}}],
    "deferred outside": [{"type": "function", "defer_loading": True, "function": {"name": "a", "strict": None}}],
    "deferred inside": [
        {"type": "function", "defer_loading": True, "function": {"defer_loading": False, "name": "a"}},
        {"type": "function", "defer_loading": None, "function": {"defer_loading": True, "name": "b"}},
    ],
}
MESSAGES = [{"role": "system", "content": "be good"}, {"role": "user", "content": "task"}]


def vllm_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What vLLM's chat route hands to the chat template for a request with these tools."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(messages=MESSAGES, model="m", tools=copy.deepcopy(tools))
    return [tool.model_dump() for tool in request.tools]


@pytest.mark.parametrize("tools", TOOLS.values(), ids=TOOLS)
def test_tools_of_a_request_render_like_recorded_ones(shared_data: Path, tools: list[dict[str, Any]]) -> None:
    renderer = Renderer(load_tokenizer(shared_data / "qwen3"))
    seen = vllm_tools(tools)
    text = renderer.tokenizer.apply_chat_template(MESSAGES, tools=seen, tokenize=False)
    stock = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert renderer.render(MESSAGES, tools).token_ids == renderer.render(MESSAGES, seen).token_ids == stock


@pytest.mark.parametrize("tools", TOOLS.values(), ids=TOOLS)
def test_the_form_is_vllm_s_and_stays(tools: list[dict[str, Any]]) -> None:
    clean = normalize_tools(tools)
    assert repr(clean) == repr(vllm_tools(tools)), "same keys in the same order"
    assert normalize_tools(clean) == clean


@pytest.mark.parametrize("tools", [None, [], ()])
def test_no_tools(tools: Any) -> None:
    assert normalize_tools(tools) is None


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({"type": "function"}, "must be a list"),
        ("bash", "must be a list"),
        ([FULL, "bash"], "tool 1: expected"),
        ([FULL, FULL, {"name": "bash"}], "tool 2: expected"),
        ([{"type": "function", "function": {"name": 3}}], "tool 0: expected"),
        ([{"type": "custom", "function": {"name": "a"}}], "tool 0: type"),
        ([{"function": {"name": "a", "description": 1}}], r"tool 0 \('a'\): description"),
        ([{"function": {"name": "a", "parameters": "{}"}}], r"tool 0 \('a'\): parameters"),
        ([{"function": {"name": "a", "strict": "yes"}}], "tool 0: strict"),
    ],
)
def test_bad_tools_are_refused_by_index(tools: Any, message: str) -> None:
    with pytest.raises(LohaError, match=message):
        normalize_tools(tools)
