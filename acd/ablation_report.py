"""The results of a grid of training runs: JSON lines, a table with mean and spread over seeds, and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loha.atomic import atomic_path

Result = Mapping[str, Any]


def write_report(results: Sequence[Result], folder: Path) -> None:
    """Write results.jsonl, results.md and results.png."""
    with atomic_path(folder / "results.jsonl") as temporary:
        temporary.write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    with atomic_path(folder / "results.md") as temporary:
        temporary.write_text(table(results), encoding="utf-8")
    with atomic_path(folder / "results.png") as temporary:
        plot(results, temporary)


def table(results: Sequence[Result]) -> str:
    """Return a Markdown table, one row per arm: exact turns at each K, drift, and read-back answers.

    Spread is the sample standard deviation over seeds; an arm with one seed has none.
    """
    if not results:
        return "no cell is done yet\n"
    ks = list(results[0]["k"])
    head = ["arm", "seeds", *(f"exact turns K={k}" for k in ks), "drift, nats", "exact read-back", "read-back, nats"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for arm, group in by_arm(results).items():
        cells = [percent(group, lambda r, k=k: r["k"][k]["exact_turns"]) for k in ks]  # type: ignore[misc]
        drift = number(group, lambda r: r.get("drift"))
        answers = percent(group, lambda r: r.get("read_back", {}).get("exact"))
        nats = number(group, lambda r: r.get("read_back", {}).get("nll"))
        lines.append("| " + " | ".join([arm, str(len(group)), *cells, drift, answers, nats]) + " |")
    return "\n".join(lines) + "\n"


def by_arm(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results of each arm, in order of appearance."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result["arm"], []).append(result)
    return groups


def spread(group: Sequence[Result], pick: Callable[[Result], float | None]) -> tuple[float, float | None] | None:
    """Return mean and sample standard deviation of a figure; None where no result has it."""
    values = [value for result in group if (value := pick(result)) is not None]
    if not values:
        return None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def percent(group: Sequence[Result], pick: Callable[[Result], float | None]) -> str:
    """Return `mean ± spread %`."""
    found = spread(group, pick)
    if found is None:
        return ""
    mean, deviation = found
    return f"{100 * mean:.1f}" + ("" if deviation is None else f" ± {100 * deviation:.1f}") + " %"


def number(group: Sequence[Result], pick: Callable[[Result], float | None]) -> str:
    """Return `mean ± spread`."""
    found = spread(group, pick)
    if found is None:
        return ""
    mean, deviation = found
    return f"{mean:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}")


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw exact turns over K, one line per trained arm, and the drift of each, with spread over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = {arm: group for arm, group in by_arm(results).items() if group[0]["seed"] is not None}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), width_ratios=[3, 2], layout="constrained")
    for number_of_arm, (arm, group) in enumerate(groups.items()):
        ks = list(group[0]["k"])
        points = [spread(group, lambda r, k=k: r["k"][k]["exact_turns"]) for k in ks]  # type: ignore[misc]
        at = [i + 0.03 * (number_of_arm - len(groups) / 2) for i in range(len(ks))]
        means = [100 * point[0] for point in points if point]
        errors = [100 * (point[1] or 0) for point in points if point]
        left.errorbar(at, means, errors, label=arm, capsize=2, marker="o", markersize=3, linewidth=1)
        left.set_xticks(range(len(ks)), ks)
        drift = spread(group, lambda r: r.get("drift"))
        if drift:
            right.barh(arm, drift[0], xerr=drift[1] or 0, capsize=2)
    left.set(xlabel="K", ylabel="turns predicted exactly, %")
    right.set(xlabel="drift on full text, nats per token")
    right.invert_yaxis()
    if groups:
        left.legend(fontsize=8)
    figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)
