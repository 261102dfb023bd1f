"""The teacher cache on disk: 274 bytes a position at 64 candidates.

A shard is one safetensors file with four tensors over all its P positions, trajectory after trajectory:

    ids_low   uint16 [P, C]      the low 16 bits of each candidate id, likeliest first
    ids_high  uint8  [P, C / 4]  bits 16 and 17, four ids a byte, the first in the lowest bits
    logp      fp16   [P, C]      natural log-probabilities
    tail      fp16   [P]         natural log of the mass outside the candidates

Its metadata holds the fingerprint and, per trajectory, id, digest of its contents, hash of its assistant ids, first
position and length. Targets are found by the first three (`Key`): they depend on the whole context, not only on the
tokens that they predict. A shard appears under its name only when it is whole, and its name says which trajectories it
holds. The index is made from the shards; `index.json` is a copy for people.

The tail is stored: recomputed from rounded log-probabilities it would be wrong by up to 1e-2 nats of KL. fp16
log-probabilities do not sum to one exactly, so reading normalises the C + 1 buckets.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open

from acd.loss import Targets
from loha.atomic import atomic_path
from loha.errors import LohaError
from loha.fingerprint import Fingerprint, require_match
from loha.weight_files import read_header, save_tensors

FORMAT = 2
"""1 did not say which contents of a trajectory the targets belong to."""
INDEX_NAME = "index.json"
SHARD_GLOB = "shard-*.safetensors"
MAX_VOCABULARY = 1 << 18
_IDS_PER_BYTE = 4
_DTYPES = {"U16": np.uint16, "U8": np.uint8, "F16": np.float16}


@dataclass(frozen=True)
class Stored:
    """Targets in the form in which they are stored."""

    ids_low: np.ndarray
    ids_high: np.ndarray
    logp: np.ndarray
    tail: np.ndarray

    @property
    def bytes_per_position(self) -> float:
        """Bytes of one position."""
        return sum(array.nbytes for array in self.arrays().values()) / max(1, len(self.tail))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the tensors by name."""
        return {"ids_low": self.ids_low, "ids_high": self.ids_high, "logp": self.logp, "tail": self.tail}


class Key(NamedTuple):
    """What the targets of one trajectory are found by."""

    trajectory: str
    digest: str
    """Of its contents, from `acd.corpus.Entry`."""
    assistant_hash: str
    """Of its assistant ids, from `acd.views.Example`."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the targets of one trajectory lie."""

    shard: Path
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """The metadata of a shard."""

    path: Path
    fingerprint: Fingerprint
    candidates: int
    vocabulary: int
    trajectories: dict[Key, Place]

    @property
    def positions(self) -> int:
        """Positions of the whole shard."""
        return sum(place.length for place in self.trajectories.values())


def pack_targets(targets: Targets) -> Stored:
    """Return targets in stored form.

    Raises:
        LohaError: for ids of a vocabulary above 262,144.
    """
    ids = targets.ids_NC.cpu().numpy()
    if ids.size and ids.max() >= MAX_VOCABULARY:
        raise LohaError(f"token id {ids.max()} does not fit the cache's 18 bits: vocabularies end at {MAX_VOCABULARY}")
    high = (ids >> 16).astype(np.uint8)
    high = np.pad(high, ((0, 0), (0, -ids.shape[1] % _IDS_PER_BYTE)))
    quads = high.reshape(len(ids), -1, _IDS_PER_BYTE) << np.arange(0, 8, 2, dtype=np.uint8)
    return Stored(
        ids_low=(ids & 0xFFFF).astype(np.uint16),
        ids_high=np.bitwise_or.reduce(quads, axis=2),
        logp=targets.logp_NC.cpu().numpy().astype(np.float16),
        tail=targets.tail_N.cpu().numpy().astype(np.float16),
    )


