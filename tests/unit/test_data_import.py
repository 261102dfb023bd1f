"""`loha data import`: what is written, what is told, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loha.cli import main
from loha.trajectory import Trajectory, read_trajectories


def chat(text: str = "fix it", **extra: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}], **extra}


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*args: Any) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["data", "import", *map(str, args)])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def report_of(out: Path) -> dict[str, Any]:
    return json.loads(out.with_name(out.stem + ".report.json").read_text())


MIXED = [
    chat(id="good-1"),
    {"messages": []},
    chat(id="good-2", resolved=True, instance_id="i"),
    {"trajectory_id": "a_run1", "reward": -1.0, "messages": "[]"},
    chat(id="good-1"),
    chat("other task", id="good-1"),
    {"messages": [{"role": "user", "content": "\ud83d"}, {"role": "assistant", "content": "a"}], "id": "surrogate"},
]


def test_bad_rows_are_told_counted_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = write_rows(tmp_path / "mixed.jsonl", *MIXED)
    out = tmp_path / "out.jsonl"
    assert run(source, "--out", out) == 0
    assert [t.id for t in read_trajectories(out)] == ["good-1", "good-2", "good-1#2", "surrogate"]
    told, errors = capsys.readouterr()
    assert "read 7 rows from 1 file" in told
    assert "wrote 4 trajectories of 4 instances" in told
    assert "dropped 3: " in told
    for line in (
        f"dropped: {source} row 2: empty trajectory: messages is an empty list",
        f"dropped: {source} row 4 (id a_run1): reward -1: the run was not scored",
        f"dropped: {source} row 5 (id good-1): duplicate: id 'good-1' with the same content came before",
        f"noted: {source} row 6 (id good-1): id used before with other content: renamed to good-1#2",
        f"noted: {source} row 7 (id surrogate): lone surrogates replaced by U+FFFD",
    ):
        assert line in errors
    report = report_of(out)
    assert (report["rows_read"], report["rows_written"], report["rows_dropped"]) == (7, 4, 3)
    assert report["dropped_by_reason"] == {"empty trajectory": 1, "reward -1": 1, "duplicate": 1}
    assert [entry["row"] for entry in report["dropped"]] == [2, 4, 5]
    assert report["outcomes"] == {"unknown": 3, "resolved": 1}


def test_fatal_stops_at_the_first_bad_row_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = write_rows(tmp_path / "mixed.jsonl", *MIXED)
    folder = tmp_path / "new"
    assert run(source, "--out", folder / "out.jsonl", "--bad-rows", "fatal") == 2
    assert list(folder.iterdir()) == []
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {source} row 2: empty trajectory") and "nothing was written" in error


def test_fatal_keeps_an_older_output(tmp_path: Path):
    out = write_rows(tmp_path / "out.jsonl", {"old": 1})
    assert run(write_rows(tmp_path / "bad.jsonl", chat(), 5), "--out", out, "--bad-rows", "fatal") == 2
    assert json.loads(out.read_text()) == {"old": 1}


def test_rows_that_rules_leave_out_are_not_fatal(tmp_path: Path):
    source = write_rows(tmp_path / "rows.jsonl", MIXED[0], MIXED[3], MIXED[4])
    out = tmp_path / "out.jsonl"
    assert run(source, "--out", out, "--bad-rows", "fatal") == 0
    assert report_of(out)["dropped_by_reason"] == {"reward -1": 1, "duplicate": 1}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"", ["a.jsonl", "empty file"]),
        ("a.jsonl", bytes(range(256)) * 4, ["a.jsonl", "binary file"]),
        ("a.parquet", b"PAR1junk", ["a.parquet", "damaged Parquet", "fetch it again"]),
        ("a.json", b'{"messages": [', ["a.json", "not JSON", "cut off"]),
        ("a.json", b"3", ["a.json", "wrong top-level type"]),
        ("a.jsonl", b'{"messages": []}', ["a.jsonl row 1", "empty trajectory"]),
        ("a.jsonl", b'{"messages": []}\n{"messages": []}', ["a.jsonl row 1", "the first of 2"]),
        ("a.jsonl", b'{"x": 1}', ["a.jsonl row 1", "unknown format", "keys x"]),
    ],
)
def test_an_input_without_a_trajectory_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, words: list[str]
):
    source = tmp_path / name
    source.write_bytes(content)
    assert run(source, "--out", tmp_path / "new" / "out.jsonl") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: no usable trajectory, nothing was written")
    assert all(word in error for word in words), error
    assert list((tmp_path / "new").iterdir()) == []


def test_missing_input_and_unknown_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path / "nope.jsonl", "--out", tmp_path / "o.jsonl") == 2
    assert "nope.jsonl: no such file or folder" in capsys.readouterr().err
    source = write_rows(tmp_path / "a.jsonl", chat())
    assert run(source, "--out", tmp_path / "o.jsonl", "--format", "openchat") == 2
    assert "unknown format 'openchat'" in capsys.readouterr().err
    assert not (tmp_path / "o.jsonl").exists()


def test_a_folder_as_output_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(write_rows(tmp_path / "a.jsonl", chat()), "--out", tmp_path) == 2
    assert "is a folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_named_format_is_not_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = write_rows(tmp_path / "a.jsonl", chat())
    assert run(source, "--out", tmp_path / "o.jsonl", "--format", "coderforge") == 2
    assert "no trajectory_id" in capsys.readouterr().err


def test_a_flood_of_bad_rows_is_shortened_on_screen_but_not_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out.jsonl"
    assert run(write_rows(tmp_path / "a.jsonl", *[{"messages": []}] * 40, chat()), "--out", out) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dropped: ")]
    assert len(lines) == 11 and "the report has them" in lines[-1]
    assert [entry["row"] for entry in report_of(out)["dropped"]] == list(range(1, 41))


def test_licence_source_and_outcomes(tmp_path: Path):
    rows = [
        chat(str(i), id=f"t{i}", instance_id=f"i{i}", resolved=flag) for i, flag in enumerate([None, None, None, False])
    ]
    source = write_rows(tmp_path / "a.jsonl", *rows)
    outcomes = tmp_path / "run.json"
    outcomes.write_text(json.dumps({"resolved_ids": ["i0", "i3"], "unresolved_ids": ["i1"], "error_ids": []}))
    out = tmp_path / "o.jsonl"
    assert run(source, "--out", out, "--licence", "MIT", "--source", "mine", "--outcomes", outcomes) == 0
    got = list(read_trajectories(out))
    assert [t.resolved for t in got] == [True, False, None, False], "a row's own outcome wins"
    assert {(t.licence, t.source) for t in got} == {("MIT", "mine")}
    assert run(source, "--out", out, "--assume-resolved") == 0
    assert [t.resolved for t in read_trajectories(out)] == [True, True, True, False]


def test_bad_outcomes_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source = write_rows(tmp_path / "a.jsonl", chat())
    outcomes = write_rows(tmp_path / "run.json", {"total": 3})
    assert run(source, "--out", tmp_path / "o.jsonl", "--outcomes", outcomes) == 2
    assert "no resolved_ids" in capsys.readouterr().err


def test_a_folder_of_runs_beside_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = tmp_path / "runs"
    for name in ("owner__repo-1", "owner__repo-2"):
        (runs / name).mkdir(parents=True)
        run_file = chat(name, instance_id=name, trajectory_format="mini-swe-agent-1.1", info={})
        (runs / name / f"{name}.traj.json").write_text(json.dumps(run_file))
    (runs / "preds.json").write_text('{"owner__repo-1": {}}')
    out = tmp_path / "o.jsonl"
    assert run(runs, "--out", out, "--bad-rows", "fatal") == 0
    assert [t.instance_id for t in read_trajectories(out)] == ["owner__repo-1", "owner__repo-2"]
    assert "not a trajectory file" in capsys.readouterr().err


def test_coderforge_parquet(tmp_path: Path):
    messages = json.dumps(chat()["messages"])
    table = pa.table(
        {
            "trajectory_id": ["a__b-1_run1", "a__b-1_run2", "c__d-2_run1"],
            "reward": [1.0, 0.0, -1.0],
            "messages": [messages] * 3,
            "tools": ["[]"] * 3,
            "license": ["MIT"] * 3,
        }
    )
    pq.write_table(table, tmp_path / "SWE-00000.parquet")
    out = tmp_path / "o.jsonl"
    assert run(tmp_path, "--out", out) == 0
    got = list(read_trajectories(out))
    assert [(t.id, t.instance_id, t.resolved, t.licence) for t in got] == [
        ("a__b-1_run1", "a__b-1", True, "MIT"),
        ("a__b-1_run2", "a__b-1", False, "MIT"),
    ]
    assert report_of(out)["dropped"][0]["row"] == 3


def test_importing_an_import_changes_nothing(tmp_path: Path):
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    assert run(write_rows(tmp_path / "a.jsonl", *MIXED), "--out", first) == 0
    assert run(first, "--out", second) == 0
    assert first.read_bytes() == second.read_bytes()


def test_an_observation_of_three_megabytes_is_kept_and_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    row = chat(id="big")
    row["messages"].append({"role": "tool", "content": "x" * 3_000_000})
    out = tmp_path / "o.jsonl"
    assert run(write_rows(tmp_path / "a.jsonl", row), "--out", out) == 0
    assert "row 1 (id big): message over 1,000,000 characters" in capsys.readouterr().err
    assert len(next(read_trajectories(out)).messages[-1]["content"]) == 3_000_000


def test_shared_data(tmp_path: Path, shared_data: Path):
    out = tmp_path / "o.jsonl"
    assert run(shared_data / "swe_master", "--out", out, "--bad-rows", "fatal") == 0
    got: list[Trajectory] = list(read_trajectories(out))
    assert [t.source for t in got] == ["swe-master-run"] * 5 + ["swe-master-sft"] * 4
    assert [t.resolved for t in got] == [True, False, True, True, True, None, None, None, None]
    assert len({t.instance_id for t in got}) == 7, "the four training rows try two tasks"
