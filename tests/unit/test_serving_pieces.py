"""Observations cut into engine items: windows whole, markers once, digests that name all that changes the vectors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loha.layout import latent_count
from loha.rendering import LatentSettings
from serving import pieces
from serving.pieces import COUNTED, FIRST, LAST, MAX_ITEM_LATENTS, Cutter, max_item_length, windows_per_item

SMALL = LatentSettings(ratio=3, window=7)  # 3 latents a window: 170 windows, 1190 tokens an item


def flags_of(cutter: Cutter, tokens: int) -> list[tuple[int, int, int]]:
    return [(len(piece.token_ids), piece.length, piece.flags) for piece in cutter.cut(tuple(range(tokens)))]


def test_cut_by_hand() -> None:
    cutter = Cutter(SMALL, "x")
    assert windows_per_item(SMALL) == 170
    assert flags_of(cutter, 1) == [(1, 3, FIRST | LAST | COUNTED)]
    assert flags_of(cutter, 8) == [(8, 3 + 1 + 2, FIRST | LAST | COUNTED)]
    assert flags_of(cutter, 1190) == [(1190, 512, FIRST | LAST | COUNTED)]
    assert flags_of(cutter, 1191) == [(1190, 511, FIRST | COUNTED), (1, 2, LAST | COUNTED)]
    assert flags_of(cutter, 3000) == [
        (1190, 511, FIRST | COUNTED),
        (1190, 510, COUNTED),
        (620, 266 + 1, LAST | COUNTED),
    ]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 40), st.integers(1, 600), st.integers(1, 30_000))
def test_laws_of_cutting(ratio: int, window: int, tokens: int) -> None:
    settings = LatentSettings(ratio=ratio, window=window)
    ids = tuple(range(tokens))
    cut = Cutter(settings, "x").cut(ids)
    assert np.concatenate([piece.token_ids for piece in cut]).tolist() == list(ids)
    assert all(len(piece.token_ids) % window == 0 for piece in cut[:-1])
    assert sum(piece.length for piece in cut) == latent_count(tokens, ratio=ratio, window=window) + 2
    assert [bool(piece.flags & FIRST) for piece in cut] == [i == 0 for i in range(len(cut))]
    assert [bool(piece.flags & LAST) for piece in cut] == [i == len(cut) - 1 for i in range(len(cut))]
    assert max(piece.length for piece in cut) <= max_item_length(settings)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 40), st.integers(1, 600))
def test_an_item_holds_at_least_one_window_and_not_much_more_than_the_aim(ratio: int, window: int) -> None:
    settings = LatentSettings(ratio=ratio, window=window)
    one = latent_count(window, ratio=ratio, window=window)
    assert one + 2 <= max_item_length(settings) <= max(MAX_ITEM_LATENTS, one) + 2


def test_digest_names_everything_that_changes_the_vectors() -> None:
    ids = tuple(range(1191))
    first, last = Cutter(SMALL, "x").cut(ids)
    (alone,) = Cutter(SMALL, "x").cut(ids[:1190])
    others = [
        first,
        last,
        alone,  # the same ids as `first`, with an end marker
        Cutter(SMALL, "y").cut(ids)[0],
        Cutter(LatentSettings(ratio=4, window=7), "x").cut(ids[:1190])[0],
        Cutter(SMALL, "x").cut((1, *ids[1:1190]))[0],
    ]
    assert len({piece.digest for piece in others}) == len(others)
    assert Cutter(SMALL, "x").cut(list(ids))[0].digest == first.digest


def test_recent_observations_are_not_cut_again() -> None:
    cutter = Cutter(SMALL, "x")
    ids = tuple(range(50))
    assert cutter.cut(ids) is cutter.cut(ids)
    assert cutter.cut(tuple(range(1, 51)))[0].digest != cutter.cut(ids)[0].digest


@pytest.mark.parametrize("count", [1, 3])
def test_an_id_of_a_collected_tuple_is_not_mistaken(count: int) -> None:
    """The cache goes by identity, so it must keep what it identifies alive."""
    cutter = Cutter(SMALL, "x")
    for number in range(200):
        ids = tuple([number] * count)
        assert cutter.cut(ids)[0].token_ids.tolist() == [number] * count
        del ids


def test_the_cache_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CACHE_BYTES", 3 * (900 + 40 * 30) + 100)
    cutter = Cutter(SMALL, "x")
    bodies = [tuple(range(i, i + 30)) for i in range(5)]
    cut = [cutter.cut(body) for body in bodies]
    assert [cutter.cut(body) is before for body, before in zip(bodies[2:], cut[2:], strict=True)] == [True] * 3
    assert cutter.cut(bodies[0]) is not cut[0]
    huge = tuple(range(200))
    assert cutter.cut(huge) is not cutter.cut(huge)
