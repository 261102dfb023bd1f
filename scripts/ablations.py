"""All ablations on the miniature, with several seeds: `python scripts/ablations.py`.

Makes what the configurations in configs/ablations/ name (trajectories, students, teacher caches), then runs every
configuration with every seed (`acd.ablations`) and writes runs/ablations/results.{jsonl,md,png}. Started again, it goes
on where it was. About two minutes a cell on one core.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from demo import HELD_OUT_SEED, ONE_THREAD, TRAIN_SEED, record
from story import Story

from acd.ablations import KS
from acd.config import Config, load_config
from loha.cli import run_main
from miniature import base_dir, lclm_dir

RUN = Path("runs/ablations")
FOLDER = Path("configs/ablations")
REFERENCE = FOLDER / "acd.yaml"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the script."""

    arms: tuple[str, ...] = ()
    """Names of files in configs/ablations/; all when left out."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the data's order, the questions and the random windows."""

    jobs: int = 1
    """Cells side by side, one core each."""

    k: tuple[str, ...] = KS
    """Windows to evaluate."""


def main(options: Options) -> None:
    """Run all ablations on the miniature and report mean and spread over seeds."""
    story = Story("ablations on the miniature", variables=ONE_THREAD)
    names = options.arms or tuple(sorted(path.stem for path in FOLDER.glob("*.yaml") if path != REFERENCE))
    files = list(dict.fromkeys([REFERENCE, *(FOLDER / f"{name}.yaml" for name in names)]))
    configs = {path: load_config(path) for path in files}
    for name, seed, instances in (("train", TRAIN_SEED, 640), ("held_out", HELD_OUT_SEED, 16)):
        if not (RUN / f"{name}.jsonl").is_file():
            record(story, RUN, name, base_dir(), seed=seed, instances=instances, runs=1)
    for config in configs.values():
        _student(story, config)
    for path, config in configs.items():
        _cache(story, path, config)
    grid = ("--config", *files, "--seeds", *map(str, options.seeds), "--k", *options.k)
    story.step(
        "train and evaluate every arm with every seed",
        *("python", "-m", "acd.ablations", *grid, "--jobs", str(options.jobs), "--out", RUN),
    )
    story.finish()


def _student(story: Story, config: Config) -> None:
    """Initialise the student that a configuration names: <start>-<rank>."""
    folder = Path(config.model.student)
    if folder.is_dir():
        return
    start, _, rank = folder.name.partition("-")
    command = ("loha", "init", "--base", base_dir(), "--lclm", lclm_dir(), "--rank", rank, "--patch", start)
    story.step(f"initialise {folder.name}", *command, "--out", folder, quiet=True)


def _cache(story: Story, path: Path, config: Config) -> None:
    """Write the teacher cache that a configuration names; caches of one teacher are shared between configurations."""
    folder = Path(config.teacher.cache or "")
    if not (folder / "index.json").is_file():
        story.step(f"cache {folder.name}", "python", "-m", "acd.cache_teacher", "--config", path)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:], prog="scripts/ablations.py"))
