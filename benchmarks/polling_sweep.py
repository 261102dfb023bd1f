"""K and P over recorded trajectories: context, prefill, prefix reuse and encoder work, from the renderer alone.

    loha data import FOLDER --out runs.jsonl
    python benchmarks/polling_sweep.py runs.jsonl --tokenizer TOKENIZER_DIR

No server and no model. Every call of every run is rendered as the server would render it; two consecutive contexts
share what their leading positions have in common (latents by content), in whole cache blocks; the rest is prefilled.
The default P is the one that prefills least at --choose-k among those that keep the mean context within
--max-context of P=1 and the prefill within --max-prefill of P=1; the ranges in brackets leave out one trajectory at a
time. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import transformers
from tyro.conf import Positional

from loha.accounting import Models, arm_columns, short_count
from loha.atomic import atomic_path
from loha.cli import run_main
from loha.console import out
from loha.errors import LohaError
from loha.layout import LAYOUT_VERSION, format_k, parse_k, parse_polling
from loha.model_shape import read_shape
from loha.progress import progress_bar
from loha.render import Renderer
from loha.rendering import LatentSettings
from loha.tokenizer_dir import load_tokenizer
from loha.trajectory import Trajectory, read_trajectories
from serving.arm import Arm, grid
from serving.context_replay import ReplayedCall, replay_trajectory


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to sweep."""

    trajectories: Positional[Path]
    """Canonical JSONL (`loha data import`)."""

    tokenizer: Path
    """Folder with the base's tokenizer.json and chat template."""

    encoder_tokenizer: Path | None = None
    """The encoder's; the base's when left out."""

    k: tuple[str, ...] = ("0", "1", "2", "3", "4", "8", "inf")
    """Values of K."""

    polling: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
    """Values of P; 1 is always added, as what the others are compared with."""

    ratio: int = 16
    """Encoder tokens per latent."""

    encoder_window: int = 1024
    """Encoder tokens per window."""

    block_size: int = 16
    """Tokens per prefix-cache block of the engine: 16 on GPUs, 32 in vLLM's CPU build."""

    reuse_output: bool = False
    """Count the keys and values of generated tokens as reused. A replay of recorded turns cannot; an agent can, where
    the template renders a turn back to the tokens that were generated."""

    limit: int | None = None
    """Use only the first N trajectories."""

    decoder: str = "qwen3-4b"
    """Shape for the PFLOP columns: a known name, a folder, or a config.json."""

    encoder: str = "qwen3-embedding-0.6b"
    """The same for the encoder."""

    choose_k: str = "3"
    """K at which the default P is chosen."""

    max_prefill: float = 0.60
    """Most prefilled tokens that the default P may have, as a share of P=1."""

    max_context: float = 1.15
    """Largest mean context that it may have, as a share of P=1."""

    out: Path | None = None
    """Also write the JSON object to this file."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell of the grid: means over trajectories, quotients of totals."""

    k: str
    polling: int
    calls: float
    context_per_call: float
    longest_context: int
    prefilled: float
    """Tokens per trajectory that no cache held."""
    prefix_reuse: float
    moves: float
    """Calls per trajectory whose context departs from the one before."""
    ratio: float
    """Full-text tokens over context tokens."""
    encoder_once: float
    """Encoder tokens per trajectory, each distinct observation once."""
    encoder_every_call: float
    """The same when every call encodes all its latents anew, as the paper's server does."""
    decoder_pflops: float | None
    encoder_once_pflops: float | None
    encoder_every_call_pflops: float | None
    """Without attention, as the paper counts the encoder."""
    context_share: float = 1.0
    """Mean context over that of P=1 at this K."""
    context_share_range: tuple[float, float] = (1.0, 1.0)
    """The same with one trajectory left out: smallest and largest."""
    prefill_share: float = 1.0
    """Prefilled tokens over those of P=1 at this K."""
    prefill_share_range: tuple[float, float] = (1.0, 1.0)


Runs = list[list[ReplayedCall]]
"""The calls of each trajectory under one arm."""


