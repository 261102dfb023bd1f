"""Arms of a replay benchmark: a context layout on one server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from loha.errors import LohaError
from loha.layout import parse_k, parse_polling
from serving.arm import Arm

STOCK = "stock"
_FULL = Arm(view="full", k=None, polling=1)
_LAYOUT = re.compile(r"(?:(?P<view>latent|mask):)?k(?P<k>[0-9]+|inf)(?:p(?P<polling>[0-9]+))?")


@dataclass(frozen=True, kw_only=True)
class LoadArm:
    """What one slice of load asks, and of whom."""

    name: str
    layout: Arm | None
    """None on a stock server, which gets no `loha` object."""
    base_url: str


def parse_layout(text: str) -> Arm:
    """Read an arm as people write it: full, k3 (P=1), k3p8, mask:k3p8, kinf.

    Raises:
        LohaError: for anything else.
    """
    if text == "full":
        return _FULL
    match = _LAYOUT.fullmatch(text)
    if match is None:
        raise LohaError(
            f"an arm is written full, k3, k3p8 or mask:k3p8 (K, then P; P is 1 when left out), got {text!r}"
        )
    k, polling = parse_k(match["k"]), parse_polling(match["polling"] or 1)
    if k is None:
        return _FULL
    return Arm(view="mask" if match["view"] == "mask" else "latent", k=k, polling=polling)


def load_arms(words: Sequence[str], base_url: str, stock_url: str | None) -> list[LoadArm]:
    """Return the arms of a benchmark, each once.

    Args:
        words: layouts as people write them.
        base_url: of the server with the plugin.
        stock_url: of a server without it, for one more arm of full text.

    Raises:
        LohaError: when there is no arm, or one is not written as it should be.
    """
    layouts = {layout.name: layout for layout in map(parse_layout, words)}
    arms = [LoadArm(name=name, layout=layout, base_url=base_url) for name, layout in layouts.items()]
    if stock_url is not None:
        arms.append(LoadArm(name=STOCK, layout=None, base_url=stock_url))
    if not arms:
        raise LohaError("no arm to measure: give at least one with --arms, for instance --arms full k3p8")
    return arms


def order(arms: Sequence[LoadArm], round_number: int) -> list[LoadArm]:
    """Return the arms as one round runs them: each round begins with another, so that drift is shared.

    Args:
        arms: of the benchmark.
        round_number: from 0.
    """
    first = round_number % len(arms)
    return [*arms[first:], *arms[:first]]
