"""From per-call records to the papers' columns, per trajectory and per arm. Pure Python.

A record is what the server reports on one answer (`usage` and its `loha` object); a trajectory is the calls of one
agent run; an arm is the runs under one setting.

Source of the columns: the LOHA paper, tables 1 and 2 (calls, in/call, dec in, cached, enc tok, ratio, dec PF, enc PF)
and its paragraph on cost accounting; the cost is `loha.retail_cost`. docs/accounting.md gives each definition.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from loha.errors import LohaError
from loha.flops import decoder_call_flops, encoder_flops
from loha.layout import format_k, parse_k
from loha.model_shape import ModelShape
from loha.retail_cost import PriceList

PETA = 1e15


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """Token counts of one model call."""

    full_text_tokens: int
    """Length of the same history as full text."""

    context_tokens: int
    """Positions that the decoder reads, latents and markers included."""

    latent_tokens: int = 0
    """Latents among them, markers not counted."""

    encoder_tokens_new: int = 0
    """Source tokens that were encoded for this call."""

    cached_tokens: int = 0
    """Leading positions that the prefix cache held."""

    output_tokens: int = 0
    k: int | None = None
    """None is inf."""

    polling: int = 1
    view: str = "full"
    trajectory: str = ""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 0:
                raise LohaError(f"call record of {self.trajectory or 'a trajectory'}: {name} is {getattr(self, name)}")
        if self.cached_tokens > self.context_tokens:
            raise LohaError(
                f"call record of {self.trajectory or 'a trajectory'}: {self.cached_tokens} cached tokens in a context "
                f"of {self.context_tokens}"
            )

    @property
    def arm(self) -> str:
        """Return the arm's name: `full`, or view, K and P."""
        full = self.view == "full" or self.k is None
        return "full" if full else f"{self.view}:k{format_k(self.k)}p{self.polling}"

    @classmethod
    def from_usage(cls, usage: Mapping[str, Any], *, trajectory: str = "") -> CallRecord:
        """Read the `usage` object of an answer; without a `loha` object in it, the prompt is all text.

        Args:
            usage: of a chat completion.
            trajectory: names the run that the call belongs to.

        Raises:
            LohaError: when the prompt tokens are missing.
        """
        loha = usage.get("loha") or {}
        context = loha.get("context_tokens", usage.get("prompt_tokens"))
        if context is None:
            raise LohaError(f"usage of {trajectory or 'an answer'} has neither loha.context_tokens nor prompt_tokens")
        details = usage.get("prompt_tokens_details") or {}
        cached = loha.get("cached_tokens", details.get("cached_tokens"))
        return cls(
            full_text_tokens=loha.get("full_text_tokens", context),
            context_tokens=context,
            latent_tokens=loha.get("latent_tokens", 0),
            encoder_tokens_new=loha.get("encoder_tokens_new", 0),
            cached_tokens=cached or 0,
            output_tokens=usage.get("completion_tokens") or 0,
            k=parse_k(loha.get("k")),
            polling=loha.get("polling", 1),
            view=loha.get("view", "full"),
            trajectory=trajectory,
        )


_COUNTS = tuple(f.name for f in fields(CallRecord) if f.name.endswith("_tokens") or f.name == "encoder_tokens_new")


