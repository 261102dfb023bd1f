"""Measure the rows of a canonical JSONL file in chunks, in this process or in several.

A chunk is a range of bytes; a row belongs to the chunk that its first byte lies in. So memory stays flat, the result
does not depend on how many processes work, and a row can be found again by its offset.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from loha.errors import LohaError
from loha.trajectory import Trajectory, parse_line

CHUNK_BYTES = 8 << 20
SMALL_FILE_BYTES = 64 << 20
"""Below this, starting further processes costs more than it saves."""
MOST_WORKERS = 16

Length = Literal["tokens", "turns", "chars"]
Measure = Callable[[Trajectory], int]


@dataclass(frozen=True, kw_only=True)
class ScannedRow:
    """What selection needs to know of a row, without its text."""

    row: int
    """1-based line; counted from the start of the chunk until `scan` makes it a line of the file."""
    offset: int
    id: str
    instance_id: str
    resolved: bool | None
    length: int | None = None
    """None when the row was not to be measured, or could not be."""
    problem: str = ""
    """Why it could not be measured."""


@dataclass(frozen=True, kw_only=True)
class ScannedChunk:
    """The rows of a chunk, or of the part of it before its first row that is not canonical."""

    rows: list[ScannedRow]
    lines: int
    bytes_read: int
    problem: str = ""


def make_measure(length: Length, tokenizer: Path | None) -> Measure:
    """Return a function from a trajectory to its length.

    Args:
        length: tokens of the full-text rendering under the tokenizer's chat template (tools included, no generation
            prompt), assistant turns, or characters of contents and call arguments.
        tokenizer: the decoder's folder; needed for tokens.

    Raises:
        LohaError: when the tokenizer is missing or cannot be used.
    """
    if length == "turns":
        return lambda trajectory: trajectory.assistant_turns
    if length == "chars":
        return lambda trajectory: trajectory.characters
    if tokenizer is None:
        raise LohaError(
            "--length tokens needs --tokenizer DIR, the decoder's folder; --length turns or chars do without"
        )
    from loha.render import Renderer
    from loha.tokenizer_dir import load_tokenizer

    renderer = Renderer(load_tokenizer(tokenizer))
    return lambda trajectory: renderer.render(trajectory.messages, trajectory.tools, view="full").full_text_tokens


def worker_count(asked: int, size: int) -> int:
    """Return how many processes to use: as many as asked, or for 0 as the file's size and the machine suggest."""
    if asked < 0:
        raise LohaError(f"--workers must be 0 (choose) or more, got {asked}")
    if asked:
        return asked
    if size < SMALL_FILE_BYTES:
        return 1
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(available, MOST_WORKERS)


def scan(
    path: Path,
    *,
    length: Length,
    tokenizer: Path | None,
    unresolved: bool,
    workers: int,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[ScannedChunk]:
    """Yield the chunks of a file in order, each row measured that could be selected.

    Args:
        path: canonical JSONL.
        length: what to measure.
        tokenizer: the decoder's folder, for tokens.
        unresolved: measure rows that are not known to be resolved too.
        workers: processes.
        chunk_bytes: size of a chunk; a row is never cut.

    Raises:
        LohaError: for a row that is not canonical, naming file and line.
    """
    measure = make_measure(
        length, tokenizer
    )  # here too when others measure: a bad tokenizer must fail once, not in each
    starts = range(0, path.stat().st_size, chunk_bytes)
    work = partial(_scan_chunk, path, chunk_bytes=chunk_bytes, unresolved=unresolved)
    if workers == 1:
        yield from _numbered(path, (work(start, measure=measure) for start in starts))
        return
    # Spawned, not forked: tokenizers keep threads of their own.
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(length, tokenizer),
    )
    try:
        yield from _numbered(path, pool.map(partial(_work, work), starts))
    except BrokenProcessPool as error:
        raise LohaError(f"{path}: a measuring process died, out of memory perhaps; use fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _numbered(path: Path, chunks: Iterator[ScannedChunk]) -> Iterator[ScannedChunk]:
    lines = 0
    for chunk in chunks:
        if chunk.problem:
            raise LohaError(f"{path}: row {lines + chunk.lines}{chunk.problem}")
        yield ScannedChunk(
            rows=[_moved(row, lines) for row in chunk.rows], lines=chunk.lines, bytes_read=chunk.bytes_read
        )
        lines += chunk.lines


def _moved(row: ScannedRow, lines: int) -> ScannedRow:
    return ScannedRow(**{**row.__dict__, "row": row.row + lines})


def _scan_chunk(path: Path, start: int, *, chunk_bytes: int, unresolved: bool, measure: Measure) -> ScannedChunk:
    rows: list[ScannedRow] = []
    lines = 0
    with path.open("rb") as file:
        if start:  # the row that reaches into this chunk belongs to the one before
            file.seek(start - 1)
            file.readline()
        begin = offset = file.tell()
        while offset < start + chunk_bytes and (line := file.readline()):
            lines += 1
            if line.strip():
                try:
                    trajectory = parse_line(line, where="")
                except LohaError as error:
                    return ScannedChunk(rows=rows, lines=lines, bytes_read=0, problem=str(error))
                rows.append(_scan_row(trajectory, lines, offset, unresolved=unresolved, measure=measure))
            offset = file.tell()
    return ScannedChunk(rows=rows, lines=lines, bytes_read=offset - begin)


def _scan_row(trajectory: Trajectory, row: int, offset: int, *, unresolved: bool, measure: Measure) -> ScannedRow:
    length, problem = None, ""
    if trajectory.resolved or unresolved:
        try:
            length = measure(trajectory)
        except LohaError as error:
            problem = str(error)
    return ScannedRow(
        row=row,
        offset=offset,
        id=trajectory.id,
        instance_id=trajectory.instance_id,
        resolved=trajectory.resolved,
        length=length,
        problem=problem,
    )


_worker_measure: Measure | None = None


def _start_worker(length: Length, tokenizer: Path | None) -> None:
    global _worker_measure
    _worker_measure = make_measure(length, tokenizer)


def _work(work: Callable[..., ScannedChunk], start: int) -> ScannedChunk:
    assert _worker_measure is not None, "the pool's initializer has not run"
    return work(start, measure=_worker_measure)
