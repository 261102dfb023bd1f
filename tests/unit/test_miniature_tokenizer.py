"""The miniature's tokenizer, template and views against transformers and the renderer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from miniature import world
from miniature.tokenizer import ENVELOPE, MEMORY, SPECIAL, build_tokenizer
from miniature.words import KEYS, VALUES


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_each_word_is_one_token(tokenizer: Any) -> None:
    for text in [*KEYS, *(f" {value}" for value in VALUES), *(f" {number}:" for number in range(32))]:
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text


def test_any_text_comes_back(tokenizer: Any) -> None:
    text = "def f(x):\n\treturn 'naïve' + \u6f22 # \U0001f600  two  spaces\r\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_added_tokens_are_as_in_qwen3(tokenizer: Any) -> None:
    for text in SPECIAL + ENVELOPE:
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1
    ids = tokenizer.convert_tokens_to_ids(SPECIAL + ENVELOPE)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(ENVELOPE)
    assert tokenizer.eos_token == "<|im_end|>"


def test_building_twice_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build_tokenizer(tmp_path / name)
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()


def test_the_lclm_decoder_has_three_more_tokens_after_the_base_vocabulary(tokenizer: Any, tmp_path: Path) -> None:
    build_tokenizer(tmp_path, memory_tokens=True)
    longer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(longer) == len(tokenizer) + 3
    assert longer.convert_tokens_to_ids(MEMORY) == list(range(len(tokenizer), len(tokenizer) + 3))


def test_template_renders_calls_and_responses_as_qwen3_does(tokenizer: Any) -> None:
    episode = world.make_episode(random.Random(1), pages=1)
    text = tokenizer.apply_chat_template(world.messages_of(episode), tools=world.TOOLS, tokenize=False)
    call = f'<tool_call>\n{{"name": "apply", "arguments": {{"line": "step {episode.first}:begin"}}}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>\n" in text
    assert f"<|im_start|>user\n<tool_response>\n{episode.pages[0]}\n</tool_response><|im_end|>\n" in text
    assert f"<tools>\n{json.dumps(world.TOOLS[0])}\n</tools><|im_end|>\n" in text


def test_template_equals_qwen3s_but_for_the_tools_text(tokenizer: Any, shared_data: Path) -> None:
    qwen3 = (shared_data / "qwen3" / "chat_template.jinja").read_text()
    parallel = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "apply", "arguments": {"line": name}}} for name in ("a", "b")],
        },
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "done"},
    ]
    for messages in (world.messages_of(world.make_episode(random.Random(2), pages=3)), parallel):
        for prompt in (False, True):
            ours, theirs = (
                tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=prompt, chat_template=template
                )
                for template in (None, qwen3)
            )
            assert ours == theirs
