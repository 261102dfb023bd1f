"""The epoch plan: which pieces lie in which row of which optimizer step, fixed from a seed before the first step.

Nothing else decides the order of the data: step k of rank r is a function of the plan alone. That makes resuming exact
with any number of workers, and lets a run go on with another number of devices.

    python -m acd.plan --config F        # measure, pack, and report without training
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from acd.command import command_parser, parse_command, student_config
from acd.config import Config
from acd.corpus import Corpus
from acd.packing import Limits, Piece, Step, make_steps
from acd.views import ViewBuilder, ViewRule
from loha.atomic import atomic_path
from loha.command_line import run_reporting
from loha.console import out
from loha.errors import LohaError
from loha.progress import progress_bar
from loha.student import build_renderer
from loha.student_files import StudentConfig

PLAN_NAME = "plan.jsonl"
FORMAT = 1
_CHUNK = 8


@dataclass(frozen=True)
class Skipped:
    """A trajectory that does not train."""

    trajectory: str
    tokens: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """The optimizer steps of a run, in order."""

    key: str
    """Hash of everything that the plan was made from."""
    steps: tuple[Step, ...]
    skipped: tuple[Skipped, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the plan: a header line, then one line per step."""
        header = {
            "format": FORMAT,
            "key": self.key,
            "steps": len(self.steps),
            "skipped": [dataclasses.astuple(skipped) for skipped in self.skipped],
        }
        with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as stream:
            for line in (header, *(_step_json(step) for step in self.steps)):
                stream.write(json.dumps(line) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan.

        Raises:
            LohaError: when the file is not a whole plan of this format.
        """
        try:
            header, *lines = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
            if header["format"] != FORMAT or len(lines) != header["steps"]:
                raise ValueError(f"format {header['format']}, {len(lines)} of {header['steps']} steps")
            skipped = tuple(Skipped(*item) for item in header["skipped"])
            return cls(header["key"], tuple(_step_from(line) for line in lines), skipped)
        except (ValueError, KeyError, TypeError) as error:
            raise LohaError(
                f"{path}: not a whole epoch plan ({error}); `python -m acd.plan` makes one, and a run "
                "makes its own when its plan.jsonl is gone"
            ) from error

    def pieces(self) -> Iterator[Piece]:
        """Yield every piece, in order."""
        return (piece for step in self.steps for row in step for piece in row)


def view_rule(config: Config) -> ViewRule:
    """Return what decides the examples of a run."""
    return ViewRule(
        latent_k=config.views.latent_k,
        latent_share=config.views.latent_share,
        full_share=config.views.full_share,
        readback=config.readback.rule(),
        seed=config.run.seed,
    )


def limits(config: Config) -> Limits:
    """Return what fits in rows and steps."""
    return Limits(
        tokens_per_row=config.packing.tokens_per_row,
        rows_per_step=config.packing.rows_per_step,
        attention_tokens=config.packing.attention_tokens,
        same_row=config.teacher.mode == "live",
    )


def plan_key(config: Config, corpus: Corpus, fingerprint: dict[str, Any]) -> str:
    """Return the hash of everything that a plan depends on; the number of devices is not among it."""
    parts = {
        "corpus": corpus.digest,
        "rule": dataclasses.asdict(view_rule(config)),
        "limits": dataclasses.asdict(limits(config)),
        "epochs": config.run.epochs,
        "fingerprint": fingerprint,
        "format": FORMAT,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def make_plan(config: Config, corpus: Corpus, student: StudentConfig, *, workers: int = 0) -> Plan:
    """Measure every view and pack all epochs.

    Args:
        config: of the run.
        corpus: the training trajectories.
        student: names the tokenizers and encoder settings.
        workers: processes that measure.
    """
    builder = ViewBuilder(build_renderer(student), view_rule(config), student=student)
    steps: list[Step] = []
    skipped: dict[str, Skipped] = {}
    for epoch in range(config.run.epochs):
        groups = [group for group in measure(corpus, builder, epoch, workers=workers) if group]
        random.Random(f"order/{config.run.seed}/{epoch}").shuffle(groups)
        packed, too_long = make_steps(groups, limits(config))
        steps += packed
        for group in too_long:
            skipped[group[0].trajectory] = _too_long(group, config)
    if not steps:
        shortest = min(skipped.values(), key=lambda each: each.tokens, default=Skipped("", 0, ""))
        raise LohaError(
            f"no trajectory of {corpus.path} fits {config.packing.tokens_per_row} tokens per row and "
            f"{config.packing.tokens_per_step} per step: of the shortest, {shortest.reason}; raise "
            "packing.tokens_per_row, and packing.tokens_per_step, which holds all views of a trajectory"
            if skipped
            else f"no view of {corpus.path} trains: views.latent_share and views.full_share drop them all"
        )
    key = plan_key(config, corpus, builder.renderer.fingerprint)
    return Plan(key, tuple(steps), tuple(skipped.values()))


def measure(corpus: Corpus, builder: ViewBuilder, epoch: int, *, workers: int = 0) -> list[list[Piece]]:
    """Return the pieces of every trajectory, in file order."""
    ids = [entry.id for entry in corpus.entries()]
    found = []
    with progress_bar("measuring views", total=len(ids), unit="trajectory") as bar:
        for pieces in _measured(corpus, builder, epoch, ids, workers):
            found.append(pieces)
            bar.update()
    return found


def _measured(
    corpus: Corpus, builder: ViewBuilder, epoch: int, ids: Sequence[str], workers: int
) -> Iterator[list[Piece]]:
    if workers < 2 or len(ids) < 4 * _CHUNK:
        yield from (builder.pieces(corpus[i], epoch) for i in ids)
        return
    # Not forked from this process, whose threads and device context must not be copied.
    context = get_context("forkserver")
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(corpus, builder)
    ) as pool:
        yield from pool.map(_measure_one, ids, [epoch] * len(ids), chunksize=_CHUNK)


_worker: tuple[Corpus, ViewBuilder]


def _start_worker(corpus: Corpus, builder: ViewBuilder) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (corpus, builder)


def _measure_one(trajectory_id: str, epoch: int) -> list[Piece]:
    corpus, builder = _worker
    return builder.pieces(corpus[trajectory_id], epoch)


def _too_long(group: Sequence[Piece], config: Config) -> Skipped:
    longest = max(piece.tokens for piece in group)
    row = config.packing.tokens_per_row
    reason = (
        f"its longest view has {longest} tokens, a row {row}"
        if longest > row
        else "its views do not fit one row" + (" together" if config.teacher.mode == "live" else "s of one step")
    )
    return Skipped(group[0].trajectory, longest, reason)


def _step_json(step: Step) -> list[list[dict[str, Any]]]:
    return [[dataclasses.asdict(piece) for piece in row] for row in step]


def _step_from(line: list[list[dict[str, Any]]]) -> Step:
    return tuple(tuple(Piece(**piece) for piece in row) for row in line)


def plan_summary(plan: Plan, config: Config) -> dict[str, Any]:
    """Return what a plan holds, for people and logs."""
    pieces = list(plan.pieces())
    rows = [row for step in plan.steps for row in step]
    tokens = sum(piece.tokens for piece in pieces)
    return {
        "steps": len(plan.steps),
        "rows": len(rows),
        "trajectories": len({piece.trajectory for piece in pieces}),
        "skipped": [dataclasses.asdict(skipped) for skipped in plan.skipped],
        "tokens": tokens,
        "row_fill": tokens / (len(rows) * config.packing.tokens_per_row) if rows else 0.0,
        "latent_tokens": sum(p.tokens for p in pieces if p.view == "latent"),
        "full_tokens": sum(p.tokens for p in pieces if p.view == "full"),
        "distill_positions": sum(p.positions for p in pieces if p.view == "latent"),
        "anchor_positions": sum(p.positions for p in pieces if p.view == "full"),
        "read_back_positions": sum(p.answers for p in pieces),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Make the plan of a run, write it, and print what it holds."""
    _, config = parse_command(command_parser("python -m acd.plan", main.__doc__), argv)
    corpus = Corpus(config.data.trajectories, limit=config.data.limit)
    plan = make_plan(config, corpus, student_config(config), workers=config.data.workers)
    plan.save(Path(config.run.output_dir) / PLAN_NAME)
    out(json.dumps(plan_summary(plan, config)))


if __name__ == "__main__":
    sys.exit(run_reporting(main))
