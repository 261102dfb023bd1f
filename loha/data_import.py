"""`loha data import`: recorded runs of several scaffolds into one canonical JSONL."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from loha.atomic import atomic_path
from loha.console import out
from loha.data_report import RowName, Tally, check_out, write_report
from loha.errors import LohaError
from loha.outcomes import read_outcomes
from loha.progress import progress_bar
from loha.readers import BadRow, ExcludedRow, RowContext, by_name, read_row
from loha.readers.files import InputFile, RawRow, find_files, read_rows
from loha.readers.row import Reader
from loha.trajectory import Trajectory


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `loha data import`."""

    inputs: tyro.conf.Positional[tuple[Path, ...]]
    """JSONL, JSON or Parquet files, or folders of them."""

    out: Path
    """Canonical JSONL to write; a report goes beside it as NAME.report.json."""

    format: str = "auto"
    """Format of the rows: auto (per row, from its keys), coderforge, swe-master-run, swe-master-sft, mini-swe-agent,
    openhands or openai-chat."""

    bad_rows: Literal["skip", "fatal"] = "skip"
    """What a row that cannot be read does: skip reports and counts it; fatal stops, exits with 2 and writes nothing."""

    licence: Annotated[str | None, tyro.conf.arg(aliases=["--license"])] = None
    """Licence to write into every row; without it each row keeps the one that its source states."""

    source: str | None = None
    """Source to write into every row; without it each row gets the name of its format."""

    outcomes: Path | None = None
    """Which instances were solved, for formats that do not say: a swebench report (JSON with resolved_ids)."""

    assume_resolved: bool = False
    """Take rows that state no outcome as solved (data sets of successes only)."""


@dataclass(kw_only=True)
class Import:
    """State of one import: what was read, written and dropped so far."""

    options: Options
    readers: tuple[Reader, ...]
    outcomes: dict[str, bool]
    in_folder: frozenset[Path]
    tally: Tally = field(default_factory=Tally)
    rows_read: int = 0
    files_unreadable: int = 0
    written: int = 0
    digests: dict[str, bytes] = field(default_factory=dict)
    """Digest of the content written under each id."""
    instances: set[str] = field(default_factory=set)
    formats: Counter[str] = field(default_factory=Counter)
    resolved: Counter[str] = field(default_factory=Counter)

    def take(self, raw: RawRow) -> Trajectory | None:
        """Return the trajectory of a raw row; None when there is none, which is reported.

        Raises:
            LohaError: for a bad row when bad rows are fatal.
        """
        if raw.problem is None and raw.row == 0:
            return None  # a blank line, or a call log that a later one contains
        if raw.row:
            self.rows_read += 1
        else:
            self.files_unreadable += 1
        context = RowContext(file=raw.file, row=raw.row)
        try:
            if raw.problem is not None:
                raise raw.problem
            trajectory = self._with_options(self._read(raw, context))
            trajectory = self._unique(trajectory, raw)
        except BadRow as bad:
            self._drop(raw, bad)
            return None
        self._count(trajectory)
        for text in context.notes:
            self.tally.note(text, _row_name(raw, trajectory.id))
        return trajectory

    def _read(self, raw: RawRow, context: RowContext) -> Trajectory:
        try:
            return read_row(raw.data, context, self.readers)
        except BadRow as bad:
            if bad.reason == "unknown format" and raw.file in self.in_folder and raw.file.suffix == ".json":
                # Scaffolds leave settings, predictions and reports beside their runs.
                raise ExcludedRow("not a trajectory file", bad.detail) from bad
            raise

    def _with_options(self, trajectory: Trajectory) -> Trajectory:
        changes: dict[str, Any] = {}
        if self.options.licence is not None:
            changes["licence"] = self.options.licence
        if self.options.source is not None:
            changes["source"] = self.options.source
        if trajectory.resolved is None:
            resolved = self.outcomes.get(trajectory.instance_id, True if self.options.assume_resolved else None)
            changes["resolved"] = resolved
        return dataclasses.replace(trajectory, **changes) if changes else trajectory

    def _unique(self, trajectory: Trajectory, raw: RawRow) -> Trajectory:
        """Return the trajectory under an id of its own.

        Raises:
            ExcludedRow: when the same content was written under the same id before.
        """
        digest = _digest(trajectory)
        name, number = trajectory.id, 1
        while name in self.digests:
            if self.digests[name] == digest:
                raise ExcludedRow("duplicate", f"id {name!r} with the same content came before")
            number += 1
            name = f"{trajectory.id}#{number}"
        self.digests[name] = digest
        if name == trajectory.id:
            return trajectory
        self.tally.note("id used before with other content", _row_name(raw, trajectory.id), f"renamed to {name}")
        return dataclasses.replace(trajectory, id=name)

    def _drop(self, raw: RawRow, bad: BadRow) -> None:
        row = _row_name(raw, _id_of(raw.data))
        if self.options.bad_rows == "fatal" and not isinstance(bad, ExcludedRow):
            raise LohaError(f"{row}: {bad}; nothing was written (--bad-rows skip would leave the row out)")
        self.tally.drop(bad.reason, row, bad.detail)

    def _count(self, trajectory: Trajectory) -> None:
        self.written += 1
        self.instances.add(trajectory.instance_id)
        self.formats[trajectory.source] += 1
        self.resolved[{True: "resolved", False: "not resolved", None: "unknown"}[trajectory.resolved]] += 1


