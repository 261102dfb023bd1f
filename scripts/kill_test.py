"""Kill -9 at random times, and nothing is lost: `python scripts/kill_test.py --config F --out DIR`.

Writes a teacher cache and trains without interruption, then both again, killed at random times and started again each
time. The shards must be the same files byte for byte, none written twice; the last checkpoint's tensors and the metrics
of every step must be the same bit for bit. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from acd.compare import compare_runs
from acd.config import load_config
from acd.metrics import METRICS_NAME, read_lines
from acd.teacher_cache import SHARD_GLOB
from loha.cli import run_main
from loha.console import err, out
from loha.errors import LohaError

CONTEXT = get_context("forkserver")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the script."""

    out: Path
    """New folder for both caches and both runs."""

    config: Path = Path("configs/ablations/acd.yaml")
    """Names trajectories and student; what is written goes to --out."""

    kills: int = 10
    """Of caching, and as many of training."""

    trajectories: int = 48
    """Used of the file."""

    per_shard: int = 3
    """Trajectories of a shard."""

    steps: int = 14
    """Optimizer steps; a checkpoint after each."""

    seed: int = 0
    """Of the times."""


def main(options: Options) -> int:
    """Kill caching and training at random times and compare what they leave with uninterrupted ones."""
    if options.out.exists():
        raise LohaError(f"{options.out} exists; choose a new folder")
    CONTEXT.set_forkserver_preload(["acd.train", "acd.cache_teacher"])
    load_config(options.config)
    rng = random.Random(options.seed)
    caching = repeat(
        lambda name: start(_cache, options, name),
        lambda name: len(list((options.out / f"cache-{name}").glob(SHARD_GLOB))),
        options,
        rng,
        "caching",
    )
    shards = compare_shards(options.out / "cache-straight", options.out / "cache-killed", caching["written"])
    training = repeat(
        lambda name: start(_train, options, name),
        lambda name: len(read_lines(options.out / f"run-{name}" / METRICS_NAME)),
        options,
        rng,
        "training",
    )
    runs = compare_runs(options.out / "run-straight", options.out / "run-killed")
    same_run = runs["first"] is None and not any(runs["steps_only_in"].values()) and not runs["tensors"]["different"]
    leftovers = [str(path) for path in options.out.rglob(".*")]
    same = shards["same"] and not shards["written_twice"] and same_run and not leftovers
    result = {
        "same": same,
        "kills": {"caching": len(caching["kills"]), "training": len(training["kills"])},
        "shards": shards,
        "steps": runs["steps"],
        "tensors": runs["tensors"],
        "first_difference": runs["first"],
        "leftovers": leftovers,
        "units_done_at_kills": {"caching": caching["kills"], "training": training["kills"]},
    }
    out(json.dumps(result))
    return 0 if same else 1


def repeat(
    begin: Callable[[str], BaseProcess],
    done_units: Callable[[str], int],
    options: Options,
    rng: random.Random,
    what: str,
) -> dict[str, Any]:
    """Run a command to its end, then again with kills at random times, until it ends by itself.

    A kill comes after 0 or 1 more units of work (shards, optimizer steps) and a random part of the next.

    Returns:
        The kills with the units done by then, and the modification time of each shard when it was first seen.
    """
    straight = begin("straight")
    began = time.monotonic()
    straight.join()
    if straight.exitcode:
        raise LohaError(f"{what} failed without a kill: exit status {straight.exitcode}")
    units = done_units("straight")
    unit_s = (time.monotonic() - began) / max(1, units)
    kills: list[int] = []
    written: dict[str, int] = {}
    while True:
        process = begin("killed")
        if len(kills) < options.kills:
            done = done_units("killed")
            # Kills must not run out of work: when little is left, they come within the next unit.
            spare = units - done > 1.5 * (options.kills - len(kills))
            _wait_for_units(process, done_units, done + (rng.choice((0, 1, 1)) if spare else 0))
            process.join(rng.uniform(0, unit_s if spare else unit_s / 2))
            if process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGKILL)
        process.join()
        for path in (options.out / "cache-killed").glob(SHARD_GLOB):
            written.setdefault(path.name, path.stat().st_mtime_ns)
        if process.exitcode == 0:
            return {"kills": kills, "written": written}
        if process.exitcode != -signal.SIGKILL:
            raise LohaError(f"{what} failed after {len(kills)} kills: exit status {process.exitcode}")
        kills.append(done_units("killed"))
        err(f"{what}: kill {len(kills)} after {kills[-1]} units of work")


def _wait_for_units(process: BaseProcess, done_units: Callable[[str], int], target: int) -> None:
    while process.is_alive() and done_units("killed") < target:
        time.sleep(0.02)


def compare_shards(straight: Path, killed: Path, written: dict[str, int]) -> dict[str, Any]:
    """Compare two caches file by file."""
    one, other = ({path.name: path for path in folder.glob(SHARD_GLOB)} for folder in (straight, killed))
    return {
        "same": one.keys() == other.keys() and all(one[n].read_bytes() == other[n].read_bytes() for n in one),
        "count": len(other),
        "lost": sorted(one.keys() - other.keys()),
        "written_twice": [n for n, stamp in written.items() if n in other and other[n].stat().st_mtime_ns != stamp],
    }


def start(function: Callable[..., None], options: Options, name: str) -> BaseProcess:
    """Start a command in a process of its own, forked from one that has imported torch."""
    cache = options.out / ("cache-straight" if function is _train else f"cache-{name}")
    words = [
        *("--config", str(options.config), "--data.limit", str(options.trajectories)),
        *("--teacher.cache", str(cache), "--teacher.trajectories-per-shard", str(options.per_shard)),
        *("--run.output-dir", str(options.out / f"run-{name}"), "--run.max-steps", str(options.steps)),
        *("--run.checkpoint-every", "1", "--run.keep-last", "2"),
    ]
    process = CONTEXT.Process(target=function, args=(words,))
    process.start()
    return process


def _cache(words: list[str]) -> None:
    from acd.cache_teacher import main as cache
    from loha.command_line import run_reporting

    _one_thread()
    sys.exit(run_reporting(lambda: cache(words)))


def _train(words: list[str]) -> None:
    from acd.train import main as train
    from loha.command_line import run_reporting

    _one_thread()
    sys.exit(run_reporting(lambda: train(words)))


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:], prog="scripts/kill_test.py"))
