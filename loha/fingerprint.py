"""Fingerprints: what must agree between a student, its parts, a teacher cache and a serving checkpoint."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

from loha.errors import LohaError
from loha.weight_files import TensorEntry, WeightFiles

Fingerprint = dict[str, str | int]

_READABLE = {
    "base_weights": "base weights",
    "encoder_weights": "encoder weights",
    "tokenizer": "tokenizer",
    "encoder_tokenizer": "encoder tokenizer",
    "chat_template": "chat template",
    "layout_version": "layout version",
    "ratio": "compression ratio",
    "window": "encoder window",
}
_BLOCK = 1 << 24


def weights_hash(folder: str | Path) -> str:
    """Return the sha256 of every tensor of a checkpoint: names, dtypes, shapes and data.

    It does not depend on how the tensors are sharded or ordered in files. A folder is read once per process, and again
    when one of its files changes.

    Raises:
        LohaError: when the folder holds no complete safetensors checkpoint.
    """
    files = WeightFiles(folder).files
    return _weights_hash(
        str(folder), tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    )


@functools.lru_cache(maxsize=16)
def _weights_hash(folder: str, _files: tuple[tuple[str, int, int], ...]) -> str:
    weights = WeightFiles(folder)
    digest = hashlib.sha256()
    for name in weights.names():
        entry = weights.entry(name)
        digest.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
        _update(digest, entry)
    return digest.hexdigest()


def require_match(
    found: Mapping[str, object], expected: Mapping[str, object], *, found_in: str, expected_by: str
) -> None:
    """Compare two fingerprints on the parts of the first, all of which the second must have recorded.

    The second may record more: a serving checkpoint also names the base's weights, which a server does not have.

    Args:
        found: of what is being loaded.
        expected: of what was used before.
        found_in: names the first, for instance "the base at models/qwen3".
        expected_by: names the second, for instance "the student at runs/student".

    Raises:
        LohaError: when they differ, or a part was not recorded; names the part and both sides.
    """
    for key, value in found.items():
        part = _READABLE.get(key, key)
        if key not in expected:
            raise LohaError(
                f"{expected_by} does not record its {part}, so it cannot be compared with {found_in}; make it again"
            )
        if value != expected[key]:
            raise LohaError(
                f"{part} differs: {found_in} has {_short(value)}, {expected_by} was made with "
                f"{_short(expected[key])}; use the same {part} for both"
            )


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else str(value)


def _update(digest: hashlib._Hash, entry: TensorEntry) -> None:
    with entry.file.open("rb") as stream:
        stream.seek(entry.start)
        left = entry.end - entry.start
        while left:
            block = stream.read(min(left, _BLOCK))
            digest.update(block)
            left -= len(block)
