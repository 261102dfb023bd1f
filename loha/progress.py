"""One look for every progress bar: on a terminal it moves, in a log it writes a line now and then."""

from __future__ import annotations

import io
import sys

from tqdm import tqdm

from loha.console import err

LOG_INTERVAL_S = 30.0


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
        mininterval=0.2 if terminal else LOG_INTERVAL_S,
        delay=0 if terminal else 1,
        dynamic_ncols=terminal,
        file=sys.stderr if terminal else _Lines(),
    )


def note(text: str) -> None:
    """Write one line to standard error without breaking a bar that is being drawn."""
    if sys.stderr.isatty():
        tqdm.write(text, file=sys.stderr)
    else:
        err(text)


class _Lines(io.TextIOBase):
    """Turns a bar's redrawing into lines, for logs and pipes."""

    _last = ""

    def write(self, text: str) -> int:
        line = text.strip()
        if line and line != self._last:
            err(line)
            self._last = line
        return len(text)
