"""Trajectories on disk, found by id: one offset each in memory, the text read when it is needed."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from loha.errors import LohaError
from loha.trajectory import Trajectory, parse_line


@dataclass(frozen=True)
class Entry:
    """Where one trajectory lies."""

    id: str
    offset: int
    row: int
    """1-based line number."""
    digest: str
    """Of the line: tells whether a trajectory has changed."""


class Corpus:
    """A canonical JSONL file with random access by id.

    Args:
        path: made by `loha data import` or `loha data select`.
        limit: use only the first so many trajectories.

    Raises:
        LohaError: when the file is missing, empty, not canonical, or repeats an id.
    """

    def __init__(self, path: str | os.PathLike[str], *, limit: int | None = None) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise LohaError(f"{self.path}: no such trajectory file; make one with `loha data import`")
        self._entries: dict[str, Entry] = {}
        for entry in itertools.islice(_scan(self.path), limit):
            if entry.id in self._entries:
                raise LohaError(f"{self.path}: row {entry.row}: id {entry.id!r} is already used; ids must be unique")
            self._entries[entry.id] = entry
        if not self._entries:
            raise LohaError(f"{self.path}: holds no trajectory; expected one JSON object a line")
        self._file: tuple[int, BinaryIO] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, trajectory_id: str) -> Trajectory:
        entry = self._entries[trajectory_id]
        stream = self._stream()
        stream.seek(entry.offset)
        return parse_line(stream.readline(), where=f"{self.path}: row {entry.row}")

    def entry(self, trajectory_id: str) -> Entry:
        """Return where a trajectory lies, and its digest."""
        return self._entries[trajectory_id]

    def entries(self) -> list[Entry]:
        """Return the trajectories in file order."""
        return list(self._entries.values())

    @property
    def digest(self) -> str:
        """A hash of ids and contents, in order."""
        return hashlib.sha256(json.dumps([(e.id, e.digest) for e in self.entries()]).encode()).hexdigest()[:16]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_file": None}

    def _stream(self) -> BinaryIO:
        # A forked worker must not share the parent's file position.
        if self._file is None or self._file[0] != os.getpid():
            self._file = (os.getpid(), self.path.open("rb"))
        return self._file[1]


def _scan(path: Path) -> Iterator[Entry]:
    offset = 0
    with path.open("rb") as lines:
        for row, line in enumerate(lines, 1):
            if line.strip():
                yield Entry(_line_id(line, path, row), offset, row, hashlib.sha256(line).hexdigest()[:16])
            offset += len(line)


def _line_id(line: bytes, path: Path, row: int) -> str:
    try:
        found = json.loads(line)["id"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LohaError(
            f"{path}: row {row}: not a canonical trajectory ({type(error).__name__}: {error}); is the file cut off?"
        ) from error
    if not isinstance(found, str) or not found:
        raise LohaError(f"{path}: row {row}: id must be a non-empty string, got {found!r}")
    return found
