"""Hard-Last-K decisions, by eye and by law."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loha.errors import LohaError
from loha.layout import Window, format_k, latent_count, parse_k, parse_polling


@pytest.mark.parametrize(
    ("k", "polling", "old_by_observations"),
    [
        # how many observations are old after            0  1  2  3  4  5  6  7  8  9
        (0, 1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (3, 1, [0, 0, 0, 0, 1, 2, 3, 4, 5, 6]),
        (3, 4, [0, 0, 0, 0, 1, 1, 1, 1, 5, 5]),
        (1, 8, [0, 0, 0, 0, 0, 0, 0, 0, 7, 7]),
        (None, 1, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_window_moves(k: int | None, polling: int, old_by_observations: list[int]) -> None:
    window = Window(k=k, polling=polling)
    assert [window.leading_old(m) for m in range(10)] == old_by_observations


@given(m=st.integers(0, 500), k=st.integers(0, 60), polling=st.integers(1, 40))
def test_between_k_and_k_plus_polling_stay_text(m: int, k: int, polling: int) -> None:
    old = Window(k=k, polling=polling).leading_old(m)
    text = m - old
    assert min(m, k) <= text <= max(k + polling - 1, 0) or old == 0
    assert Window(k=k, polling=polling).leading_old(m + 1) >= old, "an observation never turns back into text"


@given(tokens=st.integers(0, 10_000), ratio=st.integers(1, 64), window=st.integers(1, 2048))
def test_latent_count_is_the_sum_over_windows(tokens: int, ratio: int, window: int) -> None:
    lengths = [min(window, tokens - start) for start in range(0, tokens, window)]
    assert latent_count(tokens, ratio=ratio, window=window) == sum(math.ceil(n / ratio) for n in lengths)


@pytest.mark.parametrize(("text", "k"), [("0", 0), ("8", 8), ("inf", None), ("INF", None), (3, 3), (None, None)])
def test_k_is_read(text: object, k: int | None) -> None:
    assert parse_k(text) == k  # type: ignore[arg-type]
    assert parse_k(format_k(k)) == k


@pytest.mark.parametrize("bad", [-1, "-1", "three", "", 2.5, True, "1e3", float("nan"), [3], {}])
def test_impossible_k_is_refused(bad: object) -> None:
    with pytest.raises(LohaError, match="K must be"):
        parse_k(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, -8, "eight", None, 1.5, True])
def test_impossible_polling_is_refused(bad: object) -> None:
    with pytest.raises(LohaError, match="polling"):
        parse_polling(bad)  # type: ignore[arg-type]
