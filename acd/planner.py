"""Does a training run fit, how long does it take, and what to change when it does not. Pure arithmetic on shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from acd.compute_plan import ComputePlan, ComputeSetup, Work, plan_compute
from acd.config import Config
from acd.memory_plan import MemoryPlan, MemorySetup, plan_memory
from loha.hardware import GPUS, Gpu
from loha.model_shape import ModelShape

CHUNKS_TRIED = 8
SMALLEST_ROW = 8_192
TIGHT = 0.05
"""Spare share of the peak below which a plan says that it is a near thing."""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """A run on given machines."""

    memory: MemorySetup
    compute: ComputeSetup
    work: Work
    tokens_per_step: int

    @property
    def gpu(self) -> Gpu:
        """Return the accelerator of each rank."""
        return self.compute.gpu

    def with_levers(self, **levers: Any) -> TrainingSetup:
        """Return the setup with some of its memory settings changed: `offload`, `mlp_chunks`, `tokens_per_row`, ...

        Supervised positions and latents of a row follow its length.
        """
        memory = replace(self.memory, **levers)
        scale = memory.tokens_per_row / self.memory.tokens_per_row
        memory = replace(
            memory,
            loss_positions=round(self.memory.loss_positions * scale),
            latents=round(self.memory.latents * scale),
        )
        shared = {name: value for name, value in levers.items() if hasattr(self.compute, name)}
        return replace(self, memory=memory, compute=replace(self.compute, **shared))


@dataclass(frozen=True, kw_only=True)
class Lever:
    """A change and what comes of it."""

    change: str
    """As the configuration spells it."""

    peak_bytes: int
    fits: bool
    hours: float
    host_bytes: int
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What `loha plan` reports about a training run."""

    setup: TrainingSetup
    memory: MemoryPlan
    compute: ComputePlan
    levers: tuple[Lever, ...]
    advice: str

    @property
    def fits(self) -> bool:
        """Return whether the peak is below the accelerator's memory."""
        return self.memory.peak_bytes <= self.setup.gpu.memory_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain data: bytes, operations and seconds."""
        gpu = self.setup.gpu
        return {
            "gpu": gpu.name,
            "world": self.setup.compute.world,
            "utilisation": self.setup.compute.utilisation,
            "fits": self.fits,
            "memory_bytes": gpu.memory_bytes,
            "peak_bytes": self.memory.peak_bytes,
            "peak_phase": self.memory.peak_phase,
            "host_bytes_per_rank": self.memory.host_bytes,
            "components": {c.name: c.bytes for c in self.memory.components},
            "largest_row_tokens": largest_row(self.setup),
            "tokens_per_row": self.setup.memory.tokens_per_row,
            "trained_parameters": self.setup.memory.trained(),
            **self.compute.to_json(),
            "levers": [lever.to_json() for lever in self.levers],
            "advice": self.advice,
        }


def training_setup(
    config: Config,
    work: Work,
    *,
    decoder: ModelShape,
    encoder: ModelShape | None,
    rank: int,
    window: int,
    gpu: Gpu,
    world: int,
    utilisation: float,
    element_bytes: int = 2,
) -> TrainingSetup:
    """Return the setup of a training configuration.

    Args:
        config: of the run.
        work: tokens and lengths.
        decoder: shape of the base.
        encoder: shape of the encoder.
        rank: of the reading patch.
        window: encoder tokens per window.
        gpu: of each rank.
        world: ranks.
        utilisation: MFU to count with.
        element_bytes: of frozen weights and activations.
    """
    row = config.packing.tokens_per_row
    views = [view for view in (work.full, work.latent) if view.tokens]
    densest = max((view.positions / view.tokens for view in views), default=1.0)
    memory = MemorySetup(
        decoder=decoder,
        encoder=encoder,
        rank=rank,
        element_bytes=element_bytes,
        tokens_per_row=row,
        loss_positions=round(row * min(1.0, densest)),
        latents=round(row * work.latents / work.latent.tokens) if work.latent.tokens else 0,
        checkpointing=config.model.checkpointing,
        offload=config.model.offload,
        mlp_chunks=config.model.mlp_chunks,
        loss_chunk=config.loss.chunk,
        candidates=config.teacher.candidates,
        ranks=world,
        shard=config.model.shard,
    )
    compute = ComputeSetup(
        decoder=decoder,
        encoder=encoder,
        encoder_window=window,
        rank=rank,
        checkpointing=config.model.checkpointing,
        mlp_chunks=config.model.mlp_chunks,
        offload=config.model.offload,
        live_teacher=config.teacher.mode == "live",
        gpu=gpu,
        world=world,
        utilisation=utilisation,
        element_bytes=element_bytes,
        exchanged_bytes=4 * memory.trained_parameters,
        shard=config.model.shard,
        tokens_per_row=row,
    )
    return TrainingSetup(memory=memory, compute=compute, work=work, tokens_per_step=config.packing.tokens_per_step)


def plan_training(setup: TrainingSetup) -> TrainingPlan:
    """Return memory, time, levers and advice."""
    memory = plan_memory(setup.memory)
    levers = tuple(_levers(setup))
    return TrainingPlan(
        setup=setup,
        memory=memory,
        compute=plan_compute(setup.compute, setup.work),
        levers=levers,
        advice=_advice(setup, memory, levers),
    )


def largest_row(setup: TrainingSetup) -> int:
    """Return the most tokens per row that fit with the other settings unchanged, in steps of 1,024; 0 for none."""
    low, high = 0, 4096
    while low < high:
        middle = (low + high + 1) // 2
        peak = plan_memory(setup.with_levers(tokens_per_row=middle * 1024).memory).peak_bytes
        low, high = (middle, high) if peak <= setup.gpu.memory_bytes else (low, middle - 1)
    return low * 1024


def _levers(setup: TrainingSetup) -> Iterator[Lever]:
    """Yield what can be pulled, alone and together."""
    memory = setup.memory
    singles: list[tuple[str, dict[str, Any], str]] = []
    if not memory.checkpointing:
        singles.append(("model.checkpointing: true", {"checkpointing": True}, "one more forward pass"))
    if memory.checkpointing and not memory.offload:
        singles.append(("model.offload: true", {"offload": True}, "pinned host memory on every rank"))
    if memory.mlp_chunks < CHUNKS_TRIED:
        change = f"model.mlp_chunks: {CHUNKS_TRIED}"
        singles.append((change, {"mlp_chunks": CHUNKS_TRIED}, "one more forward pass of the MLP"))
    if memory.loss_chunk > 256:
        singles.append(("loss.chunk: 256", {"loss_chunk": 256}, "smaller products in the loss"))
    if memory.ranks > 1 and not memory.shard:
        singles.append(("model.shard: true", {"shard": True}, "weights gathered for every row"))
    combined: dict[str, Any] = {}
    for change, lever, note in singles:
        yield _lever(setup.with_levers(**lever), change, note)
    for _, lever, _ in singles:
        combined |= lever
    if memory.checkpointing and not memory.offload and memory.mlp_chunks < CHUNKS_TRIED:
        both = {"offload": True, "mlp_chunks": CHUNKS_TRIED}
        yield _lever(setup.with_levers(**both), f"model.offload: true, model.mlp_chunks: {CHUNKS_TRIED}", "both prices")
    yield from _shorter_rows(setup, combined)


def _shorter_rows(setup: TrainingSetup, combined: dict[str, Any]) -> Iterator[Lever]:
    """Yield rows that fit: with the present settings, and with all other levers pulled."""
    note = "longer trajectories are left out"
    for levers, prefix in (({}, ""), (combined, "all of the above, ")):
        changed = setup.with_levers(**levers)
        row = min(largest_row(changed), changed.memory.tokens_per_row)
        step = setup.tokens_per_step
        while row >= SMALLEST_ROW and step % row:
            row -= 1024
        if SMALLEST_ROW <= row < setup.memory.tokens_per_row:
            yield _lever(changed.with_levers(tokens_per_row=row), f"{prefix}packing.tokens_per_row: {row}", note)


def _lever(setup: TrainingSetup, change: str, note: str) -> Lever:
    memory = plan_memory(setup.memory)
    return Lever(
        change=change,
        peak_bytes=memory.peak_bytes,
        fits=memory.peak_bytes <= setup.gpu.memory_bytes,
        hours=plan_compute(setup.compute, setup.work).hours,
        host_bytes=memory.host_bytes,
        note=note,
    )


def _advice(setup: TrainingSetup, memory: MemoryPlan, levers: tuple[Lever, ...]) -> str:
    room = setup.gpu.memory_bytes - memory.peak_bytes
    if room >= 0:
        tight = "" if room >= TIGHT * memory.peak_bytes else ", which is less than the error of this estimate"
        return f"fits, {room / 1e9:.1f} GB to spare{tight}; rows of up to {largest_row(setup):,} tokens would fit"
    whole = [lever for lever in levers if lever.fits and "tokens_per_row" not in lever.change]
    shorter = [lever for lever in levers if lever.fits and "tokens_per_row" in lever.change]
    by_memory = sorted(GPUS.values(), key=lambda gpu: gpu.memory_bytes)
    bigger = [gpu.name for gpu in by_memory if gpu.memory_bytes >= memory.peak_bytes]
    lacks = f"does not fit: {-room / 1e9:.1f} GB too much"
    if whole:
        best = min(whole, key=lambda lever: lever.hours)
        return f"{lacks}; set {best.change} ({best.peak_bytes / 1e9:.1f} GB, {best.hours:.1f} h)"
    if shorter:
        best = max(shorter, key=lambda lever: int(lever.change.rsplit(" ", 1)[1]))
        return f"{lacks}; set {best.change} ({best.note})" + (f"; or use {bigger[0]}" if bigger else "")
    return f"{lacks}, and no lever is enough" + (f"; use {bigger[0]}" if bigger else "; use a smaller base or rank")
