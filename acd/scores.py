"""Sums over evaluated positions, turns and read-back answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

AGES = ((0, 0), (1, 3), (4, 7), (8, 15), (16, None))
"""Buckets of a read-back answer's age: how many observations are newer than the one that holds it."""


@dataclass
class Scores:
    """Sums, so that ranks and trajectories can be added up; `report` divides."""

    kl: float = 0.0
    """Nats of KL(teacher on full text || student on this view)."""
    positions: int = 0
    same_top: int = 0
    """Positions where the student's likeliest id is the teacher's."""
    exact_tokens: int = 0
    """Positions where it is the recorded id."""
    turns: int = 0
    exact_turns: int = 0
    """Turns in which it is the recorded id at every position."""
    context_tokens: int = 0
    """Positions that the decoder read, over all evaluated histories."""

    def add(self, other: Scores) -> None:
        """Add another sum to this one."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def report(self) -> dict[str, Any]:
        """Return means."""
        positions, turns = max(1, self.positions), max(1, self.turns)
        return {
            "kl": self.kl / positions,
            "same_top_1": self.same_top / positions,
            "exact_tokens": self.exact_tokens / positions,
            "exact_turns": self.exact_turns / turns,
            "positions": self.positions,
            "turns": self.turns,
        }


@dataclass(frozen=True)
class Answer:
    """How one read-back question went, teacher-forced."""

    age: int
    """Observations newer than the one that holds the answer."""
    tokens: int
    """Of the answer, its end of turn included."""
    exact_tokens: int
    """Of them, those that are the student's likeliest."""
    nats: float
    """Negative log-probability of the whole answer."""

    @property
    def exact(self) -> bool:
        """Return whether every token is the likeliest."""
        return self.exact_tokens == self.tokens


def answer_report(answers: Iterable[Answer]) -> dict[str, Any]:
    """Return the share of exact answers and tokens and the nats per token, in all and by age."""
    answers = list(answers)
    report = _answer_means(answers) | {"by_age": {}}
    for low, high in AGES:
        group = [a for a in answers if a.age >= low and (high is None or a.age <= high)]
        if group:
            name = str(low) if low == high else f"{low}-{high}" if high is not None else f"{low}+"
            report["by_age"][name] = _answer_means(group)
    return report


def _answer_means(answers: list[Answer]) -> dict[str, Any]:
    if not answers:
        return {"asked": 0, "exact": None, "exact_tokens": None, "nll": None}
    tokens = sum(a.tokens for a in answers)
    return {
        "asked": len(answers),
        "exact": sum(a.exact for a in answers) / len(answers),
        "exact_tokens": sum(a.exact_tokens for a in answers) / tokens,
        "nll": sum(a.nats for a in answers) / tokens,
    }


def table_rows(by_k: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows of a printed table, one per K."""
    head = ["K", "KL(teacher||student)", "same top-1", "exact tokens", "exact turns", "turns"]
    rows = [
        [
            k,
            f"{r['kl']:.4f}",
            f"{r['same_top_1']:.1%}",
            f"{r['exact_tokens']:.1%}",
            f"{r['exact_turns']:.1%}",
            str(r["turns"]),
        ]
        for k, r in by_k.items()
    ]
    return [head, *rows]
