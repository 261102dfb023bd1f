"""A grid of configurations and seeds: each cell once, in a process of its own, with mean and spread at the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from acd.ablation_report import table
from acd.ablations import RESULT_NAME, main, make_cells, run_cell
from acd.config import load_config
from loha.command_line import run_reporting
from loha.init_student import Options, init_student
from loha.weight_files import save_tensors
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
    words += ["--jobs", "2"]
    assert run_reporting(lambda: main(words)) == 0
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    trained = [("plain", 0), ("plain", 1)]
    assert [(r["arm"], r["seed"]) for r in results] == [("base", None), ("start student", None), *trained]
    assert abs(results[0]["drift"]) < 1e-6 and all(r["drift"] > 1e-6 for r in results[2:])
    assert all(r["k"]["0"]["turns"] == 2 for r in results)
    assert results[2]["k"] != results[3]["k"], "seeds differ"
    row = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("| plain | 2 |"))
    assert row.count("±") == 5
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")

    stamps = {path: path.stat().st_mtime_ns for path in folder.rglob(RESULT_NAME)}
    assert run_reporting(lambda: main(words)) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob(RESULT_NAME)} == stamps and len(stamps) == 4
    other = make_cells(arms, [0], folder, ks=("0",), turns=2)
    assert all(cell.result() is None for cell in other), "another question has another answer"

    arm(world, "plain", optimizer={"lr_patch": 0.5})
    run_cell(make_cells(arms, [0], folder, ks=("0",), turns=2)[-1])
    step = json.loads((folder / "cells/plain-seed-0/run/metrics.jsonl").read_text())
    assert step["lr"]["patch"] == 0.5, "not the checkpoint that other settings made"


def test_a_result_belongs_to_the_files_that_it_was_made_from(tmp_path: Path) -> None:
    """Student, base and trajectories made anew under the same names."""
    world = make_world(tmp_path, trajectories=2)

    def keys() -> list[str]:
        return [cell.key for cell in make_cells([arm(world, "arm")], [0], tmp_path / "grid")]

    found = [keys()]
    assert keys() == found[0] and len(set(found[0])) == 3
    init_student(Options(base=world.base, lclm=world.lclm, rank=2, out=world.student))[0].write(world.student)
    found.append(keys())
    world.trajectories.write_text(world.trajectories.read_text().replace("amber", "umber"))
    found.append(keys())
    weights = world.base / "model.safetensors"
    save_tensors({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
    found.append(keys())
    assert all(len(set(same_cell)) == len(found) for same_cell in zip(*found, strict=True))


def test_a_cell_that_fails_names_its_log(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    broken, held_out = arm(world, "broken"), world.root / "cut.jsonl"
    held_out.write_text(world.trajectories.read_text()[:100])
    broken.write_text(broken.read_text().replace(f"held_out: {world.trajectories}", f"held_out: {held_out}"))
    words = ["--config", str(broken), "--seeds", "0", "--out", str(world.root / "broken-grid")]
    assert run_reporting(lambda: main(words)) == 2
    assert "cell base failed with 2; see" in capfd.readouterr().err
    assert "cut.jsonl: row 1: not a canonical trajectory" in (world.root / "broken-grid/cells/base/log.txt").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--job", "2"], "error: the following arguments are required: --out; see python -m acd.ablations --help"),
        (["--out", "x", "--jobs", "two"], "error: argument --jobs: invalid int value: 'two'"),
        (["--out", "x"], "error: nowhere is not a folder; expected a student"),
    ],
)
def test_what_the_user_gave_wrong(
    world: World, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    config = arm(world, "wrong")
    config.write_text(config.read_text().replace(str(world.student), "nowhere"))
    assert run_reporting(lambda: main(["--config", str(config), *words])) == 2
    told = capfd.readouterr().err
    assert told.startswith(message) and told.count("\n") == 1


def test_spread_is_over_seeds() -> None:
    results: list[dict[str, Any]] = [
        {"arm": "a", "seed": s, "k": {"0": {"exact_turns": x}}, "drift": d, "read_back": {"exact": x, "nll": d}}
        for s, x, d in ((0, 0.5, 0.1), (1, 0.7, 0.3))
    ]
    row = "| a | 2 | 60.0 ± 14.1 % | 0.2000 ± 0.1414 | 60.0 ± 14.1 % | 0.2000 ± 0.1414 |"
    assert row in table(results)
    del results[0]["read_back"]
    results[1]["read_back"] = {"exact": None, "nll": None}
    assert "| a | 2 | 60.0 ± 14.1 % | 0.2000 ± 0.1414 |  |  |" in table(results)


def test_every_ablation_differs_in_one_thing() -> None:
    reference = load_config(CONFIGS / "ablations" / "acd.yaml")
    for path in sorted((CONFIGS / "ablations").glob("*.yaml")):
        config = load_config(path)
        changed = [s for s in vars(reference) if s != "run" and getattr(config, s) != getattr(reference, s)]
        assert len(changed) == (0 if path.stem == "acd" else 1), f"{path.stem} changes {changed}"
