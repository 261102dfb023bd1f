"""Bounds what vLLM's error answers cost.

vLLM 0.32 cleans every error text, which may quote a client, on the event loop with a pattern whose time grows faster
than the square of a run of path-like characters: 16 KB of `/a/a/a...` as a model's name stop the whole server for half
a minute, health checks included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps

MAX_CHARS = 1000
"""Of an error text: milliseconds, and more than any of vLLM's own has."""

_HOME = "vllm.entrypoints.serve.exception_handling.utils"
_NAME = "sanitize_message"


def bound_error_texts() -> None:
    """Make vLLM cut error texts before it cleans them, wherever its modules have taken the function to."""
    original = getattr(sys.modules.get(_HOME), _NAME, None)
    if original is None or hasattr(original, "__wrapped__"):
        return
    bounded = _bounded(original)
    for module in list(sys.modules.values()):
        if vars(module).get(_NAME) is original:
            setattr(module, _NAME, bounded)


def _bounded(sanitize: Callable[[str], str]) -> Callable[[str], str]:
    @wraps(sanitize)
    def bounded(message: str) -> str:
        message = str(message)
        return sanitize(message if len(message) <= MAX_CHARS else message[:MAX_CHARS] + "...")

    return bounded
