"""Whole files or none: write beside the target, then rename."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loha.errors import LohaError

_LEFT = re.compile(r"\.(.+)\.\d+\.(?:tmp|old)")


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary sibling of `path` that becomes `path` only if the block succeeds.

    Works for a file or a directory (the block decides which it creates). An existing target file is
    replaced in one rename; an existing target directory is moved aside first and removed afterwards. Contents reach the
    disk before the name does: a machine that loses power leaves whole files too.

    Args:
        path: the final path; its parent is created.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    _remove(temporary)
    try:
        yield temporary
        _sync(temporary)
        if temporary.is_dir() and target.exists():
            old = target.with_name(f".{target.name}.{os.getpid()}.old")
            _remove(old)
            target.rename(old)
            temporary.rename(target)
            _remove(old)
        else:
            temporary.replace(target)
        _sync_one(target.parent)
    finally:
        _remove(temporary)


def recover(folder: str | os.PathLike[str]) -> None:
    """Undo what killed processes left in a folder; for when no other process writes there.

    An old directory that was moved aside comes back where its successor is missing; all else that is half-written goes.
    """
    for old in sorted(Path(folder).glob(".*.old")):
        target = old.with_name(_LEFT.sub(r"\1", old.name))
        if target.name != old.name and not target.exists():
            old.rename(target)
    for left in Path(folder).glob(".*"):
        if _LEFT.fullmatch(left.name):
            _remove(left)


def check_replaceable(folder: str | os.PathLike[str], *, marker: str, kind: str) -> None:
    """Check, before the work starts, that a folder can be written and replaces nothing but an older one of its kind.

    Args:
        folder: about to be written with `atomic_path`.
        marker: file that every folder of this kind holds.
        kind: names it in the error, for instance "student".

    Raises:
        LohaError: when the folder holds something else, which replacing it would delete, or cannot be written.
    """
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise LohaError(f"{target} is a file, expected a folder for the {kind}: choose another name")
    if target.is_dir() and any(target.iterdir()) and not (target / marker).is_file():
        raise LohaError(f"{target} exists and is no {kind} ({marker} is missing): choose another folder or remove it")
    check_writable(target)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check, before the work starts, that a file or folder can be created where `path` says.

    Raises:
        LohaError: naming the parent that is no folder, or may not be written.
    """
    target = Path(path)
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise LohaError(f"{target} cannot be written: {parent} is a file, not a folder; choose another place")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise LohaError(f"{target} cannot be written: no permission to write in {parent}; choose another place")


def _sync(path: Path) -> None:
    for inner in (path, *path.rglob("*")):
        _sync_one(inner)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
