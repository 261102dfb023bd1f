"""Summaries of a replay benchmark: throughput, latency and work per arm, and ratios between arms with their spread."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loha.accounting import ArmColumns, CallRecord, Models, arm_columns
from loha.retail_cost import PriceList
from serving.load_arm import STOCK
from serving.replay import ReplayedRun

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One uninterrupted stretch of load of one arm."""

    arm: str
    round: int
    seconds: float
    """From the first request to the last token."""
    runs: int
    """Finished in it."""
    whole: bool
    """All runs of the round are in it: only then its throughput counts."""
    counters: dict[str, float]
    """How far the engine's counters rose."""


@dataclass(frozen=True, kw_only=True)
class RoundFigures:
    """One arm in one round."""

    arm: str
    round: int
    runs: int
    instances_per_hour: float | None
    """None when the round was interrupted and went on later."""
    in_flight: float | None
    """Mean number of runs at a time: below the concurrency when the last runs of a round finish alone."""
    first_token_s: float
    """Median over calls."""
    per_token_s: float
    """Median over calls of the mean time between tokens."""
    context_tokens: float
    """Per run, summed over calls."""
    prefill_tokens: float
    """Per run: context tokens that the prefix cache did not hold."""
    decode_tokens: float
    encoder_tokens: float
    """Per run, as the engine counted; as the answers report where it does not say."""


@dataclass(frozen=True, kw_only=True)
class ArmFigures:
    """One arm over all rounds."""

    arm: str
    rounds: int
    runs: int
    calls: int
    instances_per_hour: float | None
    """Mean over rounds."""
    instances_per_hour_range: tuple[float, float] | None
    in_flight: float | None
    first_token_s: dict[str, float]
    """Percentiles over calls."""
    per_token_s: dict[str, float]
    columns: ArmColumns
    prefill_tokens: float
    """Per run: context tokens that the prefix cache did not hold."""
    encoder_tokens_engine: float | None
    """Per run, as the engine counted."""
    encoder_runs_per_observation: float | None
    """Encoder tokens that the engine ran over those of the distinct observations that became latent; 1 is once each."""
    engine: dict[str, float]
    """The engine's counters, per run."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A figure of one arm over that of another, compared round by round."""

    arm: str
    over: str
    figure: str
    mean: float
    """Geometric mean over rounds."""
    low: float
    high: float
    rounds: int


COMPARED: tuple[str, ...] = (
    "instances_per_hour",
    "first_token_s",
    "per_token_s",
    "context_tokens",
    "prefill_tokens",
)


def summarize_rounds(runs: Iterable[ReplayedRun], slices: Iterable[Slice]) -> list[RoundFigures]:
    """Return the figures of each arm in each round, by round and then arm."""
    by_round: dict[tuple[int, str], list[ReplayedRun]] = defaultdict(list)
    for run in runs:
        by_round[run.round, run.arm].append(run)
    stretches: dict[tuple[int, str], list[Slice]] = defaultdict(list)
    for stretch in slices:
        stretches[stretch.round, stretch.arm].append(stretch)
    return [_round(key, by_round[key], stretches[key]) for key in sorted(by_round)]


def summarize_arms(
    names: Sequence[str],
    runs: Sequence[ReplayedRun],
    slices: Sequence[Slice],
    *,
    models: Models | None = None,
    prices: PriceList | None = None,
) -> list[ArmFigures]:
    """Return the figures of each arm that has finished runs, in the order of the names."""
    rounds = summarize_rounds(runs, slices)
    figures = []
    for name in names:
        own = [run for run in runs if run.arm == name]
        if own:
            own_rounds = [each for each in rounds if each.arm == name]
            own_slices = [stretch for stretch in slices if stretch.arm == name]
            figures.append(_arm(name, own, own_rounds, own_slices, models, prices))
    return figures


