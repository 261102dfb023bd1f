"""The canonical form: round trips, and refusals that name the row and the message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loha.errors import LohaError
from loha.trajectory import Trajectory, read_trajectories, write_trajectories

TEXT = st.text(st.characters(), max_size=20)  # lone surrogates and NUL included
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}


def trajectory(**changes: Any) -> Trajectory:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "fix it"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "a.py", "tool_call_id": "c1", "name": "bash"},
        {"role": "assistant", "content": "done"},
    ]
    return Trajectory(**{"id": "t-1", "instance_id": "t", "messages": messages, **changes})


@settings(deadline=None)
@given(content=TEXT, name=TEXT, arguments=TEXT, resolved=st.sampled_from([True, False, None]), identity=TEXT)
def test_line_round_trips_any_text(content: str, name: str, arguments: str, resolved: bool | None, identity: str):
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        {"role": "assistant", "content": content, "tool_calls": [call], "reasoning_content": content},
        {"role": "tool", "content": content, "tool_call_id": "c", "name": name},
    ]
    before = trajectory(id="x" + identity, resolved=resolved, messages=messages, licence=name)
    line = before.to_line()
    assert "\n" not in line
    assert Trajectory.from_json(json.loads(line.encode("utf-8"))) == before


def test_file_round_trip(tmp_path: Path):
    rows = [trajectory(id=f"t-{i}", resolved=i % 2 == 0) for i in range(3)]
    path = tmp_path / "new" / "t.jsonl"
    assert write_trajectories(path, rows) == 3
    assert list(read_trajectories(path)) == rows
    assert [file.name for file in path.parent.iterdir()] == ["t.jsonl"]


def test_failed_write_leaves_nothing(tmp_path: Path):
    def rows():
        yield trajectory()
        raise RuntimeError("disk of the source is gone")

    with pytest.raises(RuntimeError):
        write_trajectories(tmp_path / "t.jsonl", rows())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, {"role": "assistant", "content": "c"}],
        [{"role": "assistant", "content": "<function=x>"}, {"role": "tool", "content": "no call, no id"}],
        [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
        [
            {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
            {"role": "tool", "content": "2", "tool_call_id": "c2"},
            {"role": "tool", "content": "1", "tool_call_id": "c1"},
            {"role": "assistant", "content": ""},
        ],
    ],
    ids=["two systems", "text-mode tool result", "open call at the end", "results out of call order"],
)
def test_legal_oddities(messages: list[dict[str, Any]]):
    assert trajectory(messages=messages).messages == messages


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": ""}, ["id must be"]),
        ({"resolved": 1}, ["resolved must be true, false or null", "1"]),
        ({"messages": []}, ["no messages"]),
        ({"messages": [{"role": "user", "content": "x"}]}, ["no assistant turn"]),
        ({"messages": [{"role": "ai", "content": "x"}]}, ["message 0", "'ai'"]),
        ({"messages": [{"role": "assistant", "content": None}]}, ["message 0", "content must be a string"]),
        ({"messages": [{"role": "assistant", "content": "", "extra": 1}]}, ["message 0", "'extra'"]),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": []}]}, ["message 0", "tool_calls"]),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "f"}}]}]},
            ["message 0", "arguments as a JSON string"],
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": "", "tool_calls": [CALL]},
                    {"role": "assistant", "content": ""},
                ]
            },
            ["message 1", "'c1'", "no result"],
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": ""},
                    {"role": "tool", "content": "", "tool_call_id": "zz"},
                ]
            },
            ["message 1", "'zz'"],
        ),
        ({"tools": [{"name": "bash"}]}, ["tool 0"]),
    ],
)
def test_refusals_name_the_place(changes: dict[str, Any], words: list[str]):
    with pytest.raises(LohaError) as refusal:
        trajectory(**changes)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", ["row 2", "JSON object", "list"]),
        ("{", ["row 2", "cut off"]),
        ('{"id": "q", "messages": []}', ["row 2", "'q'", "instance_id", "loha data import"]),
        (json.dumps({**trajectory(id="q").to_json(), "resolvd": True}), ["row 2", "'resolvd'", "'resolved'"]),
        (trajectory(id="t-1").to_line(), ["row 2", "'t-1'", "row 1", "unique"]),
    ],
)
def test_reading_names_file_and_row(tmp_path: Path, line: str, words: list[str]):
    path = tmp_path / "rows.jsonl"
    path.write_text(trajectory().to_line() + "\n" + line + "\n")
    with pytest.raises(LohaError) as refusal:
        list(read_trajectories(path))
    assert all(word in str(refusal.value) for word in ["rows.jsonl", *words]), str(refusal.value)


def test_invalid_utf8_names_the_row(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": "\xff"}\n')
    with pytest.raises(LohaError, match=r"rows\.jsonl: row 1"):
        list(read_trajectories(path))


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_file_is_an_error(tmp_path: Path, text: str):
    path = tmp_path / "empty.jsonl"
    path.write_text(text)
    with pytest.raises(LohaError, match="no trajectory"):
        list(read_trajectories(path))


def test_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(LohaError, match=r"nope\.jsonl: no such"):
        next(read_trajectories(tmp_path / "nope.jsonl"))
