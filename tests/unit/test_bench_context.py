"""What a replay would read: keys by content, prefixes, and the choice of P, checked by eye and against brute force."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from loha.accounting import CallRecord
from loha.layout import Window
from loha.render import Renderer
from loha.tokenizer_dir import load_tokenizer
from loha.trajectory import Trajectory, write_trajectories
from serving.arm import Arm, grid
from serving.context_replay import ContentKeys, ReplayedCall, common_prefix, replay_trajectory
from tests.tiny_models import write_tokenizer


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Renderer(load_tokenizer(folder))


@pytest.fixture(scope="module")
def polling_sweep() -> ModuleType:
    """The benchmark, which is a script and no package."""
    path = Path(__file__).parents[2] / "benchmarks" / "polling_sweep.py"
    spec = importlib.util.spec_from_file_location("polling_sweep", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["polling_sweep"] = module
    spec.loader.exec_module(module)
    return module


def agent(steps: int, *, twice: bool = False) -> Trajectory:
    """A run whose observations all differ, or all but one pair."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "t"}]
    for step in range(steps):
        body = chr(97 + (0 if twice and step == 1 else step)) * (160 + 16 * (0 if twice and step == 1 else step))
        messages += [{"role": "assistant", "content": f"act {step}"}, {"role": "tool", "content": body}]
    return Trajectory(id="t", instance_id="i", messages=[*messages, {"role": "assistant", "content": "done"}])


def arm(k: int | None, polling: int = 1, view: Any = "latent") -> Arm:
    return Arm(view="full" if k is None else view, k=k, polling=polling)


def test_latents_compare_by_content_and_place(renderer: Renderer) -> None:
    keys = ContentKeys()
    rendering = renderer.render(agent(3).messages, window=Window(k=1))
    again = renderer.render(agent(3, twice=True).messages, window=Window(k=1))
    first, same, other = keys.of(rendering), keys.of(rendering), keys.of(again)
    assert (first == same).all()
    assert len(set(first[first < 0].tolist())) == sum(latent.count + 2 for latent in rendering.latents)
    assert (first[first >= 0] == [i for i in rendering.token_ids if i != renderer.placeholder_id]).all()
    a, b = rendering.latents[:2]
    assert common_prefix(first, other) == b.start  # the second observation is another one, of another length
    c, d = again.latents[:2]
    assert (other[c.start : c.start + c.count + 2] == other[d.start : d.start + d.count + 2]).all()
    assert a.encoder_ids == c.encoder_ids == d.encoder_ids


@pytest.mark.parametrize(("a", "b", "shared"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, -4, 3], [1, -5, 3], 1)])
def test_common_prefix(a: list[int], b: list[int], shared: int) -> None:
    assert common_prefix(np.array(a), np.array(b)) == shared