def ratios(rounds: Sequence[RoundFigures], reference: str) -> list[Ratio]:
    """Return each arm's figures over those of the reference arm in the same round.

    The stock arm is only compared with full text, as what that is measured against: `full` over `stock`.

    Args:
        rounds: of all arms.
        reference: name of the arm that the others are compared with.
    """
    names = list(dict.fromkeys(each.arm for each in rounds))
    pairs = [(name, reference) for name in names if name not in (reference, STOCK) and reference in names]
    if STOCK in names and "full" in names:
        pairs.append(("full", STOCK))
    found = [_ratio(rounds, arm, over, figure) for arm, over in pairs for figure in COMPARED]
    return [ratio for ratio in found if ratio is not None]


def records(runs: Iterable[ReplayedRun]) -> list[list[CallRecord]]:
    """Return the accounting records of runs."""
    return [
        [CallRecord.from_usage(call.usage, trajectory=f"{run.trajectory}#{run.round}.{run.copy}") for call in run.calls]
        for run in runs
    ]


def _round(key: tuple[int, str], runs: Sequence[ReplayedRun], stretches: Sequence[Slice]) -> RoundFigures:
    whole = next((stretch for stretch in stretches if stretch.whole), None)
    calls = [record for run in records(runs) for record in run]
    engine = _engine(stretches)
    per_run = len(runs)
    reported = sum(call.encoder_tokens_new for call in calls) / per_run
    return RoundFigures(
        arm=key[1],
        round=key[0],
        runs=len(runs),
        instances_per_hour=3600 * whole.runs / whole.seconds if whole else None,
        in_flight=sum(run.seconds for run in runs) / whole.seconds if whole else None,
        first_token_s=float(np.median([call.first_token_s for run in runs for call in run.calls])),
        per_token_s=_median(call.per_token_s for run in runs for call in run.calls),
        context_tokens=sum(call.context_tokens for call in calls) / per_run,
        prefill_tokens=sum(call.context_tokens - call.cached_tokens for call in calls) / per_run,
        decode_tokens=sum(call.output_tokens for call in calls) / per_run,
        encoder_tokens=engine.get("encoder_tokens", reported),
    )


def _arm(
    name: str,
    runs: Sequence[ReplayedRun],
    rounds: Sequence[RoundFigures],
    slices: Sequence[Slice],
    models: Models | None,
    prices: PriceList | None,
) -> ArmFigures:
    calls = [call for run in runs for call in run.calls]
    columns = arm_columns(records(runs), arm=name, models=models, prices=prices)
    throughput = [each.instances_per_hour for each in rounds if each.instances_per_hour is not None]
    in_flight = [each.in_flight for each in rounds if each.in_flight is not None]
    engine = _engine(slices)
    return ArmFigures(
        arm=name,
        rounds=len(rounds),
        runs=len(runs),
        calls=len(calls),
        instances_per_hour=float(np.mean(throughput)) if throughput else None,
        instances_per_hour_range=(min(throughput), max(throughput)) if throughput else None,
        in_flight=float(np.mean(in_flight)) if in_flight else None,
        first_token_s=_percentiles([call.first_token_s for call in calls]),
        per_token_s=_percentiles([call.per_token_s for call in calls]),
        columns=columns,
        prefill_tokens=columns.mean.decoder_input * (1 - columns.mean.cached_share),
        encoder_tokens_engine=engine.get("encoder_tokens"),
        encoder_runs_per_observation=_encoder_runs(runs, slices),
        engine=engine,
    )


def _encoder_runs(runs: Sequence[ReplayedRun], slices: Sequence[Slice]) -> float | None:
    """Return the encoder tokens that the engine ran over those of distinct latent observations, in whole slices."""
    whole = {stretch.round: stretch for stretch in slices if stretch.whole}
    distinct = sum(
        record.encoder_tokens_new for run in records(run for run in runs if run.round in whole) for record in run
    )
    if not distinct or not all("encoder_tokens" in stretch.counters for stretch in whole.values()):
        return None
    return sum(stretch.counters["encoder_tokens"] for stretch in whole.values()) / distinct


def _engine(slices: Sequence[Slice]) -> dict[str, float]:
    """Return the counters per run, from whole slices: the others hold work of runs that did not finish."""
    whole = [stretch for stretch in slices if stretch.whole]
    names = set.intersection(*(set(stretch.counters) for stretch in whole)) if whole else set()
    runs = sum(stretch.runs for stretch in whole)
    return {name: sum(stretch.counters[name] for stretch in whole) / runs for name in sorted(names)}


