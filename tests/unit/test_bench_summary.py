"""Figures, ratios, log and plan of the replay benchmark, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loha.errors import LohaError
from loha.trajectory import Trajectory, write_trajectories
from serving import bench
from serving.load_run import RUNS, Log
from serving.load_summary import (
    Slice,
    load_table,
    ratio_table,
    ratios,
    summarize_arms,
    summarize_rounds,
)
from serving.replay import ReplayedRun, TimedCall
from serving.reply_plan import PlannedRun, read_plan, write_plan


def call(
    context: int, cached: int, *, output: int = 5, first: float = 1.0, seconds: float = 3.0, new: int = 0
) -> TimedCall:
    usage: dict[str, Any] = {
        "prompt_tokens": context,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "loha": {"full_text_tokens": 2 * context, "context_tokens": context, "encoder_tokens_new": new, "k": 3},
    }
    return TimedCall(first_token_s=first, seconds=seconds, usage=usage)


def run(arm: str, number: int, *calls: TimedCall, trajectory: str = "t", seconds: float = 10.0) -> ReplayedRun:
    return ReplayedRun(arm=arm, round=number, trajectory=trajectory, copy=0, seconds=seconds, calls=list(calls))


def stretch(arm: str, number: int, seconds: float, *, runs: int = 1, whole: bool = True, encoded: float = 0) -> Slice:
    counters = {"encoder_tokens": encoded, "preemptions": 2.0}
    return Slice(arm=arm, round=number, seconds=seconds, runs=runs, whole=whole, counters=counters)


RUNS_OF_TWO_ARMS = [
    run("full", 0, call(100, 0), call(200, 90, first=2.0, seconds=6.0)),
    run("full", 1, call(100, 0), call(200, 90)),
    run("latent:k3p8", 0, call(50, 0, new=64), call(60, 30, new=32), seconds=5.0),
    run("latent:k3p8", 1, call(50, 0, new=64), call(60, 30, new=32)),
]
SLICES = [
    stretch("full", 0, 36.0),
    stretch("full", 1, 72.0),
    stretch("latent:k3p8", 0, 18.0, encoded=96),
    stretch("latent:k3p8", 1, 18.0, encoded=96),
]


def test_figures_by_hand() -> None:
    full, latent = summarize_arms(["full", "latent:k3p8", "never"], RUNS_OF_TWO_ARMS, SLICES)
    assert (full.arm, full.rounds, full.runs, full.calls) == ("full", 2, 2, 4)
    assert full.instances_per_hour == 75 and full.instances_per_hour_range == (50, 100)
    assert full.in_flight == pytest.approx((10 / 36 + 10 / 72) / 2)
    assert full.first_token_s["p50"] == 1.0 and full.first_token_s["p99"] == pytest.approx(1.97)
    assert full.per_token_s["p50"] == 0.5 and full.per_token_s["p90"] == pytest.approx(0.85)
    assert full.prefill_tokens == 100 + 110
    assert full.engine == {"encoder_tokens": 0, "preemptions": 2} and full.encoder_runs_per_observation is None
    assert latent.encoder_tokens_engine == 96 and latent.encoder_runs_per_observation == 1.0
    assert latent.columns.mean.encoder_tokens == 96 and latent.columns.mean.ratio == 2.0
    shown = load_table([full, latent])
    assert "| full | 2 | 4 | 75.0 [50.0, 100.0] |" in shown and "| 1.000 |" in shown


def test_a_round_that_was_interrupted_has_no_throughput_and_no_counters() -> None:
    slices = [*SLICES[:1], stretch("full", 1, 30.0, whole=False), stretch("full", 1, 30.0, whole=False)]
    (full,) = summarize_arms(["full"], RUNS_OF_TWO_ARMS, slices)
    assert full.instances_per_hour_range == (100, 100) and full.engine["preemptions"] == 2
    (none,) = summarize_arms(["full"], RUNS_OF_TWO_ARMS[1:], slices[1:])
    assert none.instances_per_hour is None and none.engine == {}
    assert "interrupted" in load_table([none])
    assert ratios(summarize_rounds(RUNS_OF_TWO_ARMS, slices), "full")[0].figure == "first_token_s"


def test_ratios_compare_round_by_round() -> None:
    found = {r.figure: r for r in ratios(summarize_rounds(RUNS_OF_TWO_ARMS, SLICES), "full")}
    speed = found["instances_per_hour"]
    assert (speed.arm, speed.over, speed.rounds) == ("latent:k3p8", "full", 2)
    assert (speed.low, speed.high) == (2.0, 4.0) and speed.mean == pytest.approx(8**0.5)
    assert found["context_tokens"].mean == pytest.approx(110 / 300)
    assert found["prefill_tokens"].mean == pytest.approx(80 / 210)
    assert "| latent:k3p8 / full | 2.828 [2.000, 4.000] |" in ratio_table(list(found.values()))


def test_stock_is_what_full_text_is_measured_against() -> None:
    runs = [run(arm, 0, call(10, 0)) for arm in ("full", "stock", "latent:k3p8")]
    slices = [stretch("full", 0, 11.0), stretch("stock", 0, 10.0), stretch("latent:k3p8", 0, 5.0)]
    found = ratios(summarize_rounds(runs, slices), "full")
    pairs = {(r.arm, r.over): r.mean for r in found if r.figure == "instances_per_hour"}
    assert pairs == {("latent:k3p8", "full"): pytest.approx(2.2), ("full", "stock"): pytest.approx(10 / 11)}


def test_the_log_survives_a_cut_line_and_refuses_a_foreign_one(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        for finished in RUNS_OF_TWO_ARMS:
            log.add_run(finished)
        log.add_slice(SLICES[0])
    assert Log(tmp_path).runs == RUNS_OF_TWO_ARMS and Log(tmp_path).slices == SLICES[:1]
    path = tmp_path / RUNS
    path.write_text(path.read_text()[:-7])
    with Log(tmp_path) as log:
        assert log.runs == RUNS_OF_TWO_ARMS[:-1]
        log.add_run(RUNS_OF_TWO_ARMS[-1])
    assert Log(tmp_path).runs == RUNS_OF_TWO_ARMS
    path.write_text('{"arm": "full"}\n')
    with pytest.raises(LohaError, match=r"runs\.jsonl.*another --out"):
        Log(tmp_path)


def planned(times: list[float | None] | None = None) -> PlannedRun:
    messages = [
        {"role": "assistant", "content": "hello"},  # nothing before it: no call
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "a"},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "c"},
    ]
    trajectory = Trajectory(id="t", instance_id="i", messages=messages, tool_seconds=times)
    return PlannedRun(trajectory=trajectory, replies=(7, 8))


def test_plan_cuts_waits_and_comes_back_from_its_file(tmp_path: Path) -> None:
    run_of_two = planned([9.0, 1.5, None, 2.0])
    assert run_of_two.indices == [2, 4]
    assert run_of_two.waits("none") == [0, 0] and run_of_two.waits("0.25") == [0.25, 0.25]
    assert run_of_two.waits("recorded") == [1.5, 0] and planned().waits("recorded") == [0, 0]
    path = tmp_path / "plan.json"
    assert read_plan(path, [run_of_two.trajectory]) is None
    write_plan(path, [run_of_two])
    assert read_plan(path, [run_of_two.trajectory]) == [run_of_two]


@pytest.mark.parametrize("times", [[1.0], [1.0, -1.0, 0, 0], [1.0, True, 0, 0], [1.0, float("inf"), 0, 0], 3.0])
def test_impossible_tool_times_are_refused(times: Any) -> None:
    with pytest.raises(LohaError, match="tool_seconds"):
        planned(times)


def test_tool_times_are_left_out_of_rows_that_have_none() -> None:
    with_times, without = planned([1.0, None, 2, 0]).trajectory, planned().trajectory
    assert "tool_seconds" not in without.to_json()
    assert Trajectory.from_json(with_times.to_json()) == with_times


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tool_time": "soon"}, "--tool-time must be none, recorded or a number of seconds, got 'soon'"),
        ({"tool_time": "-1"}, "got '-1'"),
        ({"tool_time": "nan"}, "got 'nan'"),
        ({"tool_time": "recorded"}, "no trajectory says how long its tools took"),
        ({"concurrency": 0}, "--concurrency must be at least 1, got 0"),
        ({"arms": ("k3p",)}, "got 'k3p'"),
        ({"decoder": "no-such-model"}, "no-such-model"),
        ({"trajectories": Path("nowhere.jsonl")}, "nowhere.jsonl"),
    ],
)
def test_impossible_options_are_one_line(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    write_trajectories(tmp_path / "runs.jsonl", [planned().trajectory])
    options: dict[str, Any] = {"trajectories": tmp_path / "runs.jsonl", "out": tmp_path / "out", **more}
    with pytest.raises(LohaError) as refused:
        bench.main(bench.Options(**options))
    assert says in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()
