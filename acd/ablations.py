"""Train and evaluate a grid of configurations and seeds, one process a cell; what is done is not done again.

    python -m acd.ablations --config configs/ablations/*.yaml --seeds 0 1 2 --out runs/ablations

Each cell trains a configuration with one seed and evaluates the student on the held-out trajectories. The untrained
starts are evaluated too. A cell is done again when its configuration or the files that it names have changed.
`results.jsonl` has one object per cell, `results.md` the table, `results.png` the plot.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from acd.ablation_report import write_report
from acd.config import Config, config_dict, load_config
from acd.evaluate import EvaluationRule, evaluate_student
from acd.input_hash import input_hash
from acd.train import train
from loha.atomic import atomic_path, check_writable
from loha.command_line import OneLineParser, run_reporting
from loha.console import out
from loha.errors import LohaError
from loha.layout import parse_k
from loha.progress import note, progress_bar

KS = ("0", "1", "3", "4", "8", "inf")
TURNS = 8
"""Of each held-out trajectory, the same for all arms: a moving window costs a forward pass per turn."""
READ_BACK_SHARE = 0.1
"""Of the questions asked in evaluation: more than in training, for a steadier figure."""
REPORT_VERSION = 2
"""Of what an evaluation reports: cells that lack a figure are evaluated again."""
RESULT_NAME = "result.json"
TRAINED_NAME = "trained.txt"
"""Holds the key of the training whose run folder lies beside it."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One arm with one seed."""

    arm: str
    seed: int | None
    """None: the student that the arm starts from, untrained."""

    config: Config
    inputs: str
    """Hash of the files that the configuration names, as they were when the grid was made."""

    rule: EvaluationRule
    folder: Path
    patch: bool = True
    """False evaluates the base on the start's latents."""

    @property
    def training_key(self) -> str:
        """Hash of everything that the training depends on."""
        return _hash({"config": config_dict(self.config), "inputs": self.inputs})

    @property
    def key(self) -> str:
        """Hash of everything that the cell was asked to do, and of what it was to read."""
        asked = {"training": self.training_key, "rule": asdict(self.rule), "patch": self.patch}
        return _hash(asked | {"report": REPORT_VERSION})

    def result(self) -> dict[str, Any] | None:
        """Return what the cell gave, None when it has not been done as it is asked now."""
        path = self.folder / RESULT_NAME
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return found if found.get("key") == self.key else None


def make_cells(
    configs: Sequence[Path], seeds: Sequence[int], out_dir: Path, *, ks: Sequence[str] = KS, turns: int | None = TURNS
) -> list[Cell]:
    """Return the cells of a grid: the base and the untrained starts first, then seed by seed.

    Args:
        configs: files, one per arm; the stem is the arm's name, the first file the reference.
        seeds: each replaces `run.seed`.
        out_dir: gets one folder per cell.
        ks: windows to evaluate.
        turns: evaluated of each trajectory; None for all.

    Raises:
        LohaError: when two files have one name, a file is not a configuration, or what it names is not there.
    """
    arms = {path.stem: load_config(path) for path in configs}
    if len(arms) < len(configs):
        raise LohaError(f"two configurations have the same name: {', '.join(str(path) for path in configs)}")
    reference = next(iter(arms.values()))
    asked = replace(reference.readback, share=READ_BACK_SHARE).rule()
    rule = EvaluationRule(
        ks=tuple(parse_k(k) for k in ks),
        turns=turns,
        readback=asked,
        candidates=reference.teacher.candidates,
        chunk=reference.loss.chunk,
    )
    inputs = {arm: input_hash(config) for arm, config in arms.items()}

    def cell(arm: str, name: str, seed: int | None, config: Config, *, patch: bool = True) -> Cell:
        folder = out_dir / "cells" / name
        if seed is not None:
            config = replace(config, run=replace(config.run, seed=seed, output_dir=str(folder / "run")))
        return Cell(
            arm=name if seed is None else arm,
            seed=seed,
            config=config,
            inputs=inputs[arm],
            rule=rule,
            folder=folder,
            patch=patch,
        )

    cells = [cell(next(iter(arms)), "base", None, reference, patch=False)]
    for student in dict.fromkeys(config.model.student for config in arms.values()):
        arm, config = next((arm, config) for arm, config in arms.items() if config.model.student == student)
        cells.append(cell(arm, f"start {Path(student).name}", None, config))
    return cells + [cell(arm, f"{arm}-seed-{seed}", seed, config) for seed in seeds for arm, config in arms.items()]


