"""What the initialisation found: per projection and per gain, as JSON, a table and a plot."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from loha.svd import REPORT_RANKS, LowRankDelta, rounding_floor
from loha.weight_files import WeightFiles

JSON_NAME = "init_report.json"
PLOT_NAME = "init_report.png"
ROWS_AT_ONCE = 8192
UNRELATED = 1.0
"""Relative norm from which a delta says that the two models have nothing in common: matrices that were trained apart
differ by about sqrt(2) of their norm, an LCLM from its base by a small part of it."""


@dataclass(frozen=True, kw_only=True)
class ProjectionReport:
    """One projection's delta W_LCLM - W_0."""

    name: str
    shape: tuple[int, int]
    rank: int
    """Of the patch, after clipping to the smaller side."""
    delta_norm: float
    """Frobenius norm."""
    relative_norm: float
    """Delta norm over the base's norm."""
    energy: dict[int, float]
    """Share of the squared norm that the first n singular values hold."""
    energy_kept: float
    """Share that the patch holds."""
    sigma_1: float
    sigma_r: float
    rounding_floor: float
    """Largest singular value that the rounding of the stored LCLM weights alone explains."""
    above_floor: int
    """How many singular values exceed it."""

    @classmethod
    def of(cls, name: str, base: torch.Tensor, lclm: torch.Tensor, delta: LowRankDelta) -> ProjectionReport:
        """Describe a delta.

        Args:
            name: of the projection.
            base: W_0.
            lclm: W_LCLM, in its stored dtype.
            delta: their difference, truncated.
        """
        sigma, rank, floor = delta.singular_values, delta.A.shape[0], rounding_floor(lclm)
        return cls(
            name=name,
            shape=(base.shape[0], base.shape[1]),
            rank=rank,
            delta_norm=delta.norm,
            relative_norm=delta.norm / max(base.double().norm().item(), 1e-30),
            energy={n: delta.energy(n) for n in REPORT_RANKS if n <= len(sigma)},
            energy_kept=delta.energy(rank),
            sigma_1=sigma[0].item(),
            sigma_r=sigma[rank - 1].item(),
            rounding_floor=floor,
            above_floor=int((sigma > floor).sum()),
        )


@dataclass(frozen=True, kw_only=True)
class VectorReport:
    """How far the LCLM moved a gain vector or the embedding, which do not enter the patch."""

    name: str
    relative_change: float
    """Norm of the difference over the base's norm."""
    max_abs_change: float

    @classmethod
    def of(cls, name: str, base: WeightFiles, lclm: WeightFiles) -> VectorReport:
        """Describe the difference of a tensor over the rows that both have, a slice at a time: embeddings are large."""
        rows = min(base.shape(name)[0], lclm.shape(name)[0])
        parts, others = (weights.blocks(name, rows=ROWS_AT_ONCE, limit=rows) for weights in (base, lclm))
        changed, total, largest = 0.0, 0.0, 0.0
        for part, other in zip(parts, others, strict=True):
            difference = other.double() - part.double()
            changed += difference.square().sum().item()
            total += part.double().square().sum().item()
            largest = max(largest, difference.abs().max().item())
        return cls(
            name=name.removesuffix(".weight"),
            relative_change=math.sqrt(changed / max(total, 1e-30)),
            max_abs_change=largest,
        )


@dataclass(frozen=True, kw_only=True)
class InitReport:
    """The whole report."""

    projections: list[ProjectionReport]
    gains: list[VectorReport]
    embedding: VectorReport | None
    """Over the rows that both have. It stays the base's: the student's vocabulary is exactly the base's."""

    def to_json(self) -> bytes:
        """Return the JSON document."""
        return (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode()

    def warning(self) -> str | None:
        """Return what makes the LCLM doubtful: weights that have nothing in common with the base's; else None."""
        median = statistics.median(report.relative_norm for report in self.projections)
        if median < UNRELATED:
            return None
        return (
            f"warning: half of the LCLM decoder's projections differ from the base's by {median:.2f} times their norm "
            "or more, as those of another model do; the start is useless if the LCLM was not made from this base"
        )

    def table(self) -> str:
        """Return one line per kind of projection (means over layers), and the gains."""
        kinds: dict[str, list[ProjectionReport]] = defaultdict(list)
        for report in self.projections:
            kinds[report.name.rpartition(".")[2]].append(report)
        ranks = [n for n in REPORT_RANKS if all(n in r.energy for rs in kinds.values() for r in rs)]
        head = ["projection", "n", "|D|", "|D|/|W0|", "kept", *(f"E@{n}" for n in ranks)]
        head += ["s_1", "s_r", "floor", ">floor"]
        rows = [head] + [_row(kind, reports, ranks) for kind, reports in kinds.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
        if self.gains:
            worst = max(self.gains, key=lambda gain: gain.relative_change)
            mean = sum(gain.relative_change for gain in self.gains) / len(self.gains)
            most = f"most {worst.relative_change:.2%} ({worst.name})"
            lines.append(f"gains (start from the base's): mean change in the LCLM {mean:.2%}, {most}")
        if self.embedding:
            lines.append(f"embedding (stays the base's): change in the LCLM {self.embedding.relative_change:.2%}")
        return "\n".join(lines)

    def plot(self) -> bytes:
        """Return a PNG: energy kept by rank, and relative size of the delta by layer, per kind of projection."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
        kinds: dict[str, list[ProjectionReport]] = defaultdict(list)
        for report in self.projections:
            kinds[report.name.rpartition(".")[2]].append(report)
        for kind, reports in kinds.items():
            ranks = sorted(set.intersection(*(set(r.energy) for r in reports)))
            left.plot(ranks, [_mean([r.energy[n] for r in reports]) for n in ranks], marker="o", label=kind)
            middle.plot([r.relative_norm for r in reports], marker=".", label=kind)
        left.set(xscale="log", xlabel="rank", ylabel="share of |D|^2 kept", title="Energy kept (mean over layers)")
        middle.set(xlabel="layer", ylabel="|D| / |W0|", title="Size of the delta")
        _plot_gains(right, self.gains)
        left.legend(fontsize=8)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        plt.close(figure)
        return buffer.getvalue()


def _row(kind: str, reports: list[ProjectionReport], ranks: list[int]) -> list[str]:
    def mean(attribute: str) -> float:
        return _mean([getattr(report, attribute) for report in reports])

    energies = [f"{_mean([r.energy[n] for r in reports]):.3f}" for n in ranks]
    sizes = [f"{mean(a):.3g}" for a in ("sigma_1", "sigma_r", "rounding_floor")]
    start = [kind, str(len(reports)), f"{mean('delta_norm'):.3g}", f"{mean('relative_norm'):.4f}"]
    return [*start, f"{mean('energy_kept'):.3f}", *energies, *sizes, f"{mean('above_floor'):.0f}"]


def _plot_gains(axis: Any, gains: list[VectorReport]) -> None:
    kinds: dict[str, list[float]] = defaultdict(list)
    for gain in gains:
        kinds[gain.name.rpartition(".")[2]].append(gain.relative_change)
    for kind, changes in kinds.items():
        axis.plot(changes, marker=".", label=kind)
    axis.set(xlabel="layer", ylabel="relative change", title="Gains: LCLM against base")
    axis.legend(fontsize=8)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
