"""`loha data select`: the shortest successful trajectory of each instance."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from loha.atomic import atomic_path
from loha.console import out
from loha.data_report import RowName, Tally, check_out, write_report
from loha.data_scan import Length, ScannedRow, scan, worker_count
from loha.errors import LohaError
from loha.progress import progress_bar
from loha.trajectory import parse_line


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `loha data select`."""

    trajectories: tyro.conf.Positional[Path]
    """Canonical JSONL from `loha data import`."""

    out: Path
    """Canonical JSONL to write, sorted by instance; a report goes beside it as NAME.report.json."""

    tokenizer: Path | None = None
    """The decoder's folder (tokenizer.json and chat template); needed to measure tokens."""

    length: Length = "tokens"
    """What shortest means: tokens of the run under the decoder's chat template, assistant turns, or characters."""

    include_unresolved: bool = False
    """Also take runs that failed or state no outcome, for instances without a successful run."""

    max_tokens: int | None = None
    """Leave out runs longer than this (never cut them: a run without its end teaches the model not to stop)."""

    limit: int | None = None
    """Keep only the first N instances, in sorted order."""

    fold_ids: bool = False
    """Group instance ids that differ only in case, or in `.` and `_` (SWE-smith ids come in several spellings)."""

    workers: int = 0
    """Processes that measure; 0 chooses by file size and cores."""


@dataclass(kw_only=True)
class Selection:
    """State of one selection: the best row of each instance so far."""

    options: Options
    tally: Tally = field(default_factory=Tally)
    best: dict[str, ScannedRow] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    """Line of each id."""
    instances: set[str] = field(default_factory=set)

    def take(self, row: ScannedRow) -> None:
        """Compare one row with the best of its instance.

        Raises:
            LohaError: when its id was used before.
        """
        if row.id in self.ids:
            raise LohaError(
                f"{self.options.trajectories}: row {row.row}: id {row.id!r} is already used in row {self.ids[row.id]}; "
                "ids must be unique, `loha data import` on this file makes them so"
            )
        self.ids[row.id] = row.row
        key = self._key(row.instance_id)
        self.instances.add(key)
        if not row.resolved and not self.options.include_unresolved:
            self.tally.dropped["not resolved" if row.resolved is False else "outcome unknown"] += 1
        elif row.length is None:
            self._drop("cannot be rendered", row, row.problem)
        elif self.options.max_tokens is not None and row.length > self.options.max_tokens:
            self._drop(f"over {self.options.max_tokens} tokens", row, f"{row.length} tokens")
        else:
            known = self.best.get(key)
            self.best[key] = row if known is None else min(known, row, key=_order)
            if known is not None:
                self.tally.dropped["longer run of its instance"] += 1

    def chosen(self) -> list[ScannedRow]:
        """Return the selected rows, sorted by instance."""
        rows = [self.best[key] for key in sorted(self.best)]
        kept = rows if self.options.limit is None else rows[: self.options.limit]
        if len(kept) < len(rows):
            self.tally.dropped["beyond the limit"] += len(rows) - len(kept)
        return kept

    def _key(self, instance_id: str) -> str:
        return re.sub(r"[._]+", "_", instance_id.casefold()) if self.options.fold_ids else instance_id

    def _drop(self, reason: str, row: ScannedRow, detail: str) -> None:
        self.tally.drop(reason, RowName(file=str(self.options.trajectories), row=row.row, id=row.id), detail)


def main(options: Options) -> int:
    """Keep the shortest successful run of each instance; ties go to the smaller id, whatever the input order."""
    _check(options)
    selection = Selection(options=options)
    _measure(selection)
    rows = selection.chosen()
    if not rows:
        raise LohaError(_nothing(selection))
    with atomic_path(options.out) as temporary:
        _copy(options.trajectories, rows, temporary)
        report = write_report(options.out, "data select", _report(selection, rows))
    _tell(selection, rows, report)
    return 0


