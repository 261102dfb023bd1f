"""Packed rows: the examples of one row of the plan as tensors, with the targets of each loss term."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from acd.corpus import Corpus
from acd.loss import Targets, certain_targets
from acd.packing import Limits, Piece, Row, assign_rows
from acd.plan import Plan
from acd.teacher_cache import Key, TeacherCache
from acd.views import Example, ViewBuilder, full_view, require_same_assistant
from loha.errors import LohaError

TERMS = ("distill", "read_back", "anchor")


@dataclass(frozen=True)
class Packed:
    """Examples side by side: what a forward pass needs."""

    token_ids_T: Tensor
    position_ids_1T: Tensor
    """Restart at 0 in each piece; consecutive over text and latents."""
    lengths: tuple[int, ...]
    regions: tuple[tuple[int, Tensor], ...]
    """(position of the start marker in the row, encoder ids)."""


@dataclass(frozen=True)
class Supervised:
    """The positions of one loss term."""

    states_N: Tensor
    """Positions in the row of the states that predict."""
    targets: Targets | None
    """None where a live teacher gives them."""
    live_N: Tensor | None = None
    """With a live teacher: which of its positions each state pairs with."""

    def __len__(self) -> int:
        return len(self.states_N)


@dataclass(frozen=True)
class TrainingRow:
    """One packed row."""

    packed: Packed
    distill: Supervised
    read_back: Supervised
    anchor: Supervised
    teacher: Packed | None = None
    """The full-text views that a live teacher reads."""
    teacher_states_N: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Positions of the row."""
        return len(self.packed.token_ids_T)

    def counts(self) -> tuple[int, int, int]:
        """Return the supervised positions of distill, read-back and anchor."""
        return len(self.distill), len(self.read_back), len(self.anchor)


@dataclass(frozen=True)
class TargetSource:
    """Where the teacher's predictions come from; both caches None for a live teacher."""

    distill: TeacherCache | None = None
    anchor: TeacherCache | None = None

    @property
    def live(self) -> bool:
        """Whether the base predicts inside the training step."""
        return self.distill is None

    def check_holds(self, corpus: Corpus, pieces: Collection[Piece]) -> None:
        """Check that the caches hold what pieces need, before the first step.

        Raises:
            LohaError: when one lacks a trajectory, or has it with other contents.
        """
        for view, cache in (("latent", self.distill), ("full", self.anchor)):
            if cache is not None:
                needed = sorted({piece.trajectory for piece in pieces if piece.view == view})
                cache.check_holds([(each, corpus.entry(each).digest) for each in needed])


