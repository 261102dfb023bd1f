"""The figure of a sweep: accuracy and context length over K, one curve per view."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loha.atomic import atomic_path
from serving.summary import ArmSummary

_COLOURS = {"latent": "#1b6ca8", "mask": "#c8553d"}
_LABELS = {"latent": "latents", "mask": "masking", "full": "full text"}


def plot_sweep(rows: Sequence[ArmSummary], path: Path, *, title: str = "") -> None:
    """Write the figure as PNG.

    Full text (K=inf) is the right end of every curve.

    Args:
        rows: of the sweep.
        path: of the picture.
        title: above the figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ks = sorted({row.k for row in rows}, key=_order)
    figure, (accuracy, context) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for view, polling in sorted({(row.view, row.polling) for row in rows if row.view != "full"}):
        points = [row for row in rows if row.view == "full" or (row.view, row.polling) == (view, polling)]
        points.sort(key=lambda row: _order(row.k))
        style: dict[str, Any] = {
            "label": f"{_LABELS[view]}, P={polling}",
            "color": _COLOURS[view],
            "linestyle": "-" if polling == min(row.polling for row in rows if row.view == view) else "--",
            "marker": "o",
        }
        at = [ks.index(row.k) for row in points]
        errors = [100 * row.exact_se for row in points]
        accuracy.errorbar(at, [100 * row.exact for row in points], yerr=errors, capsize=3, **style)
        context.plot(at, [row.context_tokens_per_call for row in points], **style)
    for row in (row for row in rows if row.view == "full"):
        accuracy.axhline(100 * row.exact, color="grey", linewidth=0.8, linestyle=":", label="full text")
        context.axhline(row.context_tokens_per_call, color="grey", linewidth=0.8, linestyle=":", label="full text")
    for axes, label in ((accuracy, "turns equal to the recorded turn (%)"), (context, "context tokens per call")):
        axes.set_xticks(range(len(ks)), ["∞" if k == "inf" else k for k in ks])
        axes.set_xlabel("K: newest observations kept as text")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
    pyplot.close(figure)


def _order(k: str) -> float:
    return float(k)
