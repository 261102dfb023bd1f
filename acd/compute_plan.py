"""Operations and hours of a training run, from shapes and lengths. Pure Python.

Two counts are kept apart. Model operations are what the mathematics needs: forward, and backward through frozen
weights, which is one product per projection instead of two. Executed operations add what is done to save memory: every
layer's forward pass again, and flash attention's score products again in its backward pass. Utilisation (MFU) is model
operations per second over the peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from acd.packing import Piece
from loha.flops import adapter_flops, attention_flops, encoder_flops, head_flops, linear_flops, patch_flops
from loha.hardware import Gpu
from loha.model_shape import ModelShape

BACKWARD_ATTENTION = 2.0
"""Backward over forward operations of attention, as mathematics."""

FLASH_BACKWARD_ATTENTION = 2.5
"""The same as flash attention executes it: the scores are computed again."""

ROW_FILL = 0.97
"""Share of a step's capacity that packed pieces fill, where there is no epoch plan to read it from."""


@dataclass(frozen=True, kw_only=True)
class ViewWork:
    """All pieces of one view in a run."""

    tokens: int = 0
    squares: int = 0
    """Sum of the squared piece lengths: what attention costs grows with it."""

    positions: int = 0
    """Supervised positions, read-back answers included."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run computes."""

    full: ViewWork
    latent: ViewWork
    source_tokens: int
    """Encoder tokens behind the latents."""

    latents: int
    steps: int
    trajectories: int

    @property
    def tokens(self) -> int:
        """Return the tokens of both views."""
        return self.full.tokens + self.latent.tokens

    def limited(self, max_steps: int | None) -> Work:
        """Return the part of the work that so many steps do; all of it for None."""
        if max_steps is None or max_steps >= self.steps:
            return self
        share = max_steps / self.steps

        def view(whole: ViewWork) -> ViewWork:
            return ViewWork(**{name: round(value * share) for name, value in asdict(whole).items()})

        return replace(
            self,
            full=view(self.full),
            latent=view(self.latent),
            source_tokens=round(self.source_tokens * share),
            latents=round(self.latents * share),
            steps=max_steps,
        )


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """A typical trajectory, where there is no epoch plan yet.

    The defaults are a guess at CoderForge: 30,000 tokens, a third of them the assistant's, observations at 1/16.
    """

    trajectories: int = 35_140
    full_tokens: int = 30_000
    latent_tokens: int = 11_250
    assistant_tokens: int = 10_000
    spread: float = 1.0
    """E[s^2] / E[s]^2 of the lengths s; 1 when all are equal. Attention's cost is multiplied by it."""


def typical_work(
    lengths: Lengths,
    *,
    tokens_per_step: int,
    ratio: int = 16,
    full_share: float = 1.0,
    latent_share: float = 1.0,
    readback_share: float = 0.03,
    epochs: int = 1,
) -> Work:
    """Return the work of a run of typical trajectories."""

    def view(tokens: int, share: float, extra: float = 0.0) -> ViewWork:
        count = lengths.trajectories * share * epochs
        return ViewWork(
            tokens=round(count * tokens),
            squares=round(count * tokens**2 * lengths.spread),
            positions=round(count * lengths.assistant_tokens * (1 + extra)),
        )

    full = view(lengths.full_tokens, full_share)
    latent = view(lengths.latent_tokens, latent_share, readback_share / (1 - readback_share))
    # Each source token leaves and a latent comes for `ratio` of them.
    source = (lengths.full_tokens - lengths.latent_tokens) * ratio / (ratio - 1)
    source_tokens = round(source * lengths.trajectories * latent_share * epochs)
    return Work(
        full=full,
        latent=latent,
        source_tokens=source_tokens,
        latents=source_tokens // ratio,
        steps=max(1, math.ceil((full.tokens + latent.tokens) / (tokens_per_step * ROW_FILL))),
        trajectories=lengths.trajectories,
    )


def planned_work(pieces: Iterable[Piece], steps: int, *, ratio: int = 16) -> Work:
    """Return the work of an epoch plan's pieces, exact but for the encoder tokens.

    A latent piece without its full-text partner counts no encoder tokens: the plan does not hold them.
    """
    views: dict[str, list[Piece]] = {"full": [], "latent": []}
    for piece in pieces:
        views[piece.view].append(piece)
    partner = {(piece.trajectory, piece.epoch): piece.tokens for piece in views["full"]}
    shorter = sum(max(0, partner.get((p.trajectory, p.epoch), p.tokens) - p.tokens) for p in views["latent"])
    source_tokens = round(shorter * ratio / (ratio - 1))
    return Work(
        full=_view_work(views["full"]),
        latent=_view_work(views["latent"]),
        source_tokens=source_tokens,
        latents=source_tokens // ratio,
        steps=steps,
        trajectories=len({piece.trajectory for found in views.values() for piece in found}),
    )


@dataclass(frozen=True, kw_only=True)
class ComputeSetup:
    """What decides the operations per token and the time."""

    decoder: ModelShape
    encoder: ModelShape | None = None
    encoder_window: int = 1024
    rank: int = 64
    checkpointing: bool = True
    mlp_chunks: int = 1
    offload: bool = False
    live_teacher: bool = False
    gpu: Gpu
    world: int = 1
    gpus_per_node: int = 8
    utilisation: float = 0.40
    """MFU of the run with full recomputation and without MLP chunks."""

    element_bytes: int = 2
    exchanged_bytes: int = 0
    """Gradients summed over ranks once per optimizer step."""

    shard: bool = False
    """Ranks keep parts of the weights and gather them in the forward and the backward pass of every row."""

    tokens_per_row: int = 204_800


