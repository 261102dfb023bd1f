"""A grid of configurations and seeds: each cell once, in a process of its own, with mean and spread at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from acd.ablation_report import table
from acd.ablations import RESULT_NAME, main, make_cells
from acd.command import run_command
from acd.config import load_config
from tests.acd_world import World, make_world

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("ablations"), trajectories=3)


def arm(world: World, name: str, **sections: dict[str, Any]) -> Path:
    return world.write_config(
        name,
        data={"held_out": str(world.trajectories), "held_out_limit": 1},
        teacher={"mode": "live", "cache": None},
        model={"checkpointing": False},
        run={"max_steps": 1},
        **sections,
    )


def test_a_grid_is_done_once(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    arms = [arm(world, "plain")]
    folder = world.root / "grid"
    words = ["--config", *map(str, arms), "--seeds", "0", "1", "--k", "0", "inf", "--turns", "2", "--out", str(folder)]
    assert run_command(lambda: main(words)) == 0
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    trained = [("plain", 0), ("plain", 1)]
    assert [(r["arm"], r["seed"]) for r in results] == [("base", None), ("start student", None), *trained]
    assert abs(results[0]["drift"]) < 1e-6 and all(r["drift"] > 1e-6 for r in results[2:])
    assert all(r["k"]["0"]["turns"] == 2 for r in results)
    assert results[2]["k"] != results[3]["k"], "seeds differ"
    row = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("| plain | 2 |"))
    assert row.count("±") == 4
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")

    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob(RESULT_NAME)}
    assert run_command(lambda: main(words)) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob(RESULT_NAME)} == stamps and len(stamps) == 4
    other = make_cells(arms, [0], folder, ks=("0",), turns=2)
    assert all(cell.result() is None for cell in other), "another question has another answer"


def test_a_cell_that_fails_names_its_log(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    broken = arm(world, "broken", optimizer={"lr_patch": 1.0})
    broken.write_text(broken.read_text().replace(str(world.student), "nowhere"))
    words = ["--config", str(broken), "--seeds", "0", "--out", str(world.root / "broken-grid")]
    assert run_command(lambda: main(words)) == 2
    assert "cell base failed with 2; see" in capfd.readouterr().err
    assert "nowhere" in (world.root / "broken-grid/cells/base/log.txt").read_text()


def test_spread_is_over_seeds() -> None:
    results = [
        {"arm": "a", "seed": s, "k": {"0": {"exact_turns": x}}, "drift": d, "read_back": {"exact": None}}
        for s, x, d in ((0, 0.5, 0.1), (1, 0.7, 0.3))
    ]
    assert "| a | 2 | 60.0 ± 14.1 % | 0.2000 ± 0.1414 |  |" in table(results)


def test_every_ablation_differs_in_one_thing() -> None:
    reference = load_config(CONFIGS / "ablations" / "acd.yaml")
    for path in sorted((CONFIGS / "ablations").glob("*.yaml")):
        config = load_config(path)
        changed = [s for s in vars(reference) if s != "run" and getattr(config, s) != getattr(reference, s)]
        assert len(changed) == (0 if path.stem == "acd" else 1), f"{path.stem} changes {changed}"
