"""What an import or a selection did: counted by reason, told to people, written beside the output as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loha import __version__
from loha.atomic import atomic_path, check_writable
from loha.errors import LohaError
from loha.progress import note

LINES_PER_REASON = 10
"""Bad rows shown on standard error for each reason and file; the report lists more."""

LISTED_PER_REASON = 10_000
"""Rows that the report lists for each reason, so that a wrong input cannot grow it without bound."""


@dataclass(frozen=True, kw_only=True)
class RowName:
    """Which row: its file, its 1-based number (0 for the whole file), and its id where known."""

    file: str
    row: int
    id: str = ""

    def __str__(self) -> str:
        return self.file + (f" row {self.row}" if self.row else "") + (f" (id {self.id})" if self.id else "")

    def to_json(self) -> dict[str, Any]:
        """Return the name as the report writes it."""
        return {"file": self.file, "row": self.row, **({"id": self.id} if self.id else {})}


@dataclass(kw_only=True)
class Tally:
    """Rows that were dropped, and rows that were changed, by reason."""

    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    listed: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"dropped": [], "noted": []})
    _shown: Counter[tuple[str, str]] = field(default_factory=Counter)

    def drop(self, reason: str, row: RowName, detail: str = "") -> None:
        """Count a row that is left out, show it (the first few of each reason and file) and list it.

        Args:
            reason: a few words, to count by.
            row: which row.
            detail: what is wrong with this very row.
        """
        self.dropped[reason] += 1
        self._tell("dropped", self.dropped[reason], reason, row, detail)

    def note(self, reason: str, row: RowName, detail: str = "") -> None:
        """Count, show and list a row that is kept but for a change or a warning."""
        self.noted[reason] += 1
        self._tell("noted", self.noted[reason], reason, row, detail)

    def _tell(self, what: str, count: int, reason: str, row: RowName, detail: str) -> None:
        if count <= LISTED_PER_REASON:
            self.listed[what].append({**row.to_json(), "reason": reason, "detail": detail})
        key = (reason, row.file)
        self._shown[key] += 1
        if self._shown[key] <= LINES_PER_REASON:
            note(f"{what}: {row}: {reason}{': ' if detail else ''}{detail}")
        elif self._shown[key] == LINES_PER_REASON + 1:
            note(f"{what}: {row}: {reason}; more of this kind in this file are only counted here, the report has them")

    @property
    def total(self) -> int:
        """Rows dropped for any reason."""
        return sum(self.dropped.values())

    def first_dropped(self) -> str:
        """Return which row was dropped first, and why."""
        if not self.listed["dropped"]:
            return "there were no rows"
        first = self.listed["dropped"][0]
        row = RowName(file=first["file"], row=first["row"], id=first.get("id", ""))
        more = f" (the first of {self.total})" if self.total > 1 else ""
        return f"{row}: {first['reason']}{': ' if first['detail'] else ''}{first['detail']}{more}"

    def summary(self) -> str:
        """Return one line: how many, and how many for each reason."""
        if not self.dropped:
            return "dropped 0"
        return f"dropped {self.total}: " + ", ".join(
            f"{count} {reason}" for reason, count in self.dropped.most_common()
        )


def check_out(out: Path, inputs: Iterable[Path]) -> None:
    """Refuse an output that is a folder, or would replace what is read, before any work is done.

    Raises:
        LohaError: when it is, or cannot be written.
    """
    if out.is_dir():
        raise LohaError(f"--out {out}: is a folder, expected the name of a JSONL file to write")
    if out.resolve() in {each.resolve() for each in inputs}:
        raise LohaError(f"--out {out}: is the input too, which would be lost; choose another name")
    check_writable(out)


def report_path(out: Path) -> Path:
    """Return where the report of an output goes: `x.jsonl` -> `x.report.json`."""
    return out.with_name((out.name.removesuffix(".jsonl") or out.name) + ".report.json")


def write_report(out: Path, kind: str, content: dict[str, Any]) -> Path:
    """Write the report of an output and return its path."""
    path = report_path(out)
    with atomic_path(path) as temporary:
        text = json.dumps({"report": kind, "loha_version": __version__, **content}, indent=1, ensure_ascii=True)
        temporary.write_text(text + "\n", encoding="utf-8")
    return path
