"""The teacher cache: bytes a position, KL error of storage, and reading speed by random trajectory.

    python benchmarks/teacher_cache.py                      # about 0.5 GB in a temporary folder

Goals: at most 280 bytes a position, mean KL error at most 1e-6 nats, at least 1 GB/s. The last line of standard output
is one JSON object.
"""

from __future__ import annotations

import json
import platform
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

from acd.loss import Targets
from acd.teacher import top_candidates
from acd.teacher_cache import Key, Stored, TeacherCache, pack_targets, unpack_targets, write_shard
from loha.console import err, out


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    trajectories: int = 160
    positions: int = 10_000
    """Per trajectory."""
    per_shard: int = 40
    candidates: int = 64
    vocabulary: int = 151_936
    reads: int = 400
    """Whole trajectories read, at random."""
    seed: int = 0


def kl_error(options: Options, sharpness: float, positions: int = 2000) -> tuple[float, float]:
    """Return mean and largest KL(exact || stored) of random teachers."""
    g = torch.Generator().manual_seed(options.seed)
    hidden_ND = torch.randn(positions, 16, generator=g)
    head_VD = torch.randn(options.vocabulary, 16, generator=g) * sharpness
    exact = top_candidates(hidden_ND, head_VD, options.candidates)
    stored = unpack_targets(pack_targets(exact))
    p_NB, q_NB = (torch.cat([t.logp_NC, t.tail_N[:, None]], 1).double() for t in (exact, stored))
    kl_N = (p_NB.exp() * torch.where(p_NB > -80, p_NB - q_NB, 0.0)).sum(1)
    return float(kl_N.mean()), float(kl_N.max())


def random_stored(options: Options, rng: np.random.Generator) -> Stored:
    """Return random stored targets of one trajectory."""
    n, c = options.positions, options.candidates
    return Stored(
        ids_low=rng.integers(0, 1 << 16, (n, c), dtype=np.uint16),
        ids_high=rng.integers(0, 1 << 8, (n, c // 4), dtype=np.uint8),
        logp=-rng.random((n, c), dtype=np.float32).astype(np.float16) * np.float16(16),
        tail=-rng.random(n, dtype=np.float32).astype(np.float16),
    )


def key_of(number: int) -> Key:
    """Return the key of one trajectory, as long as real ones."""
    return Key(f"t{number}", "0" * 16, "0" * 16)


def write(options: Options, folder: Path) -> float:
    """Write a cache and return its bytes a position."""
    rng = np.random.default_rng(options.seed)
    for first in range(0, options.trajectories, options.per_shard):
        numbers = range(first, min(first + options.per_shard, options.trajectories))
        parts = [(key_of(i), random_stored(options, rng)) for i in numbers]
        path = folder / f"shard-{first:05d}-0.safetensors"
        write_shard(path, parts, fingerprint={}, vocabulary=options.vocabulary, notes={})
    total = sum(path.stat().st_size for path in folder.iterdir())
    return total / (options.trajectories * options.positions)


def read_speed(options: Options, folder: Path) -> dict[str, float]:
    """Read random trajectories from a warm page cache: copies of the stored bytes, then decoded targets."""
    cache = TeacherCache(folder)
    rng = random.Random(options.seed)
    keys = [key_of(rng.randrange(options.trajectories)) for _ in range(options.reads)]
    size = options.positions * (options.candidates * 4 + options.candidates // 4 + 2)
    start = time.perf_counter()
    for key in keys:
        for array in cache.read_stored(key).arrays().values():
            np.array(array)
    stored_s = time.perf_counter() - start
    decoded: list[Targets] = []
    start = time.perf_counter()
    for key in keys[:40]:
        decoded = [cache.read(key)]
    decoded_s = time.perf_counter() - start
    assert len(decoded[0]) == options.positions
    return {
        "read_gb_per_s": len(keys) * size / stored_s / 1e9,
        "decoded_positions_per_s": min(40, len(keys)) * options.positions / decoded_s,
    }


def main(options: Options) -> None:
    """Run all measurements."""
    results: dict[str, object] = {"options": asdict(options)}
    for name, sharpness in (("kl_error_flat", 0.5), ("kl_error", 2.0), ("kl_error_sharp", 6.0)):
        mean, largest = kl_error(options, sharpness)
        results[name] = {"mean": mean, "max": largest}
        err(f"{name}: mean {mean:.1e}, max {largest:.1e} nats")
    with tempfile.TemporaryDirectory() as folder:
        results["bytes_per_position"] = write(options, Path(folder))
        results |= read_speed(options, Path(folder))
    results["versions"] = {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
    out(json.dumps(results))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
