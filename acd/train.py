"""Anchored Context Distillation: train a student to read latents while it stays its base on plain text.

    accelerate launch acd/train.py --config configs/qwen3-4b.yaml
    accelerate launch --config_file configs/accelerate/ddp_8.yaml acd/train.py --config configs/qwen3-4b.yaml

One optimizer step is a fixed set of packed rows, whatever the number of processes. Each row gives the sums of three
loss terms; they are divided once, by the counts of the whole step. A run that was killed goes on from its newest
checkpoint when it is started again.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from acd.checkpoint import Cursor, random_state, restore, whole_tensors
from acd.command import command_parser, parse_command
from acd.config import Config, config_dict
from acd.held_out import HeldOut, is_better
from acd.metrics import EVALUATIONS_NAME, METRICS_NAME, JsonLines, flat, step_metrics
from acd.optimizer import make_optimizer, set_rates
from acd.parts import Parts, load_parts, make_accelerator
from acd.preemption import Preemption
from acd.rows import TrainingRow
from acd.run_folder import RunFolder
from acd.sharding import is_sharded, no_sync, shard, whole, whole_value
from acd.step import AcdModel
from loha.command_line import run_reporting
from loha.errors import LohaError
from loha.progress import note, progress_bar
from loha.student import Student


def train(config: Config) -> None:
    """Train a student, from its start or from its newest checkpoint, to the end of the plan.

    Raises:
        LohaError: when a part is missing, damaged, or does not belong to the others.
    """
    with Preemption() as preemption:
        _train(config, preemption)


def _train(config: Config, preemption: Preemption) -> None:
    # 1. What the run is made of
    accelerator = make_accelerator(config)
    folder = RunFolder(config)
    if accelerator.is_main_process:
        folder.open()
    accelerator.wait_for_everyone()
    parts = load_parts(config, accelerator, folder)
    held_out = HeldOut(config, parts.student, accelerator)
    held_out.note_trained(parts.plan)

    # 2. Model and optimizer, replicated or sharded; learning rates are a function of the step, not a prepared scheduler
    model, optimizer = _prepare(config, accelerator, parts.student)

    # 3. Where it stands
    cursor = _resume(config, accelerator, folder, parts, optimizer)
    if accelerator.is_main_process:
        folder.record()
    log = _Log(config, accelerator, folder, cursor.step, parts.total_steps)

    # 4. Optimizer steps
    model.train()
    log.start_clock()
    for step, rows in parts.steps(cursor.step):
        step_of_all = _whole_step(accelerator, rows, stop=preemption.requested)
        if step_of_all.stop:
            break
        rates = set_rates(optimizer, config.optimizer, step, parts.total_steps)
        work: list[TrainingRow | None] = list(rows) or [None]
        if is_sharded(model):
            work += [None] * (parts.data.most_rows(step) - len(work))
        sums = _backward(model, work, accelerator, _weights(step_of_all.counts, config, accelerator))
        norm = accelerator.clip_grad_norm_(_trained(parts), config.optimizer.max_grad_norm or float("inf"))
        _require_finite(whole_value(norm), step)
        optimizer.step()
        optimizer.zero_grad()
        cursor = replace(cursor, step=step + 1)
        log.step(
            step_metrics(
                step,
                sums=accelerator.reduce(sums).tolist(),
                counts=step_of_all.counts,
                anchor_weight=config.loss.anchor_weight,
                tokens=step_of_all.tokens,
                seconds=log.seconds(),
                grad_norm=whole_value(norm),
                rates=rates,
            )
        )
        if held_out.due(cursor.step):
            with whole(model):
                cursor = _evaluate(held_out, log, cursor, folder, parts)
        if config.run.checkpoint_every and cursor.step % config.run.checkpoint_every == 0:
            _save(accelerator, folder, parts, optimizer, cursor, sharded=is_sharded(model))
        log.start_clock()

    # 5. What it leaves
    if not folder.checkpoints.holds(cursor.step):
        _save(accelerator, folder, parts, optimizer, cursor, sharded=is_sharded(model))
    log.close()
    with whole(model):
        if accelerator.is_main_process and cursor.step >= parts.total_steps:
            parts.student.save(folder.student)
    if accelerator.is_main_process and cursor.step >= parts.total_steps:
        note(f"{folder.student}: the trained student; `loha export {folder.student} --out DIR` makes it servable")
    elif accelerator.is_main_process:
        note(f"ended by a signal after {cursor.step} of {parts.total_steps} steps; start again to go on")
    accelerator.end_training()


def _prepare(config: Config, accelerator: Accelerator, student: Student) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Wrap the student for several processes, and make its optimizer."""
    live = config.teacher.mode == "live"
    model = AcdModel(student, config.loss, candidates=config.teacher.candidates, live=live)
    if config.model.shard and accelerator.num_processes > 1:
        shard(model, accelerator.device)
        return model, accelerator.prepare(make_optimizer(student, config.optimizer))
    return accelerator.prepare(model, make_optimizer(student, config.optimizer))


def _require_finite(norm: float, step: int) -> None:
    """End the run before one bad gradient has overwritten the weights and then every checkpoint that is kept.

    Raises:
        LohaError: on every rank alike, since the norm is over all of them.
    """
    if not math.isfinite(norm):
        raise LohaError(
            f"step {step}: the gradient norm is {norm}; nothing was changed by it and the checkpoints before it are "
            "whole. A lower learning rate, or the trajectories of this step in plan.jsonl, are what to look at"
        )


class _WholeStep(NamedTuple):
    """What one optimizer step holds over all ranks and rows."""

    counts: tuple[int, int, int]
    tokens: int
    stop: bool