@dataclass(frozen=True, kw_only=True)
class Models:
    """What turns tokens into operations."""

    decoder: ModelShape
    encoder: ModelShape | None = None
    """None where nothing is encoded."""

    encoder_window: int = 1024


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The papers' columns of one trajectory, or the mean trajectory of an arm."""

    calls: float
    in_per_call: float
    """Context tokens of a call: `decoder_input / calls`, so longer runs weigh more."""

    decoder_input: float
    """Context tokens summed over the calls of a trajectory."""

    cached_share: float
    """Of the decoder input, from the prefix cache."""

    encoder_tokens: float
    """Source tokens encoded per trajectory; a server that encodes again on every call reports them again."""

    ratio: float
    """Representation (effective) ratio: the agent's own histories as full text over what the decoder read."""

    output_tokens: float
    decoder_pflops: float | None = None
    encoder_pflops: float | None = None
    """With attention inside the windows."""

    encoder_pflops_linear: float | None = None
    """Without it: the paper's figure."""

    def to_json(self) -> dict[str, float | None]:
        """Return the columns as plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ArmColumns:
    """One row of the table."""

    arm: str
    trajectories: int
    mean: Columns
    spread: Columns
    """Standard deviation over trajectories of each column; 0 with one trajectory."""

    retail_usd: float | None = None
    """Estimated optimized retail cost of the mean trajectory, with the caching that took place."""

    retail_uncached_usd: float | None = None
    """The same tokens when no input is cached."""

    price_limit: int | None = None
    """W of the two costs above."""

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return asdict(self)


def arm_columns(
    trajectories: Sequence[Sequence[CallRecord]],
    *,
    arm: str | None = None,
    models: Models | None = None,
    prices: PriceList | None = None,
    limit: int | None = None,
) -> ArmColumns:
    """Return the row of one arm.

    Totals are divided by the number of trajectories; in/call, the cached share and the ratio are quotients of totals.

    Args:
        trajectories: the calls of each run.
        arm: its name; that of the first call by default.
        models: for the operations.
        prices: for the cost.
        limit: W, the total context limit that the arm ran under. The longest context with its output by default:
            the smallest limit under which the same runs fit.

    Raises:
        LohaError: when there are no calls.
    """
    calls = [call for trajectory in trajectories for call in trajectory]
    if not calls:
        raise LohaError("an arm without calls has no columns")
    runs = [trajectory for trajectory in trajectories if trajectory]
    mean = _columns(calls, len(runs), models)
    row = ArmColumns(
        arm=arm or calls[0].arm,
        trajectories=len(runs),
        mean=mean,
        spread=_spread([_columns(run, 1, models) for run in runs]),
    )
    if prices is None:
        return row
    limit = limit or max(call.context_tokens + call.output_tokens for call in calls)
    read, cached, output = mean.decoder_input, mean.decoder_input * mean.cached_share, mean.output_tokens
    return replace(
        row,
        retail_usd=prices.cost(uncached=read - cached, cached=cached, output=output, limit=limit),
        retail_uncached_usd=prices.cost(uncached=read, cached=0, output=output, limit=limit),
        price_limit=limit,
    )


def group_calls(records: Iterable[CallRecord]) -> dict[str, list[list[CallRecord]]]:
    """Return arm -> the calls of each of its trajectories, both in order of first appearance."""
    arms: dict[str, dict[str, list[CallRecord]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        arms[record.arm][record.trajectory].append(record)
    return {arm: list(runs.values()) for arm, runs in arms.items()}


def columns_table(rows: Sequence[ArmColumns]) -> str:
    """Return the rows as a Markdown table in the papers' order and units."""
    head = ["arm", "n", *(name for name, _ in _SHOWN), "cost $", "cost $ no cache"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        costs = ["" if usd is None else f"{usd:.3f}" for usd in (row.retail_usd, row.retail_uncached_usd)]
        shown = [show(row.mean) for _, show in _SHOWN]
        lines.append("| " + " | ".join([row.arm, str(row.trajectories), *shown, *costs]) + " |")
    return "\n".join(lines)


def short_count(value: float) -> str:
    """Return a token count as the papers print it: 820, 43.6K, 1.65M."""
    if value >= 999_500:
        return f"{value / 1e6:.2f}M"
    return f"{value / 1e3:.1f}K" if value >= 1000 else f"{value:.0f}"


def _petaflops(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


_SHOWN: tuple[tuple[str, Callable[[Columns], str]], ...] = (
    ("calls", lambda c: f"{c.calls:.1f}"),
    ("in/call", lambda c: short_count(c.in_per_call)),
    ("dec in", lambda c: short_count(c.decoder_input)),
    ("cached", lambda c: f"{c.cached_share:.1%}"),
    ("enc tok", lambda c: short_count(c.encoder_tokens)),
    ("ratio", lambda c: f"{c.ratio:.2f}x"),
    ("dec PF", lambda c: _petaflops(c.decoder_pflops)),
    ("enc PF", lambda c: _petaflops(c.encoder_pflops)),
)


def _columns(calls: Sequence[CallRecord], trajectories: int, models: Models | None) -> Columns:
    if not calls:
        raise LohaError("a trajectory without calls has no columns")
    read = sum(call.context_tokens for call in calls)
    encoded = sum(call.encoder_tokens_new for call in calls)
    operations: dict[str, float] = {}
    if models is not None:
        decoder = sum(_call_flops(call, models.decoder) for call in calls)
        operations["decoder_pflops"] = decoder / trajectories / PETA
    if models is not None and models.encoder is not None:
        for name, attention in (("encoder_pflops", True), ("encoder_pflops_linear", False)):
            flops = sum(
                encoder_flops(
                    models.encoder, call.encoder_tokens_new, window=models.encoder_window, attention=attention
                )
                for call in calls
            )
            operations[name] = flops / trajectories / PETA
    return Columns(
        calls=len(calls) / trajectories,
        in_per_call=read / len(calls),
        decoder_input=read / trajectories,
        cached_share=sum(call.cached_tokens for call in calls) / read if read else 0.0,
        encoder_tokens=encoded / trajectories,
        ratio=sum(call.full_text_tokens for call in calls) / read if read else 1.0,
        output_tokens=sum(call.output_tokens for call in calls) / trajectories,
        **operations,
    )


def _call_flops(call: CallRecord, decoder: ModelShape) -> int:
    return decoder_call_flops(
        decoder, context=call.context_tokens, cached=call.cached_tokens, output=call.output_tokens
    )


def _spread(each: Sequence[Columns]) -> Columns:
    return Columns(**{f.name: _deviation([getattr(columns, f.name) for columns in each]) for f in fields(Columns)})


def _deviation(values: Sequence[float | None]) -> Any:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if len(known) < 2:
        return 0.0
    mean = sum(known) / len(known)
    return math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))
