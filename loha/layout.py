"""Which observations stay text: Hard-Last-K with polling. Pure Python, no tensors.

Source: the LOHA paper's Hard-Last-K rule; polling is SWE-agent's word for moving the window only every P observations.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from loha.errors import LohaError, shown

LAYOUT_VERSION = 2
"""Of everything that decides token ids. 2: tool definitions in vLLM's form."""

MIN_OBSERVATION_CHARS = 128
"""A shorter body always stays text (the paper's threshold)."""

MARKERS_PER_LATENT_OBSERVATION = 2


@dataclass(frozen=True, kw_only=True)
class Window:
    """The recency window of one request."""

    k: int | None = 3
    """How many of the newest observations stay text; None is inf, the full-text view."""

    polling: int = 1
    """The window moves only every P observations, so between K and K+P-1 stay text."""

    def __post_init__(self) -> None:
        parse_k(self.k)
        parse_polling(self.polling)

    def leading_old(self, observations: int) -> int:
        """Return how many of the oldest observations have left the window.

        Observation i (1-based) of m is text when i > m' - K, with m' = m rounded down to a multiple of P.

        Args:
            observations: m, the number of observations in the history.
        """
        if self.k is None:
            return 0
        return max(0, observations // self.polling * self.polling - self.k)


def parse_k(value: str | int | float | None) -> int | None:
    """Read K as people and JSON write it: 0, 1, 2, ... or inf (None).

    Raises:
        LohaError: for anything else, -1 and "three" included.
    """
    if value is None or (isinstance(value, str) and value.strip().lower() in ("inf", "infinity")):
        return None
    if isinstance(value, float) and math.isinf(value) and value > 0:
        return None
    number = _whole_number(value)
    if number is None or number < 0:
        raise LohaError(f"K must be 0, 1, 2, ... or inf (all observations stay text), got {shown(value)}")
    return number


def parse_polling(value: str | int | float) -> int:
    """Read polling P, a whole number of at least 1.

    Raises:
        LohaError: for anything else.
    """
    number = _whole_number(value)
    if number is None or number < 1:
        raise LohaError(f"polling must be a whole number of at least 1, got {shown(value)}")
    return number


def format_k(k: int | None) -> str:
    """Write K as `parse_k` reads it."""
    return "inf" if k is None else str(k)


def latent_count(tokens: int, *, ratio: int, window: int) -> int:
    """Return how many latents the encoder makes of a body.

    Windows are independent, so each ends with a group of its own.

    Args:
        tokens: encoder tokens of the body.
        ratio: tokens per latent.
        window: encoder tokens per window.
    """
    whole, rest = divmod(tokens, window)
    return whole * math.ceil(window / ratio) + math.ceil(rest / ratio)


def _whole_number(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
        return int(value)
    return None
