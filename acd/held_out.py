"""Evaluation in the course of training, shared out over the ranks."""

from __future__ import annotations

import math
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from acd.config import Config
from acd.corpus import Corpus
from acd.evaluate import EvaluationRule, Evaluator
from acd.plan import Plan
from acd.probe import ProbeRule
from loha.progress import note
from loha.student import Student


class HeldOut:
    """The held-out slice of a run.

    Args:
        config: of the run.
        student: in training.
        accelerator: shares the trajectories out.

    Raises:
        LohaError: when the held-out file is no canonical JSONL.
    """

    def __init__(self, config: Config, student: Student, accelerator: Accelerator) -> None:
        self.every = config.run.evaluate_every
        self.student = student
        self.accelerator = accelerator
        self.anchor_weight = config.loss.anchor_weight
        self.rule = EvaluationRule(
            readback=config.readback.rule() if config.readback.share else None,
            probe=ProbeRule(turns=config.run.probe_turns) if config.run.probe_turns else None,
            candidates=config.teacher.candidates,
            chunk=config.loss.chunk,
        )
        self.corpus = (
            Corpus(config.data.held_out, limit=config.data.held_out_limit)
            if self.every and config.data.held_out
            else None
        )

    def note_trained(self, plan: Plan) -> None:
        """Say when held-out trajectories train too: what they measure is then no generalisation."""
        if self.corpus is None or not self.accelerator.is_main_process:
            return
        trained = {piece.trajectory for piece in plan.pieces()}
        both = sum(entry.id in trained for entry in self.corpus.entries())
        if both:
            note(
                f"{both} of {len(self.corpus)} held-out trajectories of {self.corpus.path} train too: evaluations and "
                "the choice of the best student flatter"
            )

    def due(self, done: int) -> bool:
        """Return whether to evaluate after `done` optimizer steps."""
        return self.every > 0 and done % self.every == 0

    def evaluate(self) -> dict[str, Any]:
        """Return the report of the student as it is now; every rank must call this, and all get the same report."""
        assert self.corpus is not None, "checked when it was made"
        evaluator = Evaluator(self.student.eval(), self.rule)
        mine = self.corpus.entries()[self.accelerator.process_index :: self.accelerator.num_processes]
        for entry in mine:
            evaluator.add(self.corpus[entry.id])
        evaluator.merge(gather_object([evaluator.parts()]))
        self.student.train()
        report = evaluator.report()
        return report | {"loss": report["k"]["0"]["kl"] + self.anchor_weight * report["drift"]}


def is_better(loss: float, best: float | None) -> bool:
    """Return whether a held-out loss is the lowest so far; one that is no finite number never is."""
    return math.isfinite(loss) and (best is None or loss < best)