@pytest.mark.parametrize("reuse_output", [False, True])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("layout", [arm(None), arm(0), arm(1), arm(1, 3), arm(2, 2, "mask")])
def test_replay_equals_brute_force(renderer: Renderer, layout: Arm, block_size: int, reuse_output: bool) -> None:
    trajectory = agent(7, twice=True)
    others = [arm(0, 5), arm(3)]  # other arms in the same replay change nothing
    (calls, *_) = replay_trajectory(
        renderer, trajectory, [layout, *others], block_size=block_size, reuse_output=reuse_output
    )
    held: list[Any] = []
    met: set[tuple[int, ...]] = set()
    turns = [i for i, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
    assert len(calls) == len(turns)
    for index, call in zip(turns, calls, strict=True):
        history = trajectory.messages[:index]
        window = Window(k=layout.k, polling=layout.polling)
        rendering = renderer.render(history, window=window, view=layout.view, add_generation_prompt=True)
        keys: list[Any] = list(rendering.token_ids)
        for latent in rendering.latents:
            for offset in range(latent.count + 2):
                keys[latent.start + offset] = (latent.encoder_ids, offset)
        shared = 0
        while shared < min(len(keys) - 1, len(held)) and keys[shared] == held[shared]:
            shared += 1
        new = {latent.encoder_ids for latent in rendering.latents} - met
        met |= new
        reply = list((trajectory.messages[index]["content"] + "\0").encode())
        assert call.record == CallRecord(
            full_text_tokens=renderer.render(history, add_generation_prompt=True).context_tokens,
            context_tokens=len(keys),
            latent_tokens=rendering.latent_tokens,
            encoder_tokens_new=sum(map(len, new)),
            cached_tokens=shared // block_size * block_size,
            output_tokens=len(reply),  # the end-of-turn token counts
            k=layout.k,
            polling=layout.polling,
            view=layout.view,
            trajectory="t",
        )
        assert call.encoder_tokens == sum(len(latent.encoder_ids) for latent in rendering.latents)
        assert (call.rewritten_from is None) == (keys[: len(held)] == held)
        whole = renderer.render([*history, trajectory.messages[index]], view="full")
        held = keys + (whole.token_ids[-len(reply) - 1 : -2] if reuse_output else [])


def test_full_text_prefills_every_token_once_and_polling_saves_the_rewriting(renderer: Renderer) -> None:
    arms = [arm(None), arm(3, 1), arm(3, 4)]
    full, each, fourth = replay_trajectory(renderer, agent(8), arms, block_size=1)
    assert _prefilled(full) == full[-1].record.context_tokens
    # P=1 moves from the fourth observation on, P=4 at the fourth and the eighth.
    assert [call.rewritten_from is not None for call in each] == [*[False] * 4, *[True] * 5]
    assert [call.rewritten_from is not None for call in fourth] == [*[False] * 4, True, *[False] * 3, True]
    assert full[-1].record.context_tokens < _prefilled(fourth) < 0.75 * _prefilled(each)
    assert (
        sum(c.record.encoder_tokens_new for c in each) == each[-1].encoder_tokens < sum(c.encoder_tokens for c in each)
    )


def test_the_default_is_the_polling_that_prefills_least_within_both_limits(polling_sweep: ModuleType) -> None:
    # Two runs of one call each; context 100 and 200 at P=1, prefilled 80 and 100.
    def runs(*cells: tuple[int, int]) -> list[list[ReplayedCall]]:
        return [[_call(context, prefilled)] for context, prefilled in cells]

    arms = grid(["latent"], [3], [1, 2, 4, 8])
    rows = polling_sweep.rows_of(
        arms,
        [
            runs((100, 80), (200, 100)),
            runs((110, 60), (200, 48)),
            runs((130, 40), (210, 50)),
            runs((160, 20), (220, 20)),
        ],
    )
    assert [row.context_share for row in rows] == pytest.approx([1, 310 / 300, 340 / 300, 380 / 300])
    assert [row.prefill_share for row in rows] == pytest.approx([1, 0.6, 0.5, 40 / 180])
    assert rows[2].context_share_range == pytest.approx((1.05, 1.3))
    assert rows[2].prefill_share_range == pytest.approx((0.5, 0.5))

    def chosen(max_prefill: float, max_context: float) -> int | None:
        row = polling_sweep.choose(rows, "3", max_prefill, max_context)
        return None if row is None else row.polling

    assert [chosen(0.6, 1.15), chosen(0.6, 1.05), chosen(0.6, 1.5), chosen(0.1, 1.5)] == [4, 2, 8, None]
    assert "| 3 | 4 | 170 | 1.13 [1.05, 1.30] |" in polling_sweep.table(rows)


def test_polling_sweep_writes_its_table_and_one_json_line(
    polling_sweep: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    write_trajectories(tmp_path / "runs.jsonl", [agent(9)])
    options = polling_sweep.Options(
        trajectories=tmp_path / "runs.jsonl",
        tokenizer=tmp_path / "tokenizer",
        k=("inf",),
        polling=(4,),
        choose_k="3",
        max_prefill=0.8,
        max_context=2.0,
        out=tmp_path / "sweep.json",
    )
    assert polling_sweep.main(options) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "sweep.json").read_text()) == result
    assert [(row["k"], row["polling"]) for row in result["rows"]] == [("3", 1), ("3", 4), ("inf", 1)]
    assert result["chosen"]["polling"] == 4 and result["chosen"]["prefill_share"] < 0.8
    assert result["rows"][2]["encoder_once"] == 0 < result["rows"][0]["encoder_once"]


def _prefilled(calls: list[ReplayedCall]) -> int:
    return sum(call.record.context_tokens - call.record.cached_tokens for call in calls)


def _call(context: int, prefilled: int) -> ReplayedCall:
    record = CallRecord(full_text_tokens=context, context_tokens=context, cached_tokens=context - prefilled)
    return ReplayedCall(record=record, encoder_tokens=0, rewritten_from=None)
