"""`loha data select`: the shortest success of each instance, the same whatever the order of the input."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loha.cli import main
from loha.data_scan import ScannedRow, scan
from loha.data_select import Options
from loha.data_select import main as select
from loha.errors import LohaError
from loha.trajectory import Trajectory, read_trajectories, write_trajectories


def run_of(instance: str, run: int, *, chars: int = 5, turns: int = 1, resolved: bool | None = True) -> Trajectory:
    """A run whose contents have `chars` characters in `turns` assistant turns."""
    first = {"role": "assistant", "content": "x" * chars}
    rest = [{"role": "assistant", "content": ""} for _ in range(turns - 1)]
    return Trajectory(id=f"{instance}_run{run}", instance_id=instance, resolved=resolved, messages=[first, *rest])


def selected(folder: Path, rows: list[Trajectory], **options: Any) -> list[str]:
    write_trajectories(folder / "in.jsonl", rows)
    assert (
        select(Options(trajectories=folder / "in.jsonl", out=folder / "out.jsonl", **{"length": "chars", **options}))
        == 0
    )
    return [trajectory.id for trajectory in read_trajectories(folder / "out.jsonl")]


def test_shortest_success_of_each_instance_sorted_by_instance(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [
        run_of("b", 1, chars=7),
        run_of("b", 2, chars=3, resolved=False),
        run_of("b", 3, chars=6),
        run_of("a", 1, chars=9),
        run_of("c", 1, chars=1, resolved=None),
        run_of("c", 2, chars=1, resolved=False),
    ]
    assert selected(tmp_path, rows) == ["a_run1", "b_run3"]
    assert list(read_trajectories(tmp_path / "out.jsonl")) == [rows[3], rows[2]]
    told = capsys.readouterr().out
    assert "read 6 trajectories of 3 instances" in told
    assert "wrote 2 to" in told and "15 chars" in told
    assert "dropped 4: 2 not resolved" in told
    report = json.loads((tmp_path / "out.report.json").read_text())
    assert report["dropped_by_reason"] == {"not resolved": 2, "outcome unknown": 1, "longer run of its instance": 1}
    assert report["rows_read"] == report["rows_written"] + report["rows_dropped"]


def test_ties_go_to_the_smaller_id(tmp_path: Path):
    assert selected(tmp_path, [run_of("a", 3), run_of("a", 2), run_of("a", 9)]) == ["a_run2"]


def test_length_is_a_choice(tmp_path: Path):
    rows = [run_of("a", 1, chars=9, turns=1), run_of("a", 2, chars=1, turns=4)]
    assert selected(tmp_path, rows, length="chars") == ["a_run2"]
    assert selected(tmp_path, rows, length="turns") == ["a_run1"]


def test_unresolved_runs_only_where_there_is_no_success(tmp_path: Path):
    rows = [
        run_of("a", 1, chars=9),
        run_of("a", 2, chars=1, resolved=False),
        run_of("b", 1, chars=1, resolved=False),
        run_of("b", 2, chars=5, resolved=None),
        run_of("c", 1, resolved=False),
    ]
    assert selected(tmp_path, rows, include_unresolved=True) == ["a_run1", "b_run2", "c_run1"]


def test_limit_and_folded_ids(tmp_path: Path):
    rows = [run_of("B.x__y", 1, chars=2), run_of("b_x__y", 2, chars=1), run_of("a", 1), run_of("c", 1)]
    assert selected(tmp_path, rows) == ["B.x__y_run1", "a_run1", "b_x__y_run2", "c_run1"]
    assert selected(tmp_path, rows, fold_ids=True) == ["a_run1", "b_x__y_run2", "c_run1"]
    assert selected(tmp_path, rows, limit=2) == ["B.x__y_run1", "a_run1"]
    report = json.loads((tmp_path / "out.report.json").read_text())
    assert report["dropped_by_reason"] == {"beyond the limit": 2}


RUNS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 4), st.sampled_from([True, True, False, None])),
    min_size=1,
    max_size=12,
    unique_by=lambda run: run[:2],
)


@settings(deadline=None, max_examples=25)
@given(runs=RUNS, data=st.data(), unresolved=st.booleans())
def test_selection_is_the_minimum_and_ignores_the_order(runs: list[Any], data: st.DataObject, unresolved: bool):
    rows = [run_of(i, n, chars=c, resolved=r) for i, n, c, r in runs]
    best: dict[str, tuple[Any, ...]] = {}
    for i, n, c, r in runs:
        if r or unresolved:
            order = ({True: 0, None: 1, False: 2}[r], c, f"{i}_run{n}")
            best[i] = min(best.get(i, order), order)
    shuffled = data.draw(st.permutations(rows))
    with tempfile.TemporaryDirectory() as name:
        if not best:
            with pytest.raises(LohaError, match="no trajectory to select"):
                selected(Path(name), shuffled, include_unresolved=unresolved)
            return
        expected = [order[-1] for _, order in sorted(best.items())]
        assert selected(Path(name), shuffled, include_unresolved=unresolved) == expected
        bytes_shuffled = Path(name, "out.jsonl").read_bytes()
        selected(Path(name), rows, include_unresolved=unresolved)
        assert Path(name, "out.jsonl").read_bytes() == bytes_shuffled


@settings(deadline=None, max_examples=30)
@given(chunk_bytes=st.integers(1, 900), count=st.integers(1, 7), blank=st.booleans())
def test_chunks_cover_every_row_once(chunk_bytes: int, count: int, blank: bool):
    rows = [run_of("a", i, chars=13 * i + 1) for i in range(count)]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "in.jsonl")
        path.write_text(("\n\n" if blank else "\n").join(row.to_line() for row in rows))
        chunks = list(scan(path, length="chars", tokenizer=None, unresolved=False, workers=1, chunk_bytes=chunk_bytes))
        found: list[ScannedRow] = [row for chunk in chunks for row in chunk.rows]
        assert [(row.id, row.length, row.row) for row in found] == [
            (row.id, 13 * i + 1, i * (1 + blank) + 1) for i, row in enumerate(rows)
        ]
        assert sum(chunk.bytes_read for chunk in chunks) == path.stat().st_size
        with path.open("rb") as file:
            for row in found:
                file.seek(row.offset)
                assert json.loads(file.readline())["id"] == row.id


def test_two_processes_find_the_same(tmp_path: Path):
    rows = [run_of(f"i{i % 5}", i, chars=100 - i) for i in range(40)]
    path = tmp_path / "in.jsonl"
    write_trajectories(path, rows)
    alone, together = (
        [
            row
            for chunk in scan(path, length="chars", tokenizer=None, unresolved=True, workers=n, chunk_bytes=999)
            for row in chunk.rows
        ]
        for n in (1, 2)
    )
    assert alone == together and len(alone) == 40


def test_a_bad_row_in_a_later_chunk_is_named_by_its_line(tmp_path: Path):
    path = tmp_path / "in.jsonl"
    lines = [run_of("a", i).to_line() for i in range(9)]
    path.write_text("\n".join([*lines[:6], '{"id": "q"}', *lines[6:]]))
    with pytest.raises(LohaError, match=r"in\.jsonl: row 7 \(id 'q'\): no 'instance_id'"):
        list(scan(path, length="chars", tokenizer=None, unresolved=False, workers=1, chunk_bytes=200))


def cli(*args: Any) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["data", "select", *map(str, args)])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nope.jsonl", "--length", "chars"], ["nope.jsonl", "no such trajectory file", "loha data import"]),
        (["in.jsonl"], ["--tokenizer"]),
        (["in.jsonl", "--tokenizer", "nope"], ["nope", "no such tokenizer folder"]),
        (["in.jsonl", "--length", "turns", "--max-tokens", "5"], ["--max-tokens needs --length tokens"]),
        (["in.jsonl", "--length", "chars", "--limit", "0"], ["--limit must be 1 or more"]),
        (["in.jsonl", "--length", "chars", "--workers", "-2"], ["--workers"]),
        (["unknown.jsonl", "--length", "chars"], ["1 outcome unknown", "--include-unresolved"]),
        (["empty.jsonl", "--length", "chars"], ["empty.jsonl", "holds no trajectory"]),
        (["twice.jsonl", "--length", "chars"], ["twice.jsonl", "row 2", "'a_run1'", "row 1"]),
        (["cut.jsonl", "--length", "chars"], ["cut.jsonl", "row 2", "cut off"]),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    words: list[str],
):
    monkeypatch.chdir(tmp_path)
    write_trajectories("in.jsonl", [run_of("a", 1)])
    write_trajectories("unknown.jsonl", [run_of("a", 1, resolved=None)])
    write_trajectories("twice.jsonl", [run_of("a", 1)] * 2)
    Path("empty.jsonl").write_text("")
    line = run_of("a", 1).to_line()
    Path("cut.jsonl").write_text(line + "\n" + run_of("a", 2).to_line()[:-9])
    assert cli(*args, "--out", "new/out.jsonl") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and all(word in error for word in words), error
    assert not Path("new/out.jsonl").exists()


def test_the_input_is_never_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl"
    write_trajectories(path, [run_of("a", 1), run_of("a", 2)])
    before = path.read_bytes()
    for command in (["select", path, "--length", "chars"], ["import", path]):
        with pytest.raises(SystemExit) as stop:
            main(["data", *map(str, command), "--out", str(tmp_path / "." / "in.jsonl")])
        assert stop.value.code == 2 and "is the input too" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_tokens_of_real_trajectories(tmp_path: Path, shared_data: Path, capsys: pytest.CaptureFixture[str]):
    """Lengths equal the tokenizer's own rendering; over-long runs are told and left out."""
    from loha.tokenizer_dir import load_tokenizer

    imported, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with pytest.raises(SystemExit):
        main(["data", "import", str(shared_data / "swe_master"), "--out", str(imported), "--assume-resolved"])
    assert cli(imported, "--tokenizer", shared_data / "qwen3", "--out", out, "--max-tokens", 40_000) == 0
    report = json.loads((tmp_path / "out.report.json").read_text())
    assert report["dropped_by_reason"] == {"not resolved": 1, "over 40000 tokens": 1, "longer run of its instance": 2}
    assert "over 40000 tokens: 56500 tokens" in capsys.readouterr().err
    tokenizer = load_tokenizer(shared_data / "qwen3")
    chosen = {trajectory.id: trajectory for trajectory in read_trajectories(out)}
    assert len(chosen) == 5
    entry = min(report["selected"], key=lambda entry: entry["length"])
    text = tokenizer.apply_chat_template(chosen[entry["id"]].messages, tokenize=False)
    assert entry["length"] == len(tokenizer(text, add_special_tokens=False)["input_ids"])