def unpack_targets(stored: Stored) -> Targets:
    """Return stored targets as tensors, with the C + 1 buckets summing to one."""
    candidates = stored.ids_low.shape[1]
    high = (stored.ids_high[:, :, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3
    high = high.reshape(len(high), -1)[:, :candidates]
    ids_NC = torch.from_numpy(stored.ids_low.astype(np.int64) | (high.astype(np.int64) << 16))
    buckets = np.concatenate([stored.logp, stored.tail[:, None]], axis=1)
    logp_NB = torch.from_numpy(buckets.astype(np.float32)).log_softmax(dim=1)
    return Targets(ids_NC, logp_NB[:, :-1], logp_NB[:, -1])


def write_shard(
    path: Path,
    parts: Sequence[tuple[Key, Stored]],
    *,
    fingerprint: Mapping[str, str | int],
    vocabulary: int,
    notes: Mapping[str, Any],
) -> None:
    """Write one shard, whole or not at all.

    Args:
        path: its final name.
        parts: (key, stored targets) of each trajectory, at least one.
        fingerprint: of the teacher, the tokenizer, the template and the layout.
        vocabulary: V of the teacher's softmax.
        notes: how it was computed, for people.

    Raises:
        LohaError: when it cannot be written, for instance on a full disk.
    """
    arrays = {name: np.concatenate([stored.arrays()[name] for _, stored in parts]) for name in parts[0][1].arrays()}
    trajectories, start = [], 0
    for key, stored in parts:
        trajectories.append([*key, start, len(stored.tail)])
        start += len(stored.tail)
    about = {
        "format": FORMAT,
        "fingerprint": dict(fingerprint),
        "candidates": arrays["ids_low"].shape[1],
        "vocabulary": vocabulary,
        "notes": dict(notes),
        "trajectories": trajectories,
    }
    with atomic_path(path) as temporary:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        save_tensors(tensors, temporary, about=("teacher_cache", json.dumps(about)))


def read_shard_info(path: Path) -> ShardInfo:
    """Read the metadata of a shard and check that the file is whole.

    Raises:
        LohaError: when it is cut short or no shard of this format; names the file and the remedy.
    """
    remedy = "delete it and run acd.cache_teacher again, whole shards of this format are kept"
    try:
        read_header(path)
        with safe_open(path, framework="np") as file:
            about = json.loads((file.metadata() or {})["teacher_cache"])
        if about["format"] != FORMAT:
            raise LohaError(f"format {about['format']}, this version reads {FORMAT}")
        trajectories = {
            Key(trajectory, digest, assistant_hash): Place(shard=path, start=start, length=length)
            for trajectory, digest, assistant_hash, start, length in about["trajectories"]
        }
        return ShardInfo(
            path=path,
            fingerprint=about["fingerprint"],
            candidates=about["candidates"],
            vocabulary=about["vocabulary"],
            trajectories=trajectories,
        )
    except (LohaError, KeyError, ValueError, TypeError) as error:
        raise LohaError(f"{path}: not a whole teacher cache shard ({_brief(error)}); {remedy}") from error


class TeacherCache:
    """Reads targets by trajectory.

    Args:
        folder: written by `acd.cache_teacher`.
        expected: fingerprint of the teacher, tokenizer, template and layout now in use; None skips the check.
        vocabulary: V of the student's head, which the ids index; None skips the check.

    Raises:
        LohaError: when the folder holds no cache, a damaged shard, or a cache of something else.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        expected: Mapping[str, str | int] | None = None,
        vocabulary: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.shards = [read_shard_info(path) for path in sorted(self.folder.glob(SHARD_GLOB))]
        if not self.shards:
            raise LohaError(f"{self.folder}: holds no teacher cache; write one with python -m acd.cache_teacher")
        for shard in self.shards:
            check_shard(shard, expected, candidates=self.shards[0].candidates, vocabulary=vocabulary)
        # Shards of older contents may lie beside newer ones. Those of one key are equal, so any of them will do.
        self._places = {key: place for shard in self.shards for key, place in shard.trajectories.items()}
        self._contents = {(key.trajectory, key.digest) for key in self._places}
        self._ids = {key.trajectory for key in self._places}
        self._open: dict[Path, Stored] = {}

    def __len__(self) -> int:
        return len(self._places)

    def place(self, key: Key) -> Place:
        """Return where the targets of a trajectory lie.

        Raises:
            LohaError: when it is not in the cache, or was cached with other contents or other assistant tokens.
        """
        place = self._places.get(key)
        if place is None:
            raise LohaError(
                f"{self.folder}: trajectory {key.trajectory!r} {self._why_missing(key)}; run acd.cache_teacher again "
                "on the file that trains"
            )
        return place

    def check_holds(self, contents: Collection[tuple[str, str]]) -> None:
        """Check that trajectories are cached, before a run needs the last of them.

        Args:
            contents: (id, digest) of each.

        Raises:
            LohaError: says how many are missing, and names one.
        """
        missing = [each for each in contents if each not in self._contents]
        if missing:
            raise LohaError(
                f"{self.folder}: lacks {len(missing)} of {len(contents)} trajectories that train: {missing[0][0]!r} "
                f"{self._why_missing(Key(*missing[0], ''))}; run acd.cache_teacher again on the file that trains"
            )

    def _why_missing(self, key: Key) -> str:
        if key.trajectory not in self._ids:
            return "is not in the cache"
        if (key.trajectory, key.digest) not in self._contents:
            return "was cached with other contents"
        return "was cached with other assistant tokens"

    def read_stored(self, key: Key) -> Stored:
        """Return the stored arrays of one trajectory (memory-mapped)."""
        place = self.place(key)
        rows = slice(place.start, place.start + place.length)
        return Stored(*(array[rows] for array in self._mapped(place.shard).arrays().values()))

    def read(self, key: Key) -> Targets:
        """Return the targets at the assistant positions of one trajectory, in order."""
        return unpack_targets(self.read_stored(key))

    def _mapped(self, path: Path) -> Stored:
        if path not in self._open:
            entries = read_header(path)
            self._open[path] = Stored(
                *(
                    np.memmap(path, _DTYPES[e.dtype], mode="r", offset=e.start, shape=e.shape)
                    for e in (entries[name] for name in ("ids_low", "ids_high", "logp", "tail"))
                )
            )
        return self._open[path]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_open": {}}


def check_shard(
    shard: ShardInfo,
    expected: Mapping[str, str | int] | None,
    *,
    candidates: int,
    vocabulary: int | None = None,
) -> None:
    """Check that a shard was made with what is in use now.

    Args:
        shard: to check.
        expected: fingerprint now in use; None skips the check.
        candidates: log-probabilities a position.
        vocabulary: V of the student's head; None skips the check.

    Raises:
        LohaError: names the file, the part that differs and both sides.
    """
    if shard.candidates != candidates:
        raise LohaError(
            f"{shard.path}: holds {shard.candidates} candidates a position, expected {candidates}; "
            "write the cache into another folder or delete this one"
        )
    if expected is not None:
        require_match(
            expected, shard.fingerprint, found_in="this configuration", expected_by=f"teacher cache {shard.path}"
        )
    if vocabulary is not None and shard.vocabulary > vocabulary:
        raise LohaError(
            f"{shard.path}: its teacher has {shard.vocabulary} token ids, the student's head only {vocabulary}; "
            "choose a teacher of the base's vocabulary"
        )


def write_index(folder: Path) -> dict[str, Any]:
    """Write `index.json` from the shards and return what it says."""
    cache = TeacherCache(folder)
    first = cache.shards[0]
    positions = sum(shard.positions for shard in cache.shards)
    index = {
        "format": FORMAT,
        "fingerprint": first.fingerprint,
        "candidates": first.candidates,
        "vocabulary": first.vocabulary,
        "positions": positions,
        "bytes_per_position": sum(shard.path.stat().st_size for shard in cache.shards) / max(1, positions),
        "shards": {shard.path.name: [key.trajectory for key in shard.trajectories] for shard in cache.shards},
    }
    with atomic_path(folder / INDEX_NAME) as temporary:
        temporary.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return index


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
