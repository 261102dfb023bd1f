"""The parts of a sweep that need no server: grid, turns, comparison, summary, table, plot."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from loha.errors import LohaError
from loha.trajectory import Trajectory
from serving import sweep
from serving.arm import Arm, grid
from serving.cell import Cell, questions, turn_calls, turn_text
from serving.plot import plot_sweep
from serving.summary import summarize, table

LATENT = Arm(view="latent", k=0, polling=1)
FULL = Arm(view="full", k=None, polling=1)


def test_full_text_is_one_arm_whatever_the_view_and_polling() -> None:
    arms = grid(["latent", "mask"], [0, None], [1, 8])
    names = ["latent:k0p1", "full", "latent:k0p8", "mask:k0p1", "mask:k0p8"]
    assert [arm.name for arm in arms] == names
    assert arms[1].request() == {"k": "inf", "polling": 1, "view": "full"}
    assert [arm.name for arm in grid(["full"], [0, 3], [1])] == ["full"]


def trajectory(turns: int) -> Trajectory:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for i in range(turns):
        messages += [{"role": "assistant", "content": f"a{i}"}, {"role": "tool", "content": f"r{i}"}]
    return Trajectory(id="t", instance_id="i", messages=messages)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [("all", [0, 1, 2, 3, 4]), ("last", [4]), ("every:2", [0, 2, 4]), ("every:3", [1, 4]), ("every:9", [4])],
)
def test_turns_that_are_asked(turns: str, expected: list[int]) -> None:
    asked = questions(trajectory(5), turns)
    assert [question.turn for question in asked] == expected
    body = asked[-1].body(LATENT, "m", 9)
    assert body["messages"] == trajectory(5).messages[:9] and "tools" not in body
    assert asked[-1].recorded["content"] == "a4"


@pytest.mark.parametrize("turns", ["every:0", "every:", "every:x", "first", ""])
def test_other_words_for_turns_are_refused(turns: str) -> None:
    with pytest.raises(LohaError, match="every:N"):
        questions(trajectory(1), turns)


def test_a_history_must_come_before_the_turn() -> None:
    said_first = Trajectory(id="t", instance_id="i", messages=[{"role": "assistant", "content": "hello"}])
    assert questions(said_first, "all") == []


def test_turns_are_compared_without_outer_space_and_by_parsed_arguments() -> None:
    def said(content: str | None, arguments: Any) -> dict[str, Any]:
        call = {"id": "x", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        return {"role": "assistant", "content": content, "tool_calls": [call]}

    assert turn_text(said("run\n", "{}")) == "run" and turn_text(said(None, "{}")) == ""
    assert turn_calls(said("", '{"a": 1, "b": 2}')) == turn_calls(said("", '{"b":2,"a":1}'))
    assert turn_calls(said("", "{")) == [("bash", "{")]
    assert turn_calls({"content": "x"}) == turn_calls({"content": "x", "tool_calls": None}) == []


def cell(trajectory: str, turn: int, exact: bool, **more: Any) -> Cell:
    counts = {"context_tokens": 50, "full_text_tokens": 100, "latent_tokens": 4, "encoder_tokens": 60 + turn}
    return Cell(trajectory=trajectory, turn=turn, arm=LATENT.name, exact=exact, **(counts | more))


def test_summary_by_hand() -> None:
    cells = [
        cell("a", 0, True, cached_tokens=10),
        cell("a", 1, False, cached_tokens=30),
        cell("b", 0, True),
        cell("b", 1, False, error="HTTP 400: too long"),
        Cell(trajectory="a", turn=0, arm="some other arm"),
    ]
    (row,) = summarize([LATENT, FULL], cells)
    assert (row.trajectories, row.calls, row.errors) == (2, 3, 1)
    assert row.exact == 0.75  # mean of 1/2 and 1
    assert math.isclose(row.exact_se, 0.25)  # sd of (0.5, 1) is 0.3536, over sqrt 2
    assert (row.context_tokens_per_call, row.effective_ratio, row.latents_per_call) == (50, 2, 4)
    assert row.encoder_tokens_once == (61 + 60) / 2
    assert row.encoder_tokens_per_call == (60 + 61 + 60) / 2
    assert math.isclose(row.cached_share or 0, 40 / 150)
    assert table([row]).splitlines()[2].startswith("| latent | 0 | 1 | 3 | 75.0% | 25.0% | 50 | 100 | 2.00 |")


def test_plot_takes_any_mixture_of_arms(tmp_path: Path) -> None:
    arms = grid(["latent", "mask"], [0, 3, None], [1, 8])
    cells = [Cell(trajectory="a", turn=0, arm=arm.name, exact=True, context_tokens=9) for arm in arms]
    for number, part in enumerate((arms, [FULL])):
        path = tmp_path / f"{number}.png"
        plot_sweep(summarize(part, cells), path, title="x")
        assert path.read_bytes().startswith(b"\x89PNG")
    assert sorted(child.name for child in tmp_path.iterdir()) == ["0.png", "1.png"]


def test_a_sweep_of_another_checkpoint_is_not_gone_on_with(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.jsonl"
    recorded.write_text("")
    options = sweep.Options(trajectories=recorded, out=tmp_path / "out")
    for checkpoint in ("old", "old"):
        assert sweep._resume(options, "student", checkpoint) == {}
    with pytest.raises(LohaError, match="checkpoint 'old', this one has 'new'"):
        sweep._resume(options, "student", "new")
