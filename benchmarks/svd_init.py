"""Time the exact SVD start per matrix shape and extrapolate it to a whole decoder (Qwen3-4B by default).

Each distinct shape is timed once in CPU seconds of this process, on a delta with a few strong directions over a noise
floor. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from loha.cli import run_main
from loha.console import err, out
from loha.svd import truncate


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark; the defaults are Qwen3-4B's."""

    hidden: int = 2560
    """D."""
    intermediate: int = 9728
    """Width of the MLP."""
    query: int = 4096
    """Query heads times head width."""
    key_value: int = 1024
    """Key heads times head width."""
    layers: int = 36
    """Decoder layers."""
    rank: int = 64
    """Of the patch."""
    check: bool = True
    """Compare the residual with a float64 SVD (slow for large shapes)."""


def main(options: Options) -> None:
    """Time `loha.svd.truncate` per shape."""
    shapes = Counter(
        {
            (options.query, options.hidden): 1,
            (options.hidden, options.query): 1,
            (options.key_value, options.hidden): 2,
            (options.intermediate, options.hidden): 2,
            (options.hidden, options.intermediate): 1,
        }
    )
    rows: list[dict[str, Any]] = []
    for shape, count in shapes.items():
        delta = spiked(*shape)
        begin = time.process_time()
        result = truncate(delta, options.rank)
        seconds = time.process_time() - begin
        row: dict[str, Any] = {"shape": list(shape), "per_layer": count, "cpu_s": round(seconds, 2)}
        if options.check:
            row["residual_over_optimal_minus_1"] = excess(delta, result.A, result.B)
        rows.append(row)
        err(json.dumps(row))
    minutes = options.layers * sum(row["per_layer"] * row["cpu_s"] for row in rows) / 60
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    out(
        json.dumps(
            {
                "benchmark": "svd_init",
                "matrices": options.layers * sum(shapes.values()),
                "threads": torch.get_num_threads(),
                "core_minutes": round(minutes, 2),
                "peak_rss_gib": round(peak, 2),
                "shapes": rows,
            }
        )
    )


def spiked(rows: int, columns: int, *, spikes: int = 24) -> torch.Tensor:
    """Return a delta with some strong directions over a near-white bulk, as full fine-tunes have."""
    torch.manual_seed(rows * 7 + columns)
    strong = torch.randn(rows, spikes) * torch.logspace(0, -1, spikes) @ torch.randn(spikes, columns)
    return strong * 1e-5 + torch.randn(rows, columns) * 1e-4


def excess(delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> float:
    """Return residual / optimal residual - 1, in float64."""
    wide = delta.double()
    sigma = torch.linalg.svdvals(wide if delta.shape[0] >= delta.shape[1] else wide.t())
    optimal = sigma[A.shape[0] :].norm()
    return ((wide - B.double() @ A.double()).norm() / optimal - 1).item()


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:], prog="svd_init.py"))
