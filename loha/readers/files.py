"""From paths to raw rows: JSONL, JSON, Parquet, and folders of them.

Rows stream: one JSONL line, one Parquet batch or one JSON file is in memory at a time. What cannot be read becomes a
`RawRow` with a problem, so that one torn file does not end an import of two hundred.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loha.errors import LohaError
from loha.readers import openhands
from loha.readers.row import BadRow, ExcludedRow

SUFFIXES = (".jsonl", ".json", ".traj", ".parquet")
_PARQUET_BATCH_ROWS = 32
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"PK\x03\x04": "zip", b"BZh": "bzip2"}


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One file to read."""

    path: Path
    size: int
    found_in_folder: bool = False
    """Found by walking a folder, where other JSON files may lie beside the trajectories."""


@dataclass(frozen=True, kw_only=True)
class RawRow:
    """One row as its file holds it, or the reason why it cannot be read."""

    file: Path
    row: int
    """1-based row; 0 when the whole file is meant."""
    data: Any = None
    problem: BadRow | None = None
    bytes_read: int = 0
    """Bytes of the file that this row moved the reading forward by."""


def find_files(inputs: Sequence[str | os.PathLike[str]], *, leave_out: Sequence[Path] = ()) -> list[InputFile]:
    """Return the files that the inputs name, folders walked in sorted order.

    Args:
        inputs: files and folders.
        leave_out: files not to take from folders (the import's own output).

    Raises:
        LohaError: for a path that does not exist, or a folder without any trajectory file.
    """
    if not inputs:
        raise LohaError("no input: name at least one file or folder of trajectories")
    out = {path.resolve() for path in leave_out}
    found: dict[Path, InputFile] = {}
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            files = [file for file in _walk(path) if file.resolve() not in out]
            if not files:
                raise LohaError(f"{path}: folder without any {', '.join(SUFFIXES)} file; give the files' own folder")
        elif path.exists():
            files = [path]
        else:
            raise LohaError(f"{path}: no such file or folder")
        for file in files:
            entry = InputFile(path=file, size=file.stat().st_size, found_in_folder=path.is_dir())
            found.setdefault(file.resolve(), entry)
    return list(found.values())


def read_rows(files: Sequence[InputFile]) -> Iterator[RawRow]:
    """Yield the raw rows of all files, in order; OpenHands call logs give the last call of each conversation."""
    folders: dict[Path, list[InputFile]] = {}
    for file in files:
        if _is_json(file.path):
            folders.setdefault(file.path.parent, []).append(file)
    done: set[Path] = set()
    for file in files:
        if file.path in done:
            continue
        if _is_call_log(file.path):
            logs = [other for other in folders[file.path.parent] if other.path not in done]
            done.update(other.path for other in logs)
            yield from _read_call_logs(logs)
        else:
            done.add(file.path)
            yield from read_file(file.path)


def read_file(path: Path) -> Iterator[RawRow]:
    """Yield the raw rows of one file, whatever its name says about its form."""
    try:
        yield from _read(path)
    except OSError as error:
        yield _unreadable(path, "cannot be read", str(error))


