"""Readers of recorded trajectories: one format a file, chosen by the keys of a row or by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from loha.errors import LohaError
from loha.readers import coderforge, mini_swe_agent, openai_chat, openhands, swe_master_run, swe_master_sft
from loha.readers.row import BadRow, ExcludedRow, Reader, RowContext
from loha.trajectory import Trajectory

__all__ = ["READERS", "BadRow", "ExcludedRow", "Reader", "RowContext", "by_name", "detect", "read_row"]

# Order matters: the first that matches reads the row, and plain chat matches most of the others' rows too.
READERS: tuple[Reader, ...] = (
    coderforge.READER,
    swe_master_run.READER,
    swe_master_sft.READER,
    mini_swe_agent.READER,
    openhands.READER,
    openai_chat.READER,
)


def by_name(name: str) -> tuple[Reader, ...]:
    """Return the readers that a `--format` value allows: all for auto, one for a name, several for a prefix.

    Raises:
        LohaError: for an unknown name.
    """
    wanted = name.strip().lower().replace("_", "-")
    if wanted == "auto":
        return READERS
    found = tuple(reader for reader in READERS if reader.name == wanted or reader.name.startswith(wanted + "-"))
    if not wanted or not found:
        names = [reader.name for reader in READERS]
        near = difflib.get_close_matches(wanted, names, n=1)
        hint = f", did you mean {near[0]}?" if near else ";"
        raise LohaError(f"unknown format {name!r}{hint} known: auto, {', '.join(names)}")
    return found


def detect(row: Mapping[str, Any], readers: Sequence[Reader] = READERS) -> Reader:
    """Return the first reader that knows the row.

    Raises:
        BadRow: when none does; names the row's keys.
    """
    for reader in readers:
        if reader.matches(row):
            return reader
    keys = ", ".join(sorted(map(str, row))[:12]) or "none"
    raise BadRow(
        "unknown format", f"keys {keys} fit none of {', '.join(reader.name for reader in readers)}{_hint(row)}"
    )


def read_row(row: Any, context: RowContext, readers: Sequence[Reader] = READERS) -> Trajectory:
    """Return the trajectory in a raw row.

    Raises:
        BadRow: when there is none; ExcludedRow when a rule of the format leaves it out.
    """
    if not isinstance(row, Mapping):
        raise BadRow("not an object", f"expected a JSON object, got {type(row).__name__}")
    reader = readers[0] if len(readers) == 1 else detect(row, readers)
    try:
        return reader.read(row, context)
    except BadRow:
        raise
    except LohaError as error:
        raise BadRow("invalid trajectory", str(error)) from error


def _hint(row: Mapping[str, Any]) -> str:
    if "test_result" in row and "history" in row:
        return "; an OpenHands output.jsonl holds events, import its llm_completions folder"
    if "input_ids" in row:
        return "; the rows are tokenised, take the data set with messages"
    return ""
