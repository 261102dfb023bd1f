"""Text for people: standard output for results, standard error for notes."""

from __future__ import annotations

import sys


def out(text: str = "") -> None:
    """Write one line of result to standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def err(text: str) -> None:
    """Write one line of notice to standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
