"""Whole files or none: write beside the target, then rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary sibling of `path` that becomes `path` only if the block succeeds.

    Works for a file or a directory (the block decides which it creates). An existing target file is
    replaced in one rename; an existing target directory is moved aside first and removed afterwards.

    Args:
        path: the final path; its parent is created.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    _remove(temporary)
    try:
        yield temporary
        if temporary.is_dir() and target.exists():
            old = target.with_name(f".{target.name}.{os.getpid()}.old")
            _remove(old)
            target.rename(old)
            temporary.rename(target)
            _remove(old)
        else:
            temporary.replace(target)
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
