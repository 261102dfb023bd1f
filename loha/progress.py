"""One look for every progress bar: on a terminal it moves, in a log it writes a line now and then."""

from __future__ import annotations

import sys

from tqdm import tqdm


def progress_bar(description: str, *, total: int, unit: str) -> tqdm:
    """Return a bar on standard error that shows rate and time left.

    Args:
        description: what is being done.
        total: units of work.
        unit: their name; bytes ("B") are scaled to kB, MB, GB.
    """
    terminal = sys.stderr.isatty()
    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        unit_scale=unit == "B",
        mininterval=0.2 if terminal else 30.0,
        dynamic_ncols=terminal,
        file=sys.stderr,
    )


def note(text: str) -> None:
    """Write one line to standard error without breaking a bar that is being drawn."""
    tqdm.write(text, file=sys.stderr)
