"""Files and folders to raw rows: every container, every kind of damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loha.errors import LohaError
from loha.readers.files import RawRow, find_files, read_file, read_rows

ROW = {"messages": [{"role": "assistant", "content": "a"}]}


def write(path: Path, content: bytes | str | Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, (bytes, str)):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows_of(path: Path) -> list[RawRow]:
    return [raw for raw in read_file(path) if raw.row or raw.problem]


def test_jsonl_counts_lines_and_skips_blank_ones(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", "\ufeff" + json.dumps({"n": 1}) + "\n\n" + json.dumps({"n": 3}))
    assert [(raw.row, raw.data) for raw in rows_of(path)] == [(1, {"n": 1}), (3, {"n": 3})]
    assert sum(raw.bytes_read for raw in read_file(path)) == path.stat().st_size


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.traj", "a.txt"])
def test_a_json_list_is_rows_whatever_the_name(tmp_path: Path, name: str):
    path = write(tmp_path / name, json.dumps([{"n": 1}, {"n": 2}], indent=2))
    assert [(raw.row, raw.data) for raw in rows_of(path)] == [(1, {"n": 1}), (2, {"n": 2})]


@pytest.mark.parametrize("name", ["a.json", "a.traj.json", "a.jsonl"])
def test_an_indented_object_is_one_row(tmp_path: Path, name: str):
    path = write(tmp_path / name, json.dumps(ROW, indent=1))
    assert [(raw.row, raw.data) for raw in rows_of(path)] == [(1, ROW)]


def test_jsonl_named_json(tmp_path: Path):
    path = write(tmp_path / "a.json", '{"n": 1}\n{"n": 2}\n')
    assert [raw.data for raw in rows_of(path)] == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("name", ["a.parquet", "shard-00001"])
def test_parquet_streams_rows_without_the_nulls_of_structs(tmp_path: Path, name: str):
    messages = [
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": {"a": i}}}]}] for i in (1,)
    ]
    messages.append([{"role": "user", "content": "x", "name": "n"}])  # type: ignore[list-item]
    path = tmp_path / name
    pq.write_table(pa.table({"messages": messages, "reward": [1.0, None]}), path)
    first, second = (raw.data for raw in rows_of(path))
    assert first["messages"] == [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"a": 1}}}]}]
    assert second == {"messages": [{"role": "user", "content": "x", "name": "n"}], "reward": None}


@pytest.mark.parametrize(
    ("name", "content", "reason", "word"),
    [
        ("a.jsonl", b"", "empty file", "no row"),
        ("a.jsonl", b" \n\n", "empty file", "no row"),
        ("a.json", b"[]", "empty file", "empty list"),
        ("a.jsonl", bytes(range(256)) * 8, "binary file", "neither JSON"),
        ("a.jsonl", b"\0\0" + json.dumps(ROW).encode(), "binary file", "neither JSON"),
        ("a.jsonl", b"\x1f\x8b\x08\x00rest", "compressed file", "gzip; unpack"),
        ("a.json", json.dumps(ROW)[:-4].encode(), "not JSON", "cut off"),
        ("a.json", b"5", "wrong top-level type", "int"),
        ("a.json", b'"text"', "wrong top-level type", "str"),
        ("a.json", b"\xff\xfe{}", "not UTF-8", "0xff"),
        ("a.parquet", b"hello", "damaged Parquet file", "fetch it again"),
        ("a.parquet", b"PAR1" + b"x" * 100, "damaged Parquet file", "fetch it again"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, reason: str, word: str):
    (raw,) = rows_of(write(tmp_path / name, content))
    assert raw.row == 0 and raw.problem is not None
    assert raw.problem.reason == reason and word in raw.problem.detail


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"a": "\x00"}', "not JSON"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": ', "not JSON"),
        (b'{"a":' * 50_000, "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"not json at all", "not JSON"),
    ],
)
def test_a_damaged_line_costs_only_itself(tmp_path: Path, line: bytes, reason: str):
    good = json.dumps(ROW).encode()
    found = rows_of(write(tmp_path / "a.jsonl", good + b"\n" + line + b"\n" + good))
    assert [raw.problem.reason if raw.problem else None for raw in found] == [None, reason, None]
    assert found[1].row == 2


def test_truncated_parquet_is_one_problem(tmp_path: Path):
    whole = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"messages": ["[]"] * 100}), whole)
    data = whole.read_bytes()
    (raw,) = rows_of(write(tmp_path / "cut.parquet", data[: len(data) // 2]))
    assert raw.problem is not None and raw.problem.reason == "damaged Parquet file"


def test_parquet_with_a_bad_string_costs_only_its_row(tmp_path: Path):
    binary = pa.array([b'{"n": 1}', b"\xff\xfe", b'{"n": 3}'])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": binary.view(pa.string())}), path)
    found = rows_of(path)
    assert [raw.problem.reason if raw.problem else raw.data for raw in found] == [
        {"messages": '{"n": 1}'},
        "not UTF-8",
        {"messages": '{"n": 3}'},
    ]


# -- folders -------------------------------------------------------------------------------------------------


def test_folders_are_walked_in_order_and_leave_out_the_output(tmp_path: Path):
    for name in ("b/2.jsonl", "b/1.json", "a/x.traj.json", "notes.txt", ".hidden/z.jsonl", "out.jsonl"):
        write(tmp_path / name, ROW)
    found = find_files([tmp_path, tmp_path / "b/2.jsonl"], leave_out=[tmp_path / "out.jsonl"])
    names = [file.path.relative_to(tmp_path).as_posix() for file in found]
    assert names == ["a/x.traj.json", "b/1.json", "b/2.jsonl"]


def test_missing_inputs_are_errors(tmp_path: Path):
    with pytest.raises(LohaError, match=r"nope\.jsonl: no such file"):
        find_files([tmp_path / "nope.jsonl"])
    with pytest.raises(LohaError, match="folder without any"):
        find_files([tmp_path])
    with pytest.raises(LohaError, match="no input"):
        find_files([])


def call(prompt: str, turns: int, time_s: float) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    for turn in range(turns):
        messages += [{"role": "assistant", "content": f"a{turn}"}, {"role": "user", "content": f"o{turn}"}]
    answer = {"role": "assistant", "content": f"a{turns}"}
    return {"messages": messages, "response": {"choices": [{"message": answer}]}, "kwargs": {}, "timestamp": time_s}


def test_a_folder_of_openhands_calls_gives_the_last_of_each_conversation(tmp_path: Path):
    logs = tmp_path / "llm_completions"
    for turns in range(3):
        # Names sort otherwise than times, as with different numbers of digits after the point.
        write(logs / "inst-1" / f"m-{9 - turns}.json", call("task one", turns, 10.0 + turns))
    write(logs / "inst-1" / "m-5.json", call("summarise this", 0, 11.5))
    write(logs / "inst-2" / "m-1.json", call("task two", 0, 1.0))
    write(logs / "inst-2" / "preds.json", {"other": "file"})
    found = [raw for raw in read_rows(find_files([tmp_path])) if raw.row or raw.problem]
    told = [(raw.file.parent.name, raw.file.name, raw.problem.reason if raw.problem else None) for raw in found]
    assert told == [
        ("inst-1", "m-5.json", "single call"),
        ("inst-1", "m-7.json", None),
        ("inst-2", "preds.json", None),
        ("inst-2", "m-1.json", None),
    ]


def test_progress_adds_up_to_the_size_of_the_input(tmp_path: Path):
    for turns in range(3):
        write(tmp_path / "i" / f"m-{turns}.json", call("t", turns, turns))
    write(tmp_path / "rows.jsonl", json.dumps(ROW) + "\n" + json.dumps(ROW))
    write(tmp_path / "cut.json", '{"a"')
    pq.write_table(pa.table({"n": list(range(7))}), tmp_path / "a.parquet")
    files = find_files([tmp_path])
    assert sum(raw.bytes_read for raw in read_rows(files)) == sum(file.size for file in files)