def run_cells(cells: Sequence[Cell], out_dir: Path, *, jobs: int = 1) -> list[dict[str, Any]]:
    """Do the cells that are not done yet, and report after each.

    Args:
        cells: of the grid.
        out_dir: gets results.jsonl, results.md and results.png.
        jobs: processes side by side.

    Returns:
        The results of all cells, in order.

    Raises:
        LohaError: when a cell fails; names its log. Cells that are done stay done.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["acd.train", "acd.evaluate"])  # one import of torch for all cells
    missing = [cell for cell in cells if cell.result() is None]
    reporting = threading.Lock()  # two threads would write the same temporary files, and pyplot is not made for threads
    bar = progress_bar("ablations", total=len(missing), unit="cell")
    with bar, ThreadPoolExecutor(jobs) as pool:

        def one(cell: Cell) -> None:
            process = context.Process(target=_child, args=(cell,), daemon=True)
            process.start()
            process.join()
            if process.exitcode:
                raise LohaError(
                    f"cell {cell.folder.name} failed with {process.exitcode}; see {cell.folder / 'log.txt'}"
                )
            with reporting:
                write_report(_results(cells), out_dir)
                bar.update()

        futures = [pool.submit(one, cell) for cell in missing]
        try:
            for future in futures:
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            for process in active_children():
                process.terminate()
            raise
    found = _results(cells)
    write_report(found, out_dir)
    return found


def run_cell(cell: Cell) -> dict[str, Any]:
    """Train and evaluate one cell in this process, and keep its result."""
    begin = time.perf_counter()
    student = cell.config.model.student
    if cell.seed is not None:
        _forget_other_training(cell)
        train(cell.config)
        student = str(Path(cell.config.run.output_dir) / "student")
        if not Path(student).is_dir():
            raise LohaError(f"{cell.folder}: training was ended by a signal")
    trained = time.perf_counter()
    report = evaluate_student(cell.config, student, cell.rule, patch=cell.patch)
    result = {
        "arm": cell.arm,
        "seed": cell.seed,
        "key": cell.key,
        "seconds": {"train": round(trained - begin, 1), "evaluate": round(time.perf_counter() - trained, 1)},
        **report,
    }
    with atomic_path(cell.folder / RESULT_NAME) as temporary:
        temporary.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


def _forget_other_training(cell: Cell) -> None:
    """Remove a run that was made from other files or settings: training would go on from its checkpoints."""
    path, run = cell.folder / TRAINED_NAME, Path(cell.config.run.output_dir)
    known = path.is_file() and path.read_text(encoding="utf-8") == cell.training_key
    if not known and run.is_dir():
        shutil.rmtree(run)
    with atomic_path(path) as temporary:
        temporary.write_text(cell.training_key, encoding="utf-8")


def _hash(asked: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _child(cell: Cell) -> None:
    """Run a cell with its output in a log."""
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    cell.folder.mkdir(parents=True, exist_ok=True)
    with (cell.folder / "log.txt").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

        def run() -> None:
            run_cell(cell)

        code = run_reporting(run)
    sys.exit(code)


def _results(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    return [found for cell in cells if (found := cell.result()) is not None]


def main(argv: Sequence[str] | None = None) -> None:
    """Train and evaluate configurations with several seeds, and report mean and spread."""
    parser = OneLineParser(prog="python -m acd.ablations", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--config", nargs="+", type=Path, required=True, help="one file per arm, the reference first")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--k", nargs="+", default=list(KS), help="windows to evaluate")
    parser.add_argument("--turns", type=int, default=TURNS, help="evaluated of each held-out trajectory")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results and of one folder per cell")
    parser.add_argument("--jobs", type=int, default=1, help="cells side by side")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        raise LohaError(f"--jobs must be at least 1, got {options.jobs}")
    if options.turns < 1:
        raise LohaError(f"--turns must be at least 1, got {options.turns}")
    check_writable(options.out / "results.md")
    cells = make_cells(options.config, options.seeds, options.out, ks=options.k, turns=options.turns)
    missing = sum(cell.result() is None for cell in cells)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no cell outlives this process
    note(f"{len(cells)} cells, {len(cells) - missing} of them done")
    results = run_cells(cells, options.out, jobs=options.jobs)
    out((options.out / "results.md").read_text(encoding="utf-8"))
    out(json.dumps({"cells": len(results), "results": str(options.out / "results.jsonl")}))


if __name__ == "__main__":
    sys.exit(run_reporting(main))
