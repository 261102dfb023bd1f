"""Messages of all clients come into one form; what is no chat message is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from loha.errors import LohaError
from loha.messages import call_arguments, normalize_messages
from loha.observations import ObservationRule, tool_names


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", {"type": "input_text", "text": "b"}], "a\nb"),
        ([{"type": "refusal", "refusal": "I will not."}], "I will not."),
        ("lone \ud800 surrogate", "lone \ufffd surrogate"),
    ],
)
def test_content_forms(content: Any, text: str) -> None:
    assert normalize_messages([{"role": "ai", "content": content}]) == [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ({"a": 1}, {"a": 1}),
        ('{"a": "\\ud800"}', {"a": "\ufffd"}),
        ("", {}),
        (None, {}),
        ("not json", {}),
        ("[1]", {}),
        ("[" * 100_000, {}),
    ],
)
def test_argument_forms(arguments: Any, parsed: dict[str, Any]) -> None:
    assert call_arguments(arguments) == parsed


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "at least one"),
        ("hello", "must be a list"),
        ([{"role": "user", "content": "x"}, {"role": "robot"}], "message 1: unknown role 'robot'"),
        ([{"role": "user", "content": 7}], "message 0: content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "type 'image_url' is not supported"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "message 0: tool call 0"),
        ([7], "message 0"),
    ],
)
def test_refusals_name_the_message(messages: Any, complaint: str) -> None:
    with pytest.raises(LohaError, match=complaint):
        normalize_messages(messages)


TEXT_MODE = [
    {"role": "user", "content": "OBSERVATION: the task itself is never an observation"},
    {"role": "assistant", "content": "act"},
    {"role": "user", "content": "Exit code: 0\nExecution output of [execute_bash]:\nok"},
    {"role": "user", "content": "EXECUTION RESULT of [edit]:\nok"},
    {"role": "user", "content": "<returncode>0</returncode>"},
    {"role": "user", "content": "please go on"},
]


def test_text_mode_observations() -> None:
    history = normalize_messages(TEXT_MODE)
    assert ObservationRule().find(history) == [2, 3, 4]
    assert ObservationRule(any_user_turn=True).find(history) == [2, 3, 4, 5]
    assert ObservationRule(user_markers=()).find(history) == []
    assert tool_names(history, [2, 3, 4]) == ["execute_bash", "edit", None]


def test_tool_names_follow_ids_not_order() -> None:
    calls = [{"id": i, "function": {"name": name}} for i, name in (("a", "read"), ("b", "write"))]
    history = normalize_messages(
        [
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "b", "content": "x"},
            {"role": "function", "tool_call_id": "a", "content": "y"},
            {"role": "tool", "tool_call_id": "unknown", "content": "z"},
        ]
    )
    assert tool_names(history, ObservationRule().find(history)) == ["write", "read", None]
