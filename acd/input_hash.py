"""One hash of the files that a configuration names, so that a result can be told from one made with others."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

from acd.command import student_config
from acd.config import Config
from loha.errors import LohaError
from loha.fingerprint import weights_hash
from loha.student import make_fingerprint


def input_hash(config: Config) -> str:
    """Return a hash of trajectories, student, base, encoder, tokenizers, template and distillation teacher.

    Teacher caches are left out: they follow from these, and training checks that they do.

    Raises:
        LohaError: when one of them is missing or damaged.
    """
    student = Path(config.model.student)
    files = [config.data.trajectories, config.data.held_out, *sorted(p for p in student.rglob("*") if p.is_file())]
    parts = {
        "fingerprint": make_fingerprint(student_config(config)),
        "teacher": weights_hash(config.teacher.model) if config.teacher.model else None,
        "files": [_file_hash(Path(file)) for file in files if file is not None],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _file_hash(path: Path) -> str:
    if not path.is_file():
        raise LohaError(f"{path}: no such file, but the configuration names it")
    status = path.stat()
    return _hash_once(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=256)
def _hash_once(path: Path, _size: int, _changed: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
