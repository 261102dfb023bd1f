"""The figure of a replay benchmark: throughput, latencies, and where the tokens of a run come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from loha.atomic import atomic_path
from serving.load_summary import ArmFigures, RoundFigures
from serving.replay import ReplayedRun


def plot_load(
    arms: Sequence[ArmFigures],
    rounds: Sequence[RoundFigures],
    runs: Sequence[ReplayedRun],
    path: Path,
    *,
    title: str = "",
) -> None:
    """Write the figure as PNG.

    Args:
        arms: one bar or curve each.
        rounds: dots on the bars of throughput.
        runs: whose calls make the curves.
        path: of the picture.
        title: above the figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    colours = [f"C{number}" for number in range(len(arms))]
    _throughput(panels[0][0], arms, rounds, colours)
    _tokens(panels[0][1], arms)
    calls = {arm.arm: [call for run in runs if run.arm == arm.arm for call in run.calls] for arm in arms}
    first = {name: [call.first_token_s for call in own] for name, own in calls.items()}
    gaps = {name: [1000 * s for call in own if (s := call.per_token_s)] for name, own in calls.items()}
    _curves(panels[1][0], first, colours, "time to first token (s)")
    _curves(panels[1][1], gaps, colours, "time per output token (ms)")
    figure.suptitle(title)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
    pyplot.close(figure)


def _throughput(axes: Any, arms: Sequence[ArmFigures], rounds: Sequence[RoundFigures], colours: Sequence[str]) -> None:
    at = range(len(arms))
    axes.bar(at, [arm.instances_per_hour or 0 for arm in arms], color=colours, alpha=0.6)
    for place, arm in zip(at, arms, strict=True):
        dots = [each.instances_per_hour for each in rounds if each.arm == arm.arm and each.instances_per_hour]
        axes.plot([place] * len(dots), dots, "k.", label="one round" if place == 0 else None)
    axes.set_xticks(at, [arm.arm for arm in arms], rotation=20)
    axes.set_ylabel("instances per hour")
    axes.legend()
    axes.grid(axis="y", alpha=0.3)


def _tokens(axes: Any, arms: Sequence[ArmFigures]) -> None:
    at = range(len(arms))
    parts = {
        "prefilled": [arm.prefill_tokens for arm in arms],
        "generated": [arm.columns.mean.output_tokens for arm in arms],
        "encoded": [arm.columns.mean.encoder_tokens for arm in arms],
    }
    below = np.zeros(len(arms))
    for (label, values), colour in zip(parts.items(), ("#1b6ca8", "#c8553d", "#8a8d91"), strict=True):
        axes.bar(at, values, bottom=below, label=label, color=colour)
        below += np.asarray(values)
    axes.set_xticks(at, [f"{arm.arm}\n{arm.columns.mean.cached_share:.0%} cached" for arm in arms], rotation=20)
    axes.set_ylabel("tokens computed per run")
    axes.legend()
    axes.grid(axis="y", alpha=0.3)


def _curves(axes: Any, values: dict[str, list[float]], colours: Sequence[str], label: str) -> None:
    for (name, found), colour in zip(values.items(), colours, strict=True):
        ordered = np.sort(found)
        axes.plot(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)), label=name, color=colour)
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("share of calls")
    axes.grid(alpha=0.3)
    axes.legend()
