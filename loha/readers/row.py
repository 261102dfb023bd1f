"""One raw row of an input file, and what can be wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loha.errors import LohaError
from loha.trajectory import Trajectory


class BadRow(LohaError):
    """A row that cannot become a trajectory.

    Args:
        reason: a few words, the same for all rows with this fault, to count by.
        detail: what exactly is wrong in this row.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class ExcludedRow(BadRow):
    """A sound row that a rule leaves out; reported and counted, but never fatal."""


@dataclass(frozen=True, kw_only=True)
class RowContext:
    """Where a row stands, for errors and for ids of last resort."""

    file: Path
    row: int
    """1-based: line of a JSONL file, row of a Parquet file, entry of a JSON list; 1 for a file that is one run."""

    notes: list[str] = field(default_factory=list)
    """Short remarks on changes that were made to the row, collected and counted by the import."""

    def note(self, text: str) -> None:
        """Add a remark once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One trajectory format."""

    name: str
    """What `--format` takes."""

    about: str
    """One line for people."""

    matches: Callable[[Mapping[str, Any]], bool]
    """Whether a row looks like this format, from its keys alone."""

    read: Callable[[Mapping[str, Any], RowContext], Trajectory]
    """Turns a row into a trajectory or raises BadRow."""


def decoded(value: Any, column: str) -> Any:
    """Return the value of a column that may hold JSON as text.

    Raises:
        BadRow: when it is text but not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{column} is not JSON", f"{error} (is the text cut off?)") from error


def text_of(row: Mapping[str, Any], *keys: str) -> str | None:
    """Return the first of the keys that holds a non-empty string or a number, as text."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
    return None
