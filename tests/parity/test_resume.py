"""Killed and resumed equals uninterrupted, bit for bit; two processes equal one; a cache is never done twice."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from acd.cache_teacher import write_cache
from acd.parts import make_accelerator
from acd.teacher_cache import SHARD_GLOB
from tests.acd_processes import finish, prepare, start, start_cache, start_train, wait_for
from tests.acd_world import World, make_world
from tests.tolerances import TWO_PROCESS_LOSS, TWO_PROCESS_TENSORS

STEPS = 6


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("resume"), trajectories=6)


@pytest.fixture(scope="module")
def straight(world: World) -> Path:
    """The folder of a run that nothing interrupts."""
    assert finish(start_train(run_config(world, "straight"))) == [0]
    return world.root / "straight"


def run_config(world: World, name: str) -> Path:
    return world.write_config(
        name,
        run={"epochs": 3, "max_steps": STEPS, "checkpoint_every": 1},
        packing={"tokens_per_row": 1900, "tokens_per_step": 3800},
        teacher={"mode": "live", "cache": None},
        model={"checkpointing": False, "encoder_cache_gb": 0.001},
    )


def steps(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    last = checkpoint(folder, STEPS)
    moments = load_file(last / "moments.safetensors")
    return load_file(last / "trained.safetensors") | {f"moment {name}": t for name, t in moments.items()}


def without_time(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_s")} for line in lines]


def test_killed_and_preempted_equals_uninterrupted_bitwise(world: World, straight: Path) -> None:
    config, folder = run_config(world, "killed"), world.root / "killed"
    # kill -9 as soon as the second step is logged: before, within or after the writing of its checkpoint
    (process,) = start_train(config)
    wait_for(lambda: len(steps(folder)) >= 2, process)
    process.kill()
    assert finish([process]) == [-signal.SIGKILL]
    # SIGTERM in the course of a later step: saves and exits 0
    (process,) = start_train(config)
    wait_for(lambda: len(steps(folder)) >= 4, process)
    process.terminate()
    assert finish([process]) == [0]
    assert not (folder / "student").exists(), "a preempted run has no final student"
    assert finish(start_train(config, "--data.workers", "1")) == [0]

    assert without_time(steps(folder)) == without_time(steps(straight))
    got, want = tensors(folder), tensors(straight)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    assert not list(folder.glob("checkpoints/.*")), "leftovers of the killed run"
    for name in ("reading.safetensors", "patch/adapter_model.safetensors"):
        assert (folder / "student" / name).read_bytes() == (straight / "student" / name).read_bytes()


def few_files(words: list[str], rank: int, world: int, port: int) -> None:
    """Build all steps in a worker, with few file descriptors."""
    import resource

    from acd.config import load_config
    from acd.parts import load_parts
    from acd.run_folder import RunFolder

    prepare(rank, world, port)
    config = load_config(Path(words[0]))
    accelerator = make_accelerator(config)
    parts = load_parts(config, accelerator, RunFolder(config))
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(words[1]), int(words[1])))
    assert len(list(parts.steps(0))) == parts.total_steps


def test_rows_come_from_a_worker_with_few_files(world: World) -> None:
    config = world.write_config(
        "few-files",
        data={"trajectories": str(world.trajectories), "workers": 1},
        packing={"tokens_per_row": 1900, "tokens_per_step": 1900 * 8},
        run={"epochs": 4},
        teacher={"mode": "live", "cache": None},
    )
    assert finish(start(few_files, str(config), "96", world=1)) == [0]


def test_two_processes_equal_one_and_world_size_may_change(world: World, straight: Path) -> None:
    """The first steps on two processes, the rest on one: the same losses as one process throughout."""
    config, folder = run_config(world, "two"), world.root / "two"
    assert finish(start_train(config, "--run.max-steps", "3", world=2)) == [0, 0]
    assert len(json.loads((checkpoint(folder, 3) / "state.json").read_text())["random_states"]) == 2
    assert finish(start_train(config)) == [0]
    assert_same_steps(folder, straight)


def assert_same_steps(folder: Path, straight: Path, last: int = STEPS) -> None:
    """Losses, counts and gradient norms of every step, and the trained tensors at the end."""
    got, want = steps(folder), steps(straight)
    assert len(got) == len(want) == last
    for a, b in zip(got, want, strict=True):
        for term in ("distill", "read_back", "anchor"):
            assert a[term]["count"] == b[term]["count"]
            assert a[term]["sum"] == pytest.approx(b[term]["sum"], rel=TWO_PROCESS_LOSS)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=TWO_PROCESS_LOSS)
    for name, tensor in load_file(checkpoint(straight, last) / "trained.safetensors").items():
        torch.testing.assert_close(
            load_file(checkpoint(folder, last) / "trained.safetensors")[name], tensor, atol=TWO_PROCESS_TENSORS, rtol=0
        )


def test_sharded_equals_replicated(world: World, straight: Path) -> None:
    """FSDP2 on two processes, stopped and resumed, against one process; the last steps go on unsharded."""
    config, folder = run_config(world, "sharded"), world.root / "sharded"
    held_out = ("--data.held-out", str(world.trajectories), "--data.held-out-limit", "1", "--run.evaluate-every", "2")
    for last in ("2", "4"):
        words = ("--model.shard", "--run.max-steps", last, *held_out)
        assert finish(start_train(config, *words, world=2)) == [0, 0]
    assert json.loads((folder / "evaluations.jsonl").read_text().splitlines()[-1])["step"] == 4
    first = load_file(folder / "student" / "reading.safetensors")
    saved = load_file(checkpoint(folder, 4) / "trained.safetensors")
    assert torch.equal(first["adapter.fc1.weight"], saved["adapter.fc1.weight"])
    assert finish(start_train(config)) == [0]
    assert_same_steps(folder, straight)


def test_sharded_ranks_need_not_hold_the_same_kinds_of_rows(world: World) -> None:
    """Rows without latents, and a rank with fewer rows than the other: FSDP2 on two processes against one process."""
    sections: dict[str, dict[str, Any]] = {
        "data": {"trajectories": str(world.trajectories), "limit": 3},
        "views": {"latent_share": 0.6},
        "packing": {"tokens_per_row": 1000, "tokens_per_step": 4000},
        "run": {"epochs": 2, "max_steps": 2, "checkpoint_every": 0},
    }
    alone = world.config("uneven-alone", **sections)
    write_cache(alone, make_accelerator(alone))
    for name, words, processes in (("uneven-alone", (), 1), ("uneven-sharded", ("--model.shard",), 2)):
        config = world.write_config(name, **sections)
        assert finish(start_train(config, *words, world=processes)) == [0] * processes
    kinds = [
        [{piece["view"] for piece in row} for row in json.loads(line)]
        for line in (world.root / "uneven-alone/plan.jsonl").read_text().splitlines()[1:]
    ]
    assert any(len(rows) % 2 for rows in kinds), "one rank is without a row"
    assert any({"full"} in rows and any("latent" in row for row in rows) for rows in kinds), "latents on one rank"
    assert_same_steps(world.root / "uneven-sharded", world.root / "uneven-alone", last=2)


def test_killed_cache_keeps_its_shards(world: World) -> None:
    """Compared with a cache that two processes wrote without interruption."""
    sections: dict[str, dict[str, Any]] = {"teacher": {"trajectories_per_shard": 1}}
    whole = world.write_config("whole", teacher=sections["teacher"] | {"cache": str(world.root / "cache-whole")})
    assert finish(start_cache(whole, world=2)) == [0, 0]
    folder = world.root / "cache-killed"
    config = world.write_config("cut", teacher=sections["teacher"] | {"cache": str(folder)})
    (process,) = start_cache(config)
    wait_for(lambda: len(list(folder.glob(SHARD_GLOB))) >= 2, process)
    process.kill()
    assert finish([process]) == [-signal.SIGKILL]
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob(SHARD_GLOB)}
    assert len(before) >= 2
    (folder / ".shard-00005-0.safetensors.1.tmp").write_bytes(b"half")
    assert finish(start_cache(config)) == [0]
    after = {path.name: path.read_bytes() for path in folder.glob(SHARD_GLOB)}
    assert after == {path.name: path.read_bytes() for path in (world.root / "cache-whole").glob(SHARD_GLOB)}
    for name, stamp in before.items():
        assert (folder / name).stat().st_mtime_ns == stamp, f"{name} was written again"
    assert not list(folder.glob(".*"))
