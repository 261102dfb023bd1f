"""Summaries of a sweep: accuracy with its spread over trajectories, and token counts, per arm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loha.layout import format_k
from serving.arm import Arm
from serving.cell import Cell

_HEAD = (
    *("view", "K", "P", "calls", "exact", "± se", "context/call", "full/call", "ratio", "latents/call"),
    *("encoder tok. once", "encoder tok. per call", "cached", "errors"),
)


@dataclass(frozen=True, kw_only=True)
class ArmSummary:
    """One row of the table."""

    view: str
    k: str
    polling: int
    trajectories: int
    calls: int
    """Answered calls."""
    errors: int
    """Refused calls; they enter no other figure."""
    exact: float
    """Mean over trajectories of the share of turns that equal the recorded turn."""
    exact_se: float
    """Standard error of that mean over trajectories; 0 with one trajectory."""
    content_equal: float
    calls_equal: float
    context_tokens_per_call: float
    full_text_tokens_per_call: float
    effective_ratio: float
    """Full-text tokens over context tokens, summed over calls."""
    latents_per_call: float
    encoder_tokens_once: float
    """Per trajectory: encoder tokens when each observation is encoded once, as this server does."""
    encoder_tokens_per_call: float
    """Per trajectory: encoder tokens when every call encodes anew, as the paper's server does."""
    cached_share: float | None
    """Share of the context that came from the prefix cache, where the server says so."""


def summarize(arms: Sequence[Arm], cells: Iterable[Cell]) -> list[ArmSummary]:
    """Return one row per arm that has cells, in the order of the arms."""
    by_arm: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_arm[cell.arm].append(cell)
    return [_summary(arm, by_arm[arm.name]) for arm in arms if by_arm[arm.name]]


def table(rows: Sequence[ArmSummary]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|" + "---|" * len(_HEAD)]
    for row in rows:
        cached = "" if row.cached_share is None else f"{row.cached_share:.1%}"
        values = (
            row.view,
            row.k,
            str(row.polling),
            str(row.calls),
            f"{row.exact:.1%}",
            f"{row.exact_se:.1%}",
            f"{row.context_tokens_per_call:,.0f}",
            f"{row.full_text_tokens_per_call:,.0f}",
            f"{row.effective_ratio:.2f}",
            f"{row.latents_per_call:,.0f}",
            f"{row.encoder_tokens_once:,.0f}",
            f"{row.encoder_tokens_per_call:,.0f}",
            cached,
            str(row.errors),
        )
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join(lines)


def _summary(arm: Arm, cells: Sequence[Cell]) -> ArmSummary:
    answered = [cell for cell in cells if cell.error is None]
    by_trajectory: dict[str, list[Cell]] = defaultdict(list)
    for cell in answered:
        by_trajectory[cell.trajectory].append(cell)
    groups = list(by_trajectory.values())
    rates = [_mean([cell.exact for cell in group]) for group in groups]
    context = sum(cell.context_tokens for cell in answered)
    cached = [cell.cached_tokens for cell in answered if cell.cached_tokens is not None]
    return ArmSummary(
        view=arm.view,
        k=format_k(arm.k),
        polling=arm.polling,
        trajectories=len(groups),
        calls=len(answered),
        errors=len(cells) - len(answered),
        exact=_mean(rates),
        exact_se=_standard_error(rates),
        content_equal=_mean([_mean([cell.content_equal for cell in group]) for group in groups]),
        calls_equal=_mean([_mean([cell.calls_equal for cell in group]) for group in groups]),
        context_tokens_per_call=_mean([cell.context_tokens for cell in answered]),
        full_text_tokens_per_call=_mean([cell.full_text_tokens for cell in answered]),
        effective_ratio=sum(cell.full_text_tokens for cell in answered) / max(1, context),
        latents_per_call=_mean([cell.latent_tokens for cell in answered]),
        # What is latent stays latent as a history grows, so its last call holds all that was ever encoded.
        encoder_tokens_once=_mean([max(cell.encoder_tokens for cell in group) for group in groups]),
        encoder_tokens_per_call=_mean([sum(cell.encoder_tokens for cell in group) for group in groups]),
        cached_share=sum(cached) / context if cached and context else None,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