def main(options: Options) -> int:
    """Read recorded agent runs into one canonical JSONL; rows that cannot be read are reported, never lost silently."""
    check_out(options.out, options.inputs)
    readers = by_name(options.format)
    files = find_files(options.inputs, leave_out=[options.out])
    work = Import(
        options=options,
        readers=readers,
        outcomes=read_outcomes(options.outcomes) if options.outcomes else {},
        in_folder=frozenset(file.path for file in files if file.found_in_folder),
    )
    with atomic_path(options.out) as temporary:
        _write(work, files, temporary)
        if not work.written:
            raise LohaError(f"no usable trajectory, nothing was written; {work.tally.first_dropped()}")
        report = write_report(options.out, "data import", _report(work, files))
    _tell(work, files, report)
    return 0


def _write(work: Import, files: list[InputFile], path: Path) -> None:
    total = sum(file.size for file in files)
    with path.open("wb") as output, progress_bar("import", total=total, unit="B") as bar:
        for raw in read_rows(files):
            trajectory = work.take(raw)
            if trajectory is not None:
                output.write(trajectory.to_line().encode("utf-8") + b"\n")
            bar.update(raw.bytes_read)


def _report(work: Import, files: list[InputFile]) -> dict[str, Any]:
    return {
        "inputs": [{"file": str(file.path), "bytes": file.size} for file in files],
        "out": str(work.options.out),
        "rows_read": work.rows_read,
        "rows_written": work.written,
        "rows_dropped": work.rows_read - work.written,
        "files_unreadable": work.files_unreadable,
        "dropped_by_reason": dict(work.tally.dropped),
        "instances": len(work.instances),
        "sources": dict(work.formats),
        "outcomes": dict(work.resolved),
        "noted_by_reason": dict(work.tally.noted),
        **work.tally.listed,
    }


def _tell(work: Import, files: list[InputFile], report: Path) -> None:
    broken = f", {work.files_unreadable} of them unreadable" if work.files_unreadable else ""
    out(f"read {work.rows_read} rows from {len(files)} file{'s' * (len(files) != 1)}{broken}")
    out(f"wrote {work.written} trajectories of {len(work.instances)} instances to {work.options.out}")
    out("sources: " + _counts(work.formats))
    out("outcomes: " + _counts(work.resolved))
    out(work.tally.summary())
    if work.tally.noted:
        out("noted: " + _counts(work.tally.noted))
    out(f"report: {report}")


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counter.most_common())


def _digest(trajectory: Trajectory) -> bytes:
    digest = hashlib.blake2b(repr(trajectory.resolved).encode(), digest_size=16)
    for message in trajectory.messages:
        calls = [part for call in message.get("tool_calls", ()) for part in call["function"].values()]
        for part in (message["role"], message["content"], *calls):
            digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.digest()


def _row_name(raw: RawRow, name: str) -> RowName:
    return RowName(file=str(raw.file), row=raw.row, id=name)


def _id_of(data: Any) -> str:
    if not isinstance(data, dict):
        return ""
    keys = ("id", "trajectory_id", "traj_id", "instance_id")
    return next((data[key] for key in keys if isinstance(data.get(key), str) and data[key]), "")
