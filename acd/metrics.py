"""metrics.jsonl: one JSON object per optimizer step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from acd.rows import TERMS
from loha.atomic import atomic_path

METRICS_NAME = "metrics.jsonl"
EVALUATIONS_NAME = "evaluations.jsonl"
TIMES = ("seconds", "tokens_per_s")
"""Figures of a step that no two runs share."""


class JsonLines:
    """An append-only log with one object per step.

    Args:
        path: of the file.
        before: entries of this step and later ones are dropped, since a resumed run does them again.
    """

    def __init__(self, path: Path, *, before: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_lines(path) if line["step"] < before]
        with atomic_path(path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one object."""
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(values) + "\n")


def step_metrics(
    step: int,
    *,
    sums: Sequence[float],
    counts: Sequence[int],
    anchor_weight: float,
    tokens: int,
    seconds: float,
    grad_norm: float,
    rates: Mapping[str, float],
) -> dict[str, Any]:
    """Return the metrics of one step.

    Args:
        step: 0-based.
        sums: nats of distill, read-back and anchor over all ranks and rows.
        counts: their positions.
        anchor_weight: lambda.
        tokens: positions of all rows.
        seconds: wall time of the step.
        grad_norm: before clipping.
        rates: learning rate by group.
    """
    distill = (sums[0] + sums[1]) / max(1, counts[0] + counts[1])
    anchor = sums[2] / max(1, counts[2])
    terms = {term: {"sum": sums[i], "count": counts[i]} for i, term in enumerate(TERMS)}
    return {
        "step": step,
        "loss": distill + anchor_weight * anchor,
        **terms,
        "grad_norm": grad_norm,
        "lr": dict(rates),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 1),
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return numbers by path, for trackers: a term becomes its mean."""
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and set(value) == {"sum", "count"}:
            found[prefix + key] = value["sum"] / max(1, value["count"])
        elif isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and key != "step":
            found[prefix + key] = float(value)
    return found


def leaves(values: Mapping[str, Any], *, separator: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything in nested mappings by its path, as it is."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, separator=separator, prefix=f"{prefix}{key}{separator}")
        else:
            yield prefix + key, value


def read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # the last line of a killed run may be cut off
            continue
    return lines