def main(options: Options) -> int:
    """Sweep K and P over recorded trajectories with the renderer alone and choose the default P."""
    renderer = Renderer(
        load_tokenizer(options.tokenizer),
        encoder_tokenizer=load_tokenizer(options.encoder_tokenizer) if options.encoder_tokenizer else None,
        settings=LatentSettings(ratio=options.ratio, window=options.encoder_window),
    )
    trajectories = list(islice(read_trajectories(options.trajectories), options.limit))
    models = Models(
        decoder=read_shape(options.decoder), encoder=read_shape(options.encoder), encoder_window=options.encoder_window
    )
    choose_k = parse_k(options.choose_k)
    ks = list(dict.fromkeys([*map(parse_k, options.k), choose_k]))
    arms = grid(["latent"], ks, sorted({1, *map(parse_polling, options.polling)}))
    rows = rows_of(arms, _replay(renderer, trajectories, arms, options), models)
    chosen = choose(rows, format_k(choose_k), options.max_prefill, options.max_context)
    out(table(rows))
    out(_verdict(chosen, options))
    result = _settings(options, trajectories, renderer)
    result |= {"chosen": None if chosen is None else asdict(chosen), "rows": [asdict(row) for row in rows]}
    if options.out is not None:
        with atomic_path(options.out) as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out(json.dumps(result))
    return 0 if chosen else 1


def rows_of(arms: Sequence[Arm], runs: Sequence[Runs], models: Models | None = None) -> list[Row]:
    """Return one row per arm, each compared with P=1 at its K, ordered by K and P.

    Args:
        arms: the grid, P=1 included for each K.
        runs: the calls under each arm.
        models: for the operations.
    """
    base = {arm.k: calls for arm, calls in zip(arms, runs, strict=True) if arm.polling == 1}
    rows = [_compared(_row(arm, calls, models), calls, base[arm.k]) for arm, calls in zip(arms, runs, strict=True)]
    return sorted(rows, key=lambda row: (float(row.k), row.polling))


def choose(rows: Sequence[Row], k: str, max_prefill: float, max_context: float) -> Row | None:
    """Return the row at this K that prefills least within both limits, or None.

    Args:
        rows: with their shares.
        k: as `format_k` writes it.
        max_prefill: largest share of the prefilled tokens of P=1.
        max_context: largest share of the mean context of P=1.
    """
    fit = [row for row in rows if row.k == k and row.prefill_share <= max_prefill and row.context_share <= max_context]
    return min(fit, key=lambda row: row.prefilled, default=None)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    head: tuple[str, ...] = (
        "K",
        "P",
        "context/call",
        "of P=1",
        "longest",
        "prefilled",
        "of P=1",
        "prefix reuse",
        "moves",
    )
    head += ("ratio", "enc tok once", "every call", "dec PF", "enc PF once", "every call")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        values = (
            row.k,
            str(row.polling),
            short_count(row.context_per_call),
            _share(row.context_share, row.context_share_range),
            short_count(row.longest_context),
            short_count(row.prefilled),
            _share(row.prefill_share, row.prefill_share_range),
            f"{row.prefix_reuse:.1%}",
            f"{row.moves:.1f}",
            f"{row.ratio:.2f}x",
            short_count(row.encoder_once),
            short_count(row.encoder_every_call),
            *map(_petaflops, (row.decoder_pflops, row.encoder_once_pflops, row.encoder_every_call_pflops)),
        )
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join(lines)


def _row(arm: Arm, runs: Runs, models: Models | None) -> Row:
    columns = arm_columns([[call.record for call in run] for run in runs], arm=arm.name, models=models).mean
    calls = [call for run in runs for call in run]
    every_call = sum(call.encoder_tokens for call in calls) / len(runs)
    linear = columns.encoder_pflops_linear
    return Row(
        k=format_k(arm.k),
        polling=arm.polling,
        calls=columns.calls,
        context_per_call=columns.in_per_call,
        longest_context=max(call.record.context_tokens for call in calls),
        prefilled=columns.decoder_input * (1 - columns.cached_share),
        prefix_reuse=columns.cached_share,
        moves=sum(call.rewritten_from is not None for call in calls) / len(runs),
        ratio=columns.ratio,
        encoder_once=columns.encoder_tokens,
        encoder_every_call=every_call,
        decoder_pflops=columns.decoder_pflops,
        encoder_once_pflops=linear,
        encoder_every_call_pflops=linear * every_call / columns.encoder_tokens if linear else linear,
    )