@dataclass(frozen=True, kw_only=True)
class ComputePlan:
    """Operations, speed and hours of a run."""

    tokens: int
    tokens_per_step: float
    steps: int
    model_flops: float
    """Of the whole run, all ranks."""

    executed_flops: float
    parts: dict[str, float]
    """Model operations by part, whole run."""

    seconds_per_step: float
    offload_seconds_per_step: float
    """Within the seconds per step: copies of layer inputs, taken as not overlapped."""

    exchange_seconds_per_step: float
    """Of gradients, and of weights where they are sharded; taken as not overlapped."""

    tokens_per_second: float
    """Over all ranks."""

    tokens_per_second_per_gpu: float
    hours: float
    gpu_hours: float

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def plan_compute(setup: ComputeSetup, work: Work) -> ComputePlan:
    """Return operations and hours of the work."""
    parts = model_parts(setup, work)
    model = sum(parts.values())
    executed = executed_flops(setup, work)
    reference = executed_flops(_plain(setup), work)
    compute_seconds = model / (setup.gpu.flops * setup.utilisation * setup.world) * executed / reference
    offload = 0.0
    if setup.offload and setup.checkpointing:
        boundary_bytes = setup.decoder.layers * setup.decoder.width * setup.element_bytes
        offload = 2 * work.tokens * boundary_bytes / (setup.gpu.host_bandwidth * setup.world)
    exchange = exchange_seconds(setup) * work.steps + gather_seconds(setup, work.tokens)
    seconds = compute_seconds + offload + exchange
    return ComputePlan(
        tokens=work.tokens,
        tokens_per_step=work.tokens / work.steps,
        steps=work.steps,
        model_flops=model,
        executed_flops=executed,
        parts=parts,
        seconds_per_step=seconds / work.steps,
        offload_seconds_per_step=offload / work.steps,
        exchange_seconds_per_step=exchange / work.steps,
        tokens_per_second=work.tokens / seconds,
        tokens_per_second_per_gpu=work.tokens / seconds / setup.world,
        hours=seconds / 3600,
        gpu_hours=seconds / 3600 * setup.world,
    )


def model_parts(setup: ComputeSetup, work: Work) -> dict[str, float]:
    """Return the model operations of a run by part.

    Projections: forward and the gradient by the input. Patch: also the gradient by both factors. Head: one product for
    logits and one for the hidden gradient, in the forward pass.
    """
    shape, positions = setup.decoder, work.full.positions + work.latent.positions
    parts = {
        "projections": 2.0 * work.tokens * linear_flops(shape),
        "attention": (1 + BACKWARD_ATTENTION) * _attention(shape, work),
        "head": 2.0 * positions * head_flops(shape),
        "reading patch": 3.0 * work.tokens * patch_flops(shape, setup.rank),
    }
    if setup.encoder is not None:
        parts["encoder"] = float(encoder_flops(setup.encoder, work.source_tokens, window=setup.encoder_window))
        parts["adapter"] = 3.0 * adapter_flops(setup.encoder.width, shape.width, work.latents)
    if setup.live_teacher:
        text = max(work.full, work.latent, key=lambda view: view.tokens)
        parts["live teacher"] = (
            float(text.tokens * linear_flops(shape) + text.positions * head_flops(shape))
            + 2.0 * shape.query_width * shape.layers * text.squares
        )
    return parts


def executed_flops(setup: ComputeSetup, work: Work) -> float:
    """Return the operations that the device executes in a run, recomputation included."""
    shape, parts = setup.decoder, model_parts(setup, work)
    again = 1.0 if setup.checkpointing else 0.0
    total = sum(parts.values()) + again * work.tokens * (linear_flops(shape) + patch_flops(shape, setup.rank))
    total += (FLASH_BACKWARD_ATTENTION - BACKWARD_ATTENTION + again) * _attention(shape, work)
    if setup.mlp_chunks > 1:
        total += work.tokens * 2 * 3 * shape.mlp_width * shape.width * shape.layers
    return total


def exchange_seconds(setup: ComputeSetup) -> float:
    """Return the seconds of one gradient exchange: a rank gets all sums, or where sharded those of its part."""
    return (1 if setup.shard else 2) * _ring_seconds(setup, setup.exchanged_bytes)


def gather_seconds(setup: ComputeSetup, tokens: int) -> float:
    """Return the seconds that gathering sharded weights takes in a run of so many tokens over all ranks."""
    if not setup.shard:
        return 0.0
    rows_per_rank = tokens / (ROW_FILL * setup.tokens_per_row * setup.world)
    weights = setup.decoder.parameters() * setup.element_bytes + setup.exchanged_bytes
    return rows_per_rank * 2 * _ring_seconds(setup, weights)


def _ring_seconds(setup: ComputeSetup, size: int) -> float:
    """Return the seconds in which every rank sends its part of `size` bytes to all, over the slowest link."""
    bandwidth = setup.gpu.link_bandwidth if setup.world <= setup.gpus_per_node else setup.gpu.host_bandwidth
    return (setup.world - 1) / setup.world * size / bandwidth


def _attention(shape: ModelShape, work: Work) -> float:
    """Return the forward operations of causal attention in all pieces: half of the squared lengths in pairs."""
    pairs = (work.full.squares + work.latent.squares) / 2
    return pairs * attention_flops(shape, 0, 1)


def _plain(setup: ComputeSetup) -> ComputeSetup:
    return replace(setup, checkpointing=True, mlp_chunks=1)


def _view_work(pieces: Sequence[Piece]) -> ViewWork:
    return ViewWork(
        tokens=sum(piece.tokens for piece in pieces),
        squares=sum(piece.tokens**2 for piece in pieces),
        positions=sum(piece.positions + piece.answers for piece in pieces),
    )