def _whole_step(accelerator: Accelerator, rows: Sequence[TrainingRow], *, stop: bool) -> _WholeStep:
    """Add up the supervised positions and tokens of all ranks, and agree on whether one of them was asked to end."""
    counts = [sum(column) for column in zip(*(row.counts() for row in rows), strict=True)] or [0, 0, 0]
    mine = torch.tensor([*counts, sum(row.tokens for row in rows), int(stop)], device=accelerator.device)
    distill, read_back, anchor, tokens, stops = accelerator.reduce(mine).tolist()
    return _WholeStep((distill, read_back, anchor), tokens, stops > 0)


def _weights(counts: tuple[int, int, int], config: Config, accelerator: Accelerator) -> Tensor:
    """Return what each term's sum is multiplied by: the one place where losses are divided.

    Distill and read-back share a denominator. Data-parallel wrappers average gradients over ranks, hence the factor.
    """
    distill, read_back, anchor = counts
    per_distill = 1 / max(1, distill + read_back)
    terms = [per_distill, per_distill, config.loss.anchor_weight / max(1, anchor)]
    return torch.tensor(terms, device=accelerator.device) * accelerator.num_processes


def _backward(
    model: nn.Module, rows: Sequence[TrainingRow | None], accelerator: Accelerator, weights_3: Tensor
) -> Tensor:
    """Accumulate the gradients of this rank's rows and return the float64 sums of its terms.

    Gradients travel between ranks once, after the last row. A rank without a row takes part with None.
    """
    sums_3 = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    for index, row in enumerate(rows):
        with nullcontext() if index == len(rows) - 1 else no_sync(accelerator, model):
            row_sums_3 = model(row)
            accelerator.backward((row_sums_3 * weights_3).sum())
        sums_3 += row_sums_3.detach().double()
    return sums_3


def _resume(
    config: Config, accelerator: Accelerator, folder: RunFolder, parts: Parts, optimizer: torch.optim.Optimizer
) -> Cursor:
    """Restore the newest checkpoint, or start at step 0."""
    newest = folder.checkpoints.newest()
    if newest is None:
        return Cursor(step=0, plan_key=parts.plan.key)
    cursor = restore(
        newest, parts.student.trainable(), _inner(optimizer), rank=accelerator.process_index, plan_key=parts.plan.key
    )
    if accelerator.is_main_process:
        done = cursor.step >= parts.total_steps
        going = f"nothing is left to do: {cursor.step} steps are done" if done else f"going on at step {cursor.step}"
        note(f"{newest}: {going} of {parts.total_steps}")
    return cursor


def _save(
    accelerator: Accelerator,
    folder: RunFolder,
    parts: Parts,
    optimizer: torch.optim.Optimizer,
    cursor: Cursor,
    *,
    sharded: bool,
) -> None:
    """Write a checkpoint from the main process; every rank gives its random state and its part of sharded tensors."""
    states = gather_object([random_state()])
    if accelerator.is_main_process:
        folder.checkpoints.save(cursor, parts.student.trainable(), _inner(optimizer), states)
    elif sharded:
        whole_tensors(parts.student.trainable(), _inner(optimizer))
    accelerator.wait_for_everyone()


def _evaluate(held_out: HeldOut, log: _Log, cursor: Cursor, folder: RunFolder, parts: Parts) -> Cursor:
    """Evaluate on the held-out slice and keep the best student."""
    report = held_out.evaluate()
    log.evaluation(cursor.step, report)
    if not is_better(report["loss"], cursor.best):
        return cursor
    if log.main:
        parts.student.save(folder.best_student)
    return replace(cursor, best=report["loss"])


class _Log:
    """Progress bar, metrics.jsonl, evaluations.jsonl and trackers, on the main process."""

    def __init__(self, config: Config, accelerator: Accelerator, folder: RunFolder, first: int, total: int) -> None:
        self.accelerator = accelerator
        self.main = accelerator.is_main_process
        self._start = time.perf_counter()
        accelerator.init_trackers("acd", config=flat(config_dict(config)))
        if self.main:
            self._metrics = JsonLines(folder.root / METRICS_NAME, before=first)
            self._evaluations = JsonLines(folder.root / EVALUATIONS_NAME, before=first + 1)
            self._bar = progress_bar("training", total=total - first, unit="step")

    def start_clock(self) -> None:
        """Begin to time a step: its rendering counts, evaluations and checkpoints do not."""
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Return the time since the clock was started."""
        return time.perf_counter() - self._start

    def step(self, metrics: dict[str, Any]) -> None:
        """Log one optimizer step."""
        self.accelerator.log(flat(metrics), step=metrics["step"])
        if self.main:
            self._metrics.write(metrics)
            self._bar.set_postfix_str(
                f"loss {metrics['loss']:.4f}, {metrics['tokens_per_s']:,.0f} tokens/s", refresh=False
            )
            self._bar.update()

    def evaluation(self, done: int, report: dict[str, Any]) -> None:
        """Log one evaluation after `done` steps."""
        self.accelerator.log(flat(report, "held_out/"), step=done - 1)
        if self.main:
            self._evaluations.write({"step": done, **report})
            note(f"step {done}: held-out KL at K=0 {report['k']['0']['kl']:.4f}, drift {report['drift']:.4f}")

    def close(self) -> None:
        """End the bar."""
        if self.main:
            self._bar.close()


def _trained(parts: Parts) -> list[nn.Parameter]:
    return list(parts.student.trainable().values())


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def main(argv: Sequence[str] | None = None) -> None:
    """Train a student with Anchored Context Distillation."""
    _, config = parse_command(command_parser("acd/train.py", main.__doc__), argv)
    train(config)


if __name__ == "__main__":
    sys.exit(run_reporting(main))
