"""Evaluate a student on held-out trajectories at each K, teacher-forced.

    python -m acd.evaluate --config F --student DIR --k 0 1 2 3 4 8 inf
    python -m acd.evaluate --config F --student DIR --k 3 --view mask        # masked instead of latent
    python -m acd.evaluate --config F --student DIR --k 0 --patch off        # the base on the student's latents

Each assistant turn is predicted from the history before it, rendered at K as a server would. KL compares with the base
on the full text of the same history; at K = inf it is the drift that the anchor holds down. Prints a table; the last
line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from acd.command import command_parser, parse_command
from acd.config import Config
from acd.corpus import Corpus
from acd.loss import Targets, certain_targets, score
from acd.probe import ProbeCounts, ProbeRule, probe
from acd.readback import ReadBackRule
from acd.rows import Packed, pack_examples, starts_of
from acd.scores import Answer, Scores, answer_report, table_rows
from acd.teacher import candidates_for, top_candidates
from acd.views import Example, example_of, full_view, latent_view, require_same_assistant
from loha.command_line import run_reporting
from loha.console import out
from loha.errors import LohaError
from loha.layout import Window, format_k, parse_k, parse_polling
from loha.progress import progress_bar
from loha.render import Renderer
from loha.rendering import View
from loha.student import Student
from loha.trajectory import Trajectory
from loha.weight_files import float_dtype


@dataclass(frozen=True, kw_only=True)
class EvaluationRule:
    """What is evaluated."""

    ks: tuple[int | None, ...] = (0, None)
    polling: int = 1
    view: View = "latent"
    """What becomes of observations that have left the window."""
    turns: int | None = None
    """Evaluate only so many turns of each trajectory, drawn at random but the same for every K."""
    readback: ReadBackRule | None = None
    """Also ask read-back questions at K = 0."""
    probe: ProbeRule | None = None
    """Also let the student reply greedily at recorded positions."""
    candidates: int = 64
    chunk: int = 256
    tokens_per_row: int = 8192
    """Histories are packed up to this length; a longer one takes a row of its own."""


@dataclass(frozen=True)
class _History:
    """A history and the assistant turns in it that are scored."""

    example: Example
    """Its states, ids and turn lengths are those of the scored turns alone."""
    targets: Targets


Sums = tuple[Mapping[int | None, Scores], Sequence[Answer], Mapping[int | None, ProbeCounts]]


class Evaluator:
    """Scores a student trajectory by trajectory.

    Args:
        student: on its device, in evaluation mode.
        rule: what is evaluated.
        patch: False turns patch and gains off and leaves the adapter: the base reading latents.
    """

    def __init__(self, student: Student, rule: EvaluationRule, *, patch: bool = True) -> None:
        self.student = student
        self.renderer: Renderer = student.renderer()
        self.rule = rule
        self.patch = patch
        self.scores: dict[int | None, Scores] = {k: Scores() for k in rule.ks}
        self.answers: list[Answer] = []
        self.probes = _no_probes(rule)

    @torch.no_grad()
    def add(self, trajectory: Trajectory) -> None:
        """Evaluate one trajectory at every K."""
        full = full_view(self.renderer, trajectory)
        targets = self._teacher(full)
        picked = self._pick_turns(trajectory)
        for k in self.rule.ks:
            histories = self._histories(trajectory, full, targets, Window(k=k, polling=self.rule.polling), picked)
            for row in _rows(histories, self.rule.tokens_per_row):
                self.scores[k].add(self._score(row))
        if self.rule.readback:
            self._ask(trajectory, self.rule.readback)
        if self.rule.probe:
            with nullcontext() if self.patch else self.student.patch_disabled():
                for k, counts in self.probes.items():
                    window = Window(k=k, polling=self.rule.polling)
                    found = probe(
                        self.student, self.renderer, trajectory, self.rule.probe, window=window, view=self.rule.view
                    )
                    counts.add(found)

    def parts(self) -> Sums:
        """Return this rank's own sums, for `merge`."""
        return self.scores, self.answers, self.probes

    def merge(self, parts: Iterable[Sums]) -> None:
        """Take the sums of all ranks in place of this rank's own."""
        self.scores = {k: Scores() for k in self.rule.ks}
        self.answers = []
        self.probes = _no_probes(self.rule)
        for scores, answers, probes in parts:
            self.answers += answers
            for k, sums in scores.items():
                self.scores[k].add(sums)
            for k, counts in probes.items():
                self.probes[k].add(counts)

    def report(self) -> dict[str, Any]:
        """Return means by K, the drift where inf is among them, and the read-back results."""
        by_k = {format_k(k): scores.report() for k, scores in self.scores.items()}
        report: dict[str, Any] = {"view": self.rule.view, "polling": self.rule.polling, "k": by_k}
        if "inf" in by_k:
            report["drift"] = by_k["inf"]["kl"]
        if self.rule.readback:
            report["read_back"] = answer_report(self.answers)
        if self.rule.probe:
            report["tool_calls"] = {format_k(k): counts.report() for k, counts in self.probes.items()}
        return report

    # -- histories --------------------------------------------------------------------------------------------

    def _pick_turns(self, trajectory: Trajectory) -> list[int]:
        turns = list(range(trajectory.assistant_turns))
        if self.rule.turns is None or self.rule.turns >= len(turns):
            return turns
        return sorted(random.Random(f"turns/{trajectory.id}").sample(turns, self.rule.turns))

    def _histories(
        self, trajectory: Trajectory, full: Example, targets: Targets, window: Window, picked: list[int]
    ) -> Iterator[_History]:
        """Yield what must be read to predict the picked turns."""
        ends = [i + 1 for i, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
        own = dict(zip(range(len(ends)), _ranges(full.turn_lengths), strict=True))
        # Without a moving window every earlier turn reads the same history, so that one pass does all turns.
        still = window.k is None or (window.k == 0 and window.polling == 1)
        for turns, end in [(picked, ends[picked[-1]])] if still else [([turn], ends[turn]) for turn in picked]:
            rendering = self.renderer.render(
                trajectory.messages[:end], trajectory.tools, window=window, view=self.rule.view
            )
            example = example_of(rendering)
            kept = [i for turn in turns for i in own[turn]]
            shown = {turn: part for turn, part in enumerate(_ranges(example.turn_lengths))}
            mine = [i for turn in turns for i in shown[turn]]
            scored = replace(
                example,
                states=[example.states[i] for i in mine],
                assistant_ids=[example.assistant_ids[i] for i in mine],
                turn_lengths=tuple(example.turn_lengths[turn] for turn in turns),
            )
            require_same_assistant(trajectory.id, scored.assistant_ids, [full.assistant_ids[i] for i in kept])
            yield _History(scored, targets.select(torch.tensor(kept, device=targets.ids_NC.device)))

    # -- forward passes ---------------------------------------------------------------------------------------

    def _teacher(self, full: Example) -> Targets:
        head_VD = self.student.lm_head_weight
        with self.student.patch_disabled():
            hidden_TD = self._hidden(pack_examples([full]))
        count = candidates_for(len(head_VD), self.rule.candidates)
        return top_candidates(hidden_TD[_on(hidden_TD, full.states)], head_VD, count, chunk=self.rule.chunk)

    def _score(self, histories: Sequence[_History]) -> Scores:
        packed = pack_examples([history.example for history in histories])
        hidden_TD = self._student_hidden(packed)
        starts = starts_of(packed.lengths)
        states = [s + state for s, h in zip(starts, histories, strict=True) for state in h.example.states]
        targets = Targets.join([history.targets for history in histories])
        kl_N, best_N = score(
            targets, hidden_TD[_on(hidden_TD, states)], self.student.lm_head_weight, chunk=self.rule.chunk
        )
        right_N = best_N == _on(best_N, [i for history in histories for i in history.example.assistant_ids])
        lengths = [length for history in histories for length in history.example.turn_lengths]
        return Scores(
            kl=float(kl_N.sum(dtype=torch.float64)),
            positions=len(kl_N),
            same_top=int((best_N == targets.ids_NC[:, 0]).sum()),
            exact_tokens=int(right_N.sum()),
            turns=len(lengths),
            exact_turns=sum(bool(turn.all()) for turn in right_N.split(lengths)),
            context_tokens=sum(packed.lengths),
        )

    def _ask(self, trajectory: Trajectory, rule: ReadBackRule) -> None:
        """Ask the read-back questions of a trajectory after its latent view."""
        example = latent_view(self.renderer, trajectory, k=0, readback=rule, seed=f"evaluation/{trajectory.id}")
        if not example.questions:
            return
        hidden_TD = self._student_hidden(pack_examples([example]))
        answer_N = _on(hidden_TD, example.answer_ids)
        states_N = _on(hidden_TD, example.answer_states)
        head_VD = self.student.lm_head_weight
        nats_N, best_N = score(certain_targets(answer_N), hidden_TD[states_N], head_VD, chunk=self.rule.chunk)
        observations = len(self.renderer.rule.find(trajectory.messages))
        lengths = list(example.answer_lengths)
        parts = zip((best_N == answer_N).split(lengths), nats_N.split(lengths), strict=True)
        for question, (right, nats) in zip(example.questions, parts, strict=True):
            self.answers.append(
                Answer(
                    age=observations - 1 - question.observation,
                    tokens=len(right),
                    exact_tokens=int(right.sum()),
                    nats=float(nats.sum(dtype=torch.float64)),
                )
            )

    def _student_hidden(self, packed: Packed) -> Tensor:
        with nullcontext() if self.patch else self.student.patch_disabled():
            return self._hidden(packed)

    def _hidden(self, packed: Packed) -> Tensor:
        return self.student(packed.token_ids_T, packed.regions, packed.position_ids_1T, packed.lengths)[0]


def _no_probes(rule: EvaluationRule) -> dict[int | None, ProbeCounts]:
    return {k: ProbeCounts() for k in rule.probe.ks} if rule.probe else {}


def _rows(histories: Iterable[_History], capacity: int) -> Iterator[list[_History]]:
    """Group histories in order into rows of at most `capacity` positions, or one history."""
    row: list[_History] = []
    tokens = 0
    for history in histories:
        length = len(history.example.token_ids)
        if row and tokens + length > capacity:
            yield row
            row, tokens = [], 0
        row.append(history)
        tokens += length
    if row:
        yield row


def _ranges(lengths: Sequence[int]) -> list[range]:
    return [range(start, start + length) for start, length in zip(starts_of(lengths), lengths, strict=True)]


def _on(like: Tensor, values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.long, device=like.device)


def evaluate_student(config: Config, folder: str, rule: EvaluationRule, *, patch: bool = True) -> dict[str, Any]:
    """Return the report of a student on the held-out trajectories of a configuration.

    Args:
        config: names trajectories, and base and LCLM where they have moved.
        folder: of the student.
        rule: what is evaluated.
        patch: False evaluates the base on the student's latents.

    Raises:
        LohaError: when no held-out file is named, or a part is missing.
    """
    if not config.data.held_out:
        raise LohaError("data.held_out is missing: name a file of trajectories that are not trained on")
    corpus = Corpus(config.data.held_out, limit=config.data.held_out_limit)
    student = Student.load(
        folder,
        base=config.model.base,
        lclm=config.model.lclm,
        dtype=float_dtype(config.model.dtype),
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    evaluator = Evaluator(student.eval(), rule, patch=patch)
    with progress_bar("evaluation", total=len(corpus), unit="trajectory") as bar:
        for entry in corpus.entries():
            evaluator.add(corpus[entry.id])
            bar.update()
    return {"student": folder, "patch": "on" if patch else "off", "trajectories": len(corpus), **evaluator.report()}


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate a student on the held-out trajectories of a configuration, at each K."""
    parser = command_parser("python -m acd.evaluate", main.__doc__)
    parser.add_argument("--student", required=True, help="folder of the student")
    parser.add_argument("--k", nargs="+", default=["0", "inf"], help="0, 1, 2, ... or inf")
    parser.add_argument("--polling", default="1", help="the window moves only every P observations")
    parser.add_argument(
        "--view", choices=get_args(View)[:2], default="latent", help="of observations outside the window"
    )
    parser.add_argument("--turns", type=int, help="evaluate so many turns of each trajectory")
    parser.add_argument("--patch", choices=("on", "off"), default="on", help="off: the base on the student's latents")
    parser.add_argument(
        "--probe", type=int, default=0, metavar="N", help="greedy replies at N turns of each trajectory"
    )
    parser.add_argument("--read-back", action="store_true", help="also ask read-back questions at K = 0")
    options, config = parse_command(parser, argv)
    if options.turns is not None and options.turns < 1:
        raise LohaError(f"--turns must be at least 1, got {options.turns}")
    if options.probe < 0:
        raise LohaError(f"--probe must be at least 0, got {options.probe}")
    ks = tuple(parse_k(k) for k in options.k)
    rule = EvaluationRule(
        ks=ks,
        polling=parse_polling(options.polling),
        view=options.view,
        turns=options.turns,
        readback=config.readback.rule() if options.read_back else None,
        probe=ProbeRule(turns=options.probe, ks=ks) if options.probe else None,
        candidates=config.teacher.candidates,
        chunk=config.loss.chunk,
    )
    report = evaluate_student(config, options.student, rule, patch=options.patch == "on")
    for row in table_rows(report["k"]):
        out("  ".join(f"{cell:>20}" if i == 1 else f"{cell:>12}" for i, cell in enumerate(row)))
    out(json.dumps(report))


if __name__ == "__main__":
    sys.exit(run_reporting(main))