def _check(options: Options) -> None:
    check_out(options.out, [options.trajectories])
    if not options.trajectories.is_file():
        raise LohaError(f"{options.trajectories}: no such trajectory file; make one with `loha data import`")
    if options.max_tokens is not None and options.length != "tokens":
        raise LohaError(f"--max-tokens needs --length tokens, got --length {options.length}")
    for name, value in (("--max-tokens", options.max_tokens), ("--limit", options.limit)):
        if value is not None and value < 1:
            raise LohaError(f"{name} must be 1 or more, got {value}")


def _measure(selection: Selection) -> None:
    options = selection.options
    size = options.trajectories.stat().st_size
    chunks = scan(
        options.trajectories,
        length=options.length,
        tokenizer=options.tokenizer,
        unresolved=options.include_unresolved,
        workers=worker_count(options.workers, size),
    )
    with progress_bar("measure", total=size, unit="B") as bar:
        for chunk in chunks:
            for row in chunk.rows:
                selection.take(row)
            bar.update(chunk.bytes_read)


def _order(row: ScannedRow) -> tuple[int, int, str]:
    """Sort successes first, then unknown outcomes, then failures; within each the shortest, then the smallest id."""
    rank = {True: 0, None: 1, False: 2}[row.resolved]
    assert row.length is not None, "only measured rows are compared"
    return rank, row.length, row.id


def _copy(source: Path, rows: Sequence[ScannedRow], target: Path) -> None:
    with (
        source.open("rb") as file,
        target.open("wb") as output,
        progress_bar("write", total=len(rows), unit="row") as bar,
    ):
        for row in rows:
            file.seek(row.offset)
            trajectory = parse_line(file.readline(), where=f"{source}: row {row.row}")
            if trajectory.id != row.id:
                raise LohaError(f"{source}: row {row.row} changed while it was being read; run the command again")
            output.write(trajectory.to_line().encode("utf-8") + b"\n")
            bar.update()


def _nothing(selection: Selection) -> str:
    options = selection.options
    if not selection.ids:
        return f"{options.trajectories}: holds no trajectory; expected one JSON object a line"
    remedy = ""
    by_outcome = {"not resolved", "outcome unknown"} & selection.tally.dropped.keys()
    if by_outcome and not options.include_unresolved:
        remedy = "; --include-unresolved takes them, `loha data import --outcomes` or --assume-resolved states outcomes"
    return f"{options.trajectories}: no trajectory to select, nothing was written ({selection.tally.summary()}{remedy})"


def _report(selection: Selection, rows: Sequence[ScannedRow]) -> dict[str, Any]:
    options = selection.options
    return {
        "input": str(options.trajectories),
        "out": str(options.out),
        "length": options.length,
        "tokenizer": str(options.tokenizer) if options.tokenizer else None,
        "rows_read": len(selection.ids),
        "instances_read": len(selection.instances),
        "rows_written": len(rows),
        "rows_dropped": selection.tally.total,
        "dropped_by_reason": dict(selection.tally.dropped),
        "length_of_selected": _spread(rows),
        "dropped": selection.tally.listed["dropped"],
        "selected": [{"instance_id": row.instance_id, "id": row.id, "length": row.length} for row in rows],
    }


def _spread(rows: Sequence[ScannedRow]) -> dict[str, int]:
    lengths = sorted(row.length or 0 for row in rows)
    marks = {"shortest": 0.0, "median": 0.5, "p95": 0.95, "longest": 1.0}
    spread = {name: lengths[round(share * (len(lengths) - 1))] for name, share in marks.items()}
    return {"total": sum(lengths), **spread}


def _tell(selection: Selection, rows: Sequence[ScannedRow], report: Path) -> None:
    options = selection.options
    spread = _spread(rows)
    total = spread.pop("total")
    out(f"read {len(selection.ids)} trajectories of {len(selection.instances)} instances")
    out(f"wrote {len(rows)} to {options.out}: {total:,} {options.length}")
    out("length: " + ", ".join(f"{name} {value:,}" for name, value in spread.items()))
    out(selection.tally.summary())
    out(f"report: {report}")