def _read(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        head = file.read(4096)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    packed = next((name for magic, name in _PACKED.items() if head.startswith(magic)), None)
    if not text:
        yield _unreadable(path, "empty file", "holds no row")
    elif head.startswith(b"PAR1") or path.suffix == ".parquet":
        yield from _read_parquet(path)
    elif packed:
        yield _unreadable(path, "compressed file", f"is packed with {packed}; unpack it first")
    elif text[:1] not in b"{[" and b"\0" in head:
        yield _unreadable(path, "binary file", "is neither JSON, JSONL nor Parquet")
    elif _is_json(path) or text[:1] == b"[" or text.split(b"\n", 1)[0].strip() == b"{":
        yield from _read_json(path)
    else:
        yield from _read_jsonl(path)


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            body = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if not body.strip():
                yield RawRow(file=path, row=0, bytes_read=len(line))
                continue
            data, problem = _parse(body, "the line")
            yield RawRow(file=path, row=number, data=data, problem=problem, bytes_read=len(line))


def _read_json(path: Path) -> Iterator[RawRow]:
    raw = path.read_bytes()
    data, problem = _parse(raw.removeprefix(b"\xef\xbb\xbf"), "the file")
    if problem is not None and "Extra data" in problem.detail:  # several objects: JSONL under another name
        yield from _read_jsonl(path)
    elif problem is not None:
        yield RawRow(file=path, row=0, problem=problem, bytes_read=len(raw))
    elif isinstance(data, list):
        if not data:
            yield _unreadable(path, "empty file", "holds an empty list")
        for number, row in enumerate(data, 1):
            yield RawRow(file=path, row=number, data=row, bytes_read=len(raw) if number == len(data) else 0)
    elif isinstance(data, dict):
        yield RawRow(file=path, row=1, data=data, bytes_read=len(raw))
    else:
        detail = f"expected an object or a list of objects, got {type(data).__name__}"
        yield _unreadable(path, "wrong top-level type", detail)


def _parse(raw: bytes, what: str) -> tuple[Any, BadRow | None]:
    try:
        return json.loads(raw.decode("utf-8")), None
    except UnicodeDecodeError as error:
        return None, BadRow("not UTF-8", f"{what} has byte 0x{raw[error.start]:02x} at offset {error.start}")
    except RecursionError:
        return None, BadRow("not JSON", f"{what} is nested too deeply")
    except ValueError as error:
        return None, BadRow("not JSON", f"{error} (is {what} cut off?)")


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        # Without pre-buffering a shard of one row group streams instead of standing in memory whole.
        with pq.ParquetFile(path, pre_buffer=False) as file:
            rows = file.metadata.num_rows
            if not rows:
                yield _unreadable(path, "empty file", "has columns but no row")
            size = path.stat().st_size
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
                for data, problem in _batch_rows(batch):
                    row += 1
                    share = size * row // rows - size * (row - 1) // rows  # adds up to the size
                    yield RawRow(file=path, row=row, data=data, problem=problem, bytes_read=share)
    except (pa.ArrowException, OSError) as error:
        place = f"after row {row}" if row else "from its start"
        detail = f"cannot be read {place} ({_first_line(error)}); fetch it again, or leave it out"
        yield _unreadable(path, "damaged Parquet file", detail)


def _batch_rows(batch: Any) -> Iterator[tuple[Any, BadRow | None]]:
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:  # one bad string must not cost the batch
        for index in range(batch.num_rows):
            try:
                yield _without_nulls(batch.slice(index, 1).to_pylist()[0]), None
            except UnicodeDecodeError as error:
                yield None, BadRow("not UTF-8", str(error))
        return
    for row in rows:
        yield _without_nulls(row), None


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    # Parquet gives every struct of a column the same fields, so keys that a message never had come back as nulls.
    return {key: _strip(value) for key, value in row.items()}


def _strip(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strip(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_strip(item) for item in value]
    return value


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(SUFFIXES) and not name.startswith("."):
                yield Path(parent, name)


def _is_json(path: Path) -> bool:
    return path.suffix in (".json", ".traj")


def _is_call_log(path: Path) -> bool:
    if not _is_json(path) or path.name.endswith(".traj.json"):
        return False
    try:
        data, _ = _parse(path.read_bytes(), "the file")
    except OSError:  # told when the file's turn comes
        return False
    return isinstance(data, dict) and openhands.matches(data)


def _read_call_logs(files: Sequence[InputFile]) -> Iterator[RawRow]:
    """Yield the last call of each conversation that a folder of OpenHands call logs holds.

    Calls belong to one conversation when they begin with the same prompt. A condenser writes its own calls into the
    same folder: single calls beside longer conversations are left out, and said so.
    """
    last: dict[str, tuple[float, str, Path, int]] = {}
    for file in files:
        data, problem = _parse(file.path.read_bytes(), "the file")
        if problem is not None or not isinstance(data, dict) or not openhands.matches(data):
            yield from read_file(file.path)
            continue
        key, turns = _conversation(data)
        entry = (_timestamp(data), file.path.name, file.path, turns)
        last[key] = max(last.get(key, entry), entry)
        yield RawRow(file=file.path, row=0, bytes_read=file.size)
    longest = max((turns for *_, turns in last.values()), default=0)
    for _, _, path, turns in sorted(last.values()):
        if turns == 0 and longest > 0:
            problem = ExcludedRow("single call", "has no history: a condenser's call, or a run that ended at once")
            yield RawRow(file=path, row=1, problem=problem)
        else:
            yield RawRow(file=path, row=1, data=_parse(path.read_bytes(), "the file")[0])


def _conversation(call: Mapping[str, Any]) -> tuple[str, int]:
    """Return a key of the prompt before the first assistant turn, and the number of assistant turns."""
    messages = call["messages"] if isinstance(call["messages"], list) else []
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    prompt = messages[: roles.index("assistant")] if "assistant" in roles else messages
    return hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).hexdigest(), roles.count("assistant")


def _timestamp(call: Mapping[str, Any]) -> float:
    value = call.get("timestamp")
    return float(value) if isinstance(value, (int, float)) else 0.0


def _unreadable(path: Path, reason: str, detail: str) -> RawRow:
    return RawRow(file=path, row=0, problem=BadRow(reason, detail), bytes_read=path.stat().st_size)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