def _compared(row: Row, runs: Runs, base: Runs) -> Row:
    """Return the row with context and prefill as shares of P=1."""
    pairs = list(zip(runs, base, strict=True))
    both = (
        [(_total(run, "context_tokens"), _total(reference, "context_tokens")) for run, reference in pairs],
        [(_prefilled(run), _prefilled(reference)) for run, reference in pairs],
    )
    (context, context_range), (prefill, prefill_range) = map(_quotient, both)
    return replace(
        row,
        context_share=context,
        context_share_range=context_range,
        prefill_share=prefill,
        prefill_share_range=prefill_range,
    )


def _quotient(pairs: Sequence[tuple[int, int]]) -> tuple[float, tuple[float, float]]:
    """Return the quotient of the totals, and its range when one pair is left out."""
    above, below = (sum(side) for side in zip(*pairs, strict=True))
    without = [(above - a) / (below - b) for a, b in pairs if below > b] or [above / below]
    return above / below, (min(without), max(without))


def _total(run: Sequence[ReplayedCall], name: str) -> int:
    return sum(getattr(call.record, name) for call in run)


def _prefilled(run: Sequence[ReplayedCall]) -> int:
    return _total(run, "context_tokens") - _total(run, "cached_tokens")


def _replay(
    renderer: Renderer, trajectories: Sequence[Trajectory], arms: Sequence[Arm], options: Options
) -> list[Runs]:
    runs: list[Runs] = [[] for _ in arms]
    with progress_bar("polling sweep", total=sum(t.assistant_turns for t in trajectories), unit="call") as bar:
        for trajectory in trajectories:
            try:
                found = replay_trajectory(
                    renderer, trajectory, arms, block_size=options.block_size, reuse_output=options.reuse_output
                )
            except LohaError as error:
                raise LohaError(f"{options.trajectories}: trajectory {trajectory.id}: {error}") from error
            for calls, run in zip(runs, found, strict=True):
                if run:
                    calls.append(run)
            bar.update(trajectory.assistant_turns)
    if not runs[0]:
        raise LohaError(
            f"{options.trajectories}: no assistant turn has a history before it, so there is nothing to replay"
        )
    return runs


def _settings(options: Options, trajectories: Sequence[Trajectory], renderer: Renderer) -> dict[str, Any]:
    return {
        "command": "polling_sweep",
        "trajectories": len(trajectories),
        "sources": sorted({trajectory.source for trajectory in trajectories}),
        "block_size": options.block_size,
        "reuse_output": options.reuse_output,
        "ratio": options.ratio,
        "encoder_window": options.encoder_window,
        "decoder": options.decoder,
        "encoder": options.encoder,
        "layout_version": LAYOUT_VERSION,
        "tokenizer": renderer.fingerprint["tokenizer"],
        "versions": {"python": platform.python_version(), "transformers": transformers.__version__},
    }


def _verdict(chosen: Row | None, options: Options) -> str:
    limits = f"asked: prefill <= {options.max_prefill:.2f} and context <= {options.max_context:.2f} of P=1"
    if chosen is None:
        return f"no P fits at K={options.choose_k} ({limits})"
    return (
        f"default P={chosen.polling} at K={chosen.k}: prefill {chosen.prefill_share:.2f}, "
        f"context {chosen.context_share:.2f} of P=1 ({limits})"
    )


def _share(share: float, between: tuple[float, float]) -> str:
    return "1" if share == 1 and between == (1, 1) else f"{share:.2f} [{between[0]:.2f}, {between[1]:.2f}]"


def _petaflops(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    import sys

    sys.exit(run_main(main, sys.argv[1:], prog="polling_sweep.py"))