@dataclass(frozen=True)
class RowBuilder:
    """Turns a row of the plan into tensors."""

    corpus: Corpus
    views: ViewBuilder
    source: TargetSource

    def build(self, row: Row) -> TrainingRow:
        """Return the packed row with its targets.

        Raises:
            LohaError: when the teacher cache lacks a trajectory or holds it with other contents or assistant tokens,
                or a view is not what the plan measured.
        """
        pieces = sorted(row, key=lambda piece: (piece.trajectory, piece.view))
        examples = [self.views.build(self.corpus[piece.trajectory], piece) for piece in pieces]
        for piece, example in zip(pieces, examples, strict=True):
            _check_length(piece, example)
        packed = pack_examples(examples)
        starts = starts_of(packed.lengths)
        latent = [i for i, piece in enumerate(pieces) if piece.view == "latent"]
        full = [i for i, piece in enumerate(pieces) if piece.view == "full"]
        built = TrainingRow(
            packed,
            distill=Supervised(_states([(starts[i], examples[i].states) for i in latent]), None),
            read_back=Supervised(
                _states([(starts[i], examples[i].answer_states) for i in latent]),
                certain_targets(_long([j for i in latent for j in examples[i].answer_ids])),
            ),
            anchor=Supervised(_states([(starts[i], examples[i].states) for i in full]), None),
        )
        if self.source.live:
            return self._with_live_teacher(built, [p.trajectory for p in pieces], examples, latent, full)
        assert self.source.distill is not None and self.source.anchor is not None
        keys = [
            Key(piece.trajectory, self.corpus.entry(piece.trajectory).digest, example.assistant_hash)
            for piece, example in zip(pieces, examples, strict=True)
        ]
        return replace(
            built,
            distill=replace(built.distill, targets=_cached(self.source.distill, [keys[i] for i in latent])),
            anchor=replace(built.anchor, targets=_cached(self.source.anchor, [keys[i] for i in full])),
        )

    def _with_live_teacher(
        self, row: TrainingRow, ids: list[str], examples: list[Example], latent: list[int], full: list[int]
    ) -> TrainingRow:
        """Add each trajectory's full-text view once, and say which of its positions each state pairs with."""
        texts = {ids[i]: examples[i] for i in full}
        for i in latent:
            if ids[i] not in texts:
                texts[ids[i]] = full_view(self.views.renderer, self.corpus[ids[i]])
        packed = pack_examples(list(texts.values()))
        states = [(start, text.states) for start, text in zip(starts_of(packed.lengths), texts.values(), strict=True)]
        begin = dict(zip(texts, starts_of([len(text.states) for text in texts.values()]), strict=True))
        ranges = {name: torch.arange(begin[name], begin[name] + len(text.states)) for name, text in texts.items()}
        for i in latent:
            require_same_assistant(ids[i], examples[i].assistant_ids, texts[ids[i]].assistant_ids)
        return replace(
            row,
            distill=replace(row.distill, live_N=_cat([ranges[ids[i]] for i in latent])),
            anchor=replace(row.anchor, live_N=_cat([ranges[ids[i]] for i in full])),
            teacher=packed,
            teacher_states_N=_states(states),
        )


class StepData(Dataset[list[TrainingRow]]):
    """The rows of one rank, step by step: item k is what this rank computes in optimizer step k.

    Args:
        plan: of the run.
        builder: makes the rows.
        limits: balances rows over ranks.
        rank: of this process.
        world: number of processes.
    """

    def __init__(self, plan: Plan, builder: RowBuilder, limits: Limits, *, rank: int, world: int) -> None:
        self.plan = plan
        self.builder = builder
        self.limits = limits
        self.rank = rank
        self.world = world

    def __len__(self) -> int:
        return len(self.plan.steps)

    def __getitem__(self, step: int) -> list[TrainingRow]:
        rows = self.plan.steps[step]
        return [self.builder.build(rows[i]) for i in self._assigned(step)[self.rank]]

    def most_rows(self, step: int) -> int:
        """Return how many rows the rank with the most of them computes."""
        return max(len(rows) for rows in self._assigned(step))

    def _assigned(self, step: int) -> list[tuple[int, ...]]:
        return assign_rows(self.plan.steps[step], self.world, self.limits)


def pack_examples(examples: Sequence[Example]) -> Packed:
    """Put examples side by side."""
    lengths = tuple(len(example.token_ids) for example in examples)
    starts = starts_of(lengths)
    return Packed(
        token_ids_T=_long([i for example in examples for i in example.token_ids]),
        position_ids_1T=torch.cat([torch.arange(length) for length in lengths])[None],
        lengths=lengths,
        regions=tuple(
            (start + begin, _long(encoder_ids))
            for start, example in zip(starts, examples, strict=True)
            for begin, encoder_ids in example.regions
        ),
    )


def _check_length(piece: Piece, example: Example) -> None:
    if len(example.token_ids) != piece.tokens:
        raise LohaError(
            f"trajectory {piece.trajectory!r}: its {piece.view} view has {len(example.token_ids)} tokens, but "
            f"{piece.tokens} in the epoch plan, which was made with other data or code: delete plan.jsonl in "
            "run.output_dir"
        )


def _cached(cache: TeacherCache, keys: Sequence[Key]) -> Targets:
    found = [cache.read(key) for key in keys]
    if not found:
        return certain_targets(_long([]))
    return Targets.join(found)


def _states(parts: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
    return _long([start + state for start, states in parts for state in states])


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Return where each of several neighbours begins."""
    return [0, *itertools.accumulate(lengths)][: len(lengths)]


def _long(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([_long([]), *parts])
