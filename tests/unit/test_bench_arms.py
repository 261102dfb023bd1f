"""Arms and tags of the replay benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loha.errors import LohaError
from loha.observations import ObservationRule
from loha.render import Renderer
from loha.tokenizer_dir import load_tokenizer
from serving.load_arm import load_arms, order, parse_layout
from serving.run_tag import run_tag, tag_messages
from tests.tiny_models import write_tokenizer

TAG = run_tag(1234567890.9, 17)
LONG = "x" * 130


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("full", "full"),
        ("kinf", "full"),
        ("mask:kinfp8", "full"),
        ("k3", "latent:k3p1"),
        ("k0p16", "latent:k0p16"),
        ("latent:k3p8", "latent:k3p8"),
        ("mask:k3p8", "mask:k3p8"),
    ],
)
def test_arms_are_read_as_people_write_them(text: str, name: str) -> None:
    assert parse_layout(text).name == name


@pytest.mark.parametrize("text", ["", "3", "k", "k3p0", "k-1", "p8k3", "text:k3", "full:k3", "k3p8 ", "kthree"])
def test_other_words_for_arms_are_refused(text: str) -> None:
    with pytest.raises(LohaError):
        parse_layout(text)


def test_each_round_begins_with_another_arm() -> None:
    arms = load_arms(["full", "k3", "latent:k3p1"], "http://a/v1", "http://b/v1")
    assert [(arm.name, arm.base_url) for arm in arms] == [
        ("full", "http://a/v1"),
        ("latent:k3p1", "http://a/v1"),
        ("stock", "http://b/v1"),
    ]
    assert [[arm.name[0] for arm in order(arms, number)] for number in range(4)] == [
        ["f", "l", "s"],
        ["l", "s", "f"],
        ["s", "f", "l"],
        ["f", "l", "s"],
    ]
    with pytest.raises(LohaError, match="--arms"):
        load_arms([], "http://a/v1", None)


@pytest.mark.parametrize(
    ("content", "tagged"),
    [
        ("one line " + LONG, "one line " + LONG + f"\n{TAG}"),
        ("first\n" + LONG, f"first\n{TAG}\n" + LONG),
        ("y" * 500, "y" * 200 + f"\n{TAG}" + "y" * 300),
        ("short", "short"),
        (
            "Exit code: 0\nExecution output of [bash]:\n" + LONG,
            f"Exit code: 0\nExecution output of [bash]:\n{TAG}\n" + LONG,
        ),
        ("<returncode>0</returncode>\n" + LONG, f"<returncode>0</returncode>\n{TAG}\n" + LONG),
    ],
)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_the_tag_stands_near_the_start_and_behind_what_marks_an_observation(
    role: str, content: str, tagged: str
) -> None:
    messages = [
        {"role": "system", "content": LONG},
        {"role": "user", "content": "task"},
        {"role": "assistant", "content": LONG},
        {"role": role, "content": content},
    ]
    found = tag_messages(messages, TAG)
    is_observation = ObservationRule().find(messages) == [3]
    assert found[3]["content"] == (tagged if is_observation else content)
    assert [found[0], found[2]] == [messages[0], messages[2]]
    assert found[1]["content"] == f"task\n{TAG}"
    assert ObservationRule().find(found) == ObservationRule().find(messages)
    assert messages[1]["content"] == "task"


def test_all_tags_make_contexts_of_one_length_that_share_only_the_system_prompt(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    renderer = Renderer(load_tokenizer(tmp_path))
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "fix\nit"},
        {"role": "assistant", "content": "look"},
        {"role": "tool", "content": "Execution output of [bash]:\n" + LONG},
    ]
    plain = renderer.render(messages[:1]).context_tokens
    first, second = (renderer.render(tag_messages(messages, run_tag(5e9, n))).token_ids for n in (1, 999_999))
    assert len(first) == len(second)
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
    assert plain < shared < plain + len("<|im_start|>user\nfix\n" + TAG)
