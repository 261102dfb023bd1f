"""Pack pieces into rows and rows into optimizer steps. Pure Python, no tensors.

A piece is one view of one trajectory, always whole. A row is what one device holds at one time; a step is a fixed
number of rows, whatever the number of devices. All views of a trajectory lie in one step, so that both terms see the
same trajectories.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

View = Literal["latent", "full"]
OPEN_STEPS = 8
"""How many unfinished steps a trajectory may still join: fills gaps, yet keeps the order near the shuffled one."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One view of one trajectory."""

    trajectory: str
    view: View
    tokens: int
    """Positions in the row, read-back turns included."""

    positions: int = 0
    """Assistant positions with teacher targets."""

    answers: int = 0
    """Read-back positions."""

    k: int | None = None
    """Window of the latent view."""

    epoch: int = 0


Row = tuple[Piece, ...]
Step = tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What fits."""

    tokens_per_row: int
    rows_per_step: int
    attention_tokens: int = 25_000
    """Length at which attention costs a token as much as the rest of the model does."""

    same_row: bool = False
    """Keep the views of a trajectory in one row (a live teacher predicts once for both)."""

    def cost(self, pieces: Iterable[Piece]) -> float:
        """Return the work of some pieces, in tokens without attention."""
        return sum(piece.tokens * (1 + piece.tokens / self.attention_tokens) for piece in pieces)


class _OpenStep:
    """Rows that still take pieces, first fit."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.rows: list[list[Piece]] = [[] for _ in range(limits.rows_per_step)]
        self.room = [limits.tokens_per_row] * limits.rows_per_step

    def add(self, group: Sequence[Piece]) -> bool:
        """Take all pieces of a trajectory, or none."""
        room = list(self.room)
        places = []
        for unit in _units(group, self.limits):
            tokens = _tokens(unit)
            row = next((i for i, left in enumerate(room) if left >= tokens), None)
            if row is None:
                return False
            room[row] -= tokens
            places.append((row, unit))
        self.room = room
        for row, unit in places:
            self.rows[row] += unit
        return True

    def close(self) -> Step:
        """Return the rows, rearranged for equal cost where they still fit that way."""
        groups: dict[str, list[Piece]] = {}
        for piece in (piece for row in self.rows for piece in row):
            groups.setdefault(piece.trajectory, []).append(piece)
        units = [unit for group in groups.values() for unit in _units(group, self.limits)]
        rows = _balanced(units, self.limits) or self.rows
        return tuple(tuple(row) for row in rows if row)


def make_steps(groups: Iterable[Sequence[Piece]], limits: Limits) -> tuple[list[Step], list[Sequence[Piece]]]:
    """Pack trajectories into optimizer steps, first fit in the given order.

    Args:
        groups: the pieces of each trajectory, in training order.
        limits: what fits.

    Returns:
        The steps, and the groups that do not fit even an empty step.
    """
    done: list[Step] = []
    open_steps: list[_OpenStep] = []
    too_long: list[Sequence[Piece]] = []
    for group in groups:
        if any(step.add(group) for step in open_steps):
            continue
        fresh = _OpenStep(limits)
        if not fresh.add(group):
            too_long.append(group)
            continue
        open_steps.append(fresh)
        if len(open_steps) > OPEN_STEPS:
            done.append(open_steps.pop(0).close())
    return done + [step.close() for step in open_steps], too_long


def assign_rows(step: Step, world: int, limits: Limits) -> list[tuple[int, ...]]:
    """Return which rows of a step each rank computes, balanced by cost.

    Args:
        step: its rows.
        world: number of ranks; may differ from run to run.
        limits: for the cost.

    Returns:
        Row indices per rank, ascending. A rank has none when there are fewer rows than ranks.
    """
    ranks: list[list[int]] = [[] for _ in range(world)]
    load = [0.0] * world
    by_cost = sorted(range(len(step)), key=lambda row: (-limits.cost(step[row]), row))
    for row in by_cost:
        rank = min(range(world), key=lambda r: (load[r], r))
        ranks[rank].append(row)
        load[rank] += limits.cost(step[row])
    return [tuple(sorted(rows)) for rows in ranks]


def _balanced(units: Sequence[Sequence[Piece]], limits: Limits) -> list[list[Piece]] | None:
    """Put the costliest unit first, each into the cheapest row with room; None when that does not fit."""
    rows: list[list[Piece]] = [[] for _ in range(limits.rows_per_step)]
    cost = [0.0] * limits.rows_per_step
    room = [limits.tokens_per_row] * limits.rows_per_step
    for unit in sorted(units, key=lambda unit: -limits.cost(unit)):
        tokens = _tokens(unit)
        fitting = [i for i in range(len(rows)) if room[i] >= tokens]
        if not fitting:
            return None
        row = min(fitting, key=lambda i: (cost[i], i))
        rows[row] += unit
        cost[row] += limits.cost(unit)
        room[row] -= tokens
    return rows


def _units(group: Sequence[Piece], limits: Limits) -> list[Sequence[Piece]]:
    """Return what must share a row, longest first."""
    if limits.same_row:
        return [group]
    return [[piece] for piece in sorted(group, key=lambda piece: -piece.tokens)]


def _tokens(pieces: Iterable[Piece]) -> int:
    return sum(piece.tokens for piece in pieces)