def _ratio(rounds: Sequence[RoundFigures], arm: str, over: str, figure: str) -> Ratio | None:
    values: dict[tuple[str, int], Any] = {(each.arm, each.round): getattr(each, figure) for each in rounds}
    both = [(value, values.get((over, number))) for (name, number), value in values.items() if name == arm]
    quotients = [above / below for above, below in both if above and below]
    if not quotients:
        return None
    mean = math.exp(sum(map(math.log, quotients)) / len(quotients))
    return Ratio(
        arm=arm, over=over, figure=figure, mean=mean, low=min(quotients), high=max(quotients), rounds=len(quotients)
    )


def _percentiles(values: Iterable[float | None]) -> dict[str, float]:
    known = [value for value in values if value is not None]
    if not known:
        return {f"p{p}": 0.0 for p in PERCENTILES}
    return {f"p{p}": float(np.percentile(known, p)) for p in PERCENTILES}


def _median(values: Iterable[float | None]) -> float:
    return _percentiles(values)["p50"]


def load_table(arms: Sequence[ArmFigures]) -> str:
    """Return throughput, latency and work as a Markdown table."""
    head = [name for name, _ in _SHOWN]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(show(arm) for _, show in _SHOWN) + " |" for arm in arms]
    return "\n".join(lines)


def ratio_table(found: Sequence[Ratio]) -> str:
    """Return the ratios as a Markdown table, one row per pair of arms; in brackets the range over rounds."""
    by_pair: dict[tuple[str, str], Mapping[str, Ratio]] = defaultdict(dict)
    for ratio in found:
        by_pair[ratio.arm, ratio.over] = {**by_pair[ratio.arm, ratio.over], ratio.figure: ratio}
    lines = ["| arm / reference | " + " | ".join(COMPARED) + " |", "|" + "---|" * (len(COMPARED) + 1)]
    for (arm, over), row in by_pair.items():
        cells = [_range(row[figure]) if figure in row else "" for figure in COMPARED]
        lines.append(f"| {arm} / {over} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _range(ratio: Ratio) -> str:
    return f"{ratio.mean:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _throughput(arm: ArmFigures) -> str:
    if arm.instances_per_hour is None or arm.instances_per_hour_range is None:
        return "interrupted"
    low, high = arm.instances_per_hour_range
    return f"{arm.instances_per_hour:.1f} [{low:.1f}, {high:.1f}]"


def _seconds(values: Mapping[str, float], unit: float = 1.0, digits: int = 2) -> str:
    return " / ".join(f"{values[f'p{p}'] * unit:.{digits}f}" for p in PERCENTILES)


_SHOWN: tuple[tuple[str, Callable[[ArmFigures], str]], ...] = (
    ("arm", lambda a: a.arm),
    ("runs", lambda a: str(a.runs)),
    ("calls", lambda a: str(a.calls)),
    ("instances/h", _throughput),
    ("in flight", lambda a: "" if a.in_flight is None else f"{a.in_flight:.1f}"),
    ("TTFT s p50/p90/p99", lambda a: _seconds(a.first_token_s)),
    ("ms/token p50/p90/p99", lambda a: _seconds(a.per_token_s, 1000, 1)),
    ("prefill/run", lambda a: f"{a.prefill_tokens:,.0f}"),
    ("decode/run", lambda a: f"{a.columns.mean.output_tokens:,.0f}"),
    ("cached", lambda a: f"{a.columns.mean.cached_share:.1%}"),
    ("encoder/run", lambda a: f"{a.columns.mean.encoder_tokens:,.0f}"),
    (
        "encoded/distinct",
        lambda a: "" if a.encoder_runs_per_observation is None else f"{a.encoder_runs_per_observation:.3f}",
    ),
    ("preempted", lambda a: f"{a.engine['preemptions']:.2f}" if "preemptions" in a.engine else ""),
)
