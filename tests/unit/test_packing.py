"""Packing: one layout that can be checked by eye, and the laws of any."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from acd.packing import Limits, Piece, Step, assign_rows, make_steps


def group(name: str, latent: int, full: int) -> list[Piece]:
    return [
        Piece(trajectory=name, view="latent", tokens=latent, k=0),
        Piece(trajectory=name, view="full", tokens=full),
    ]


def sizes(step: Step) -> list[list[tuple[str, int]]]:
    return [[(piece.trajectory, piece.tokens) for piece in row] for row in step]


def test_expected_layout() -> None:
    """Rows of 10, two a step: a and b fill one step, c and d the next, and no row holds e's full text."""
    groups = [group("a", 2, 8), group("b", 3, 7), group("c", 4, 6), group("d", 1, 9), group("e", 5, 11)]
    steps, too_long = make_steps(groups, Limits(tokens_per_row=10, rows_per_step=2, attention_tokens=10**9))
    assert [sizes(step) for step in steps] == [
        [[("a", 8), ("a", 2)], [("b", 7), ("b", 3)]],
        [[("d", 9), ("d", 1)], [("c", 6), ("c", 4)]],
    ]
    assert [pieces[0].trajectory for pieces in too_long] == ["e"]


def test_same_row_keeps_views_together() -> None:
    limits = Limits(tokens_per_row=10, rows_per_step=2, same_row=True)
    steps, too_long = make_steps([group("a", 2, 7), group("b", 4, 7), group("c", 1, 1)], limits)
    assert [sizes(step) for step in steps] == [[[("a", 2), ("a", 7)], [("c", 1), ("c", 1)]]]
    assert [pieces[0].trajectory for pieces in too_long] == ["b"]


def test_rows_are_balanced_by_cost_not_tokens() -> None:
    """One piece of 8 costs more attention than two of 4, so it is alone although all would fit first-fit."""
    limits = Limits(tokens_per_row=16, rows_per_step=2, attention_tokens=1)
    pieces = [[Piece(trajectory=str(i), view="full", tokens=n)] for i, n in enumerate([8, 4, 4])]
    (step,), _ = make_steps(pieces, limits)
    assert sizes(step) == [[("0", 8)], [("1", 4), ("2", 4)]]


GROUPS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=40)


@settings(max_examples=80, deadline=None)
@given(GROUPS, st.integers(20, 80), st.integers(1, 5), st.booleans())
def test_packing_laws(lengths: list[tuple[int, int]], row: int, rows: int, same_row: bool) -> None:
    limits = Limits(tokens_per_row=row, rows_per_step=rows, attention_tokens=25, same_row=same_row)
    groups = [group(f"t{i}", *pair) for i, pair in enumerate(lengths)]
    steps, too_long = make_steps(groups, limits)
    packed = [piece for step in steps for packed_row in step for piece in packed_row]
    skipped = [piece for pieces in too_long for piece in pieces]
    # nothing lost, nothing doubled
    assert Counter(packed + skipped) == Counter(piece for pieces in groups for piece in pieces)
    for step in steps:
        assert 1 <= len(step) <= rows
        assert all(0 < sum(piece.tokens for piece in packed_row) <= row for packed_row in step)
        # both views of a trajectory in one step
        views = Counter(piece.trajectory for packed_row in step for piece in packed_row)
        assert set(views.values()) == {2}
    if same_row:
        assert all(len({p.trajectory for p in r}) * 2 == len(r) for step in steps for r in step)
    # only what cannot fit an empty step is skipped
    for pieces in too_long:
        assert make_steps([pieces], limits) == ([], [pieces])
    assert make_steps(groups, limits) == (steps, too_long)


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(1, 9))
def test_every_row_has_one_rank(lengths: list[tuple[int, int]], world: int) -> None:
    limits = Limits(tokens_per_row=100, rows_per_step=4, attention_tokens=25)
    steps, _ = make_steps([group(f"t{i}", *pair) for i, pair in enumerate(lengths)], limits)
    for step in steps:
        ranks = assign_rows(step, world, limits)
        assert len(ranks) == world
        assert sorted(row for rows in ranks for row in rows) == list(range(len(step)))
        # no rank holds two rows while another has none
        assert max(map(len, ranks)) == 1 or min(map(len, ranks)) >= 1
