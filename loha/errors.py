"""The one error family that users see."""

from __future__ import annotations


class LohaError(ValueError):
    """Something the user gave is wrong.

    The message is one line: what is wrong, what was got, what was expected, and what to do about it.
    The command line prints it without a traceback and exits with 2; the server answers HTTP 400.
    """


def shown(value: object) -> str:
    """Return a value that came from outside as an error message may show it: at most 60 characters."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
