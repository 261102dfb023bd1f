"""Memory and traffic of serving, per rank and per agent run, from shapes alone. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loha.accounting import Models, arm_columns
from loha.flops import adapter_flops, encoder_flops
from loha.hardware import Gpu
from loha.layout import MARKERS_PER_LATENT_OBSERVATION, Window, format_k
from loha.model_shape import ModelShape
from loha.replay_model import AgentRun, replay


@dataclass(frozen=True, kw_only=True)
class ServingSetup:
    """A server on given machines."""

    decoder: ModelShape
    encoder: ModelShape
    gpu: Gpu
    run: AgentRun = field(default_factory=AgentRun)
    tensor_parallel: int = 1
    element_bytes: int = 2
    memory_share: float = 0.90
    """Of the accelerator, that the engine may use."""

    encoder_cache_latents: int = 65_536
    """The server's default."""

    encode_batch_tokens: int = 16_384
    """Encoder tokens computed at once; the server's default."""

    step_tokens: int = 8_192
    """Tokens that the engine schedules in one step."""

    concurrency: int = 16
    """Agents at a time on one replica."""


@dataclass(frozen=True, kw_only=True)
class ArmTraffic:
    """One K and P: what a run of `ServingSetup.run` reads, and how many such runs a replica holds."""

    k: str
    polling: int
    mean_context: float
    last_context: int
    prefilled_tokens: float
    """Per run, cache misses of the replay model."""

    cached_share: float
    decoder_pflops: float
    encoder_pflops: float
    kv_bytes: int
    """Of one run at its last call, over all ranks."""

    runs_resident: int
    """How many runs at their mean context keep their whole prefix on the accelerators of one replica."""

    kv_moved_bytes: float
    """Per run from a prefill worker to a decode worker that keeps the prefix: new keys and values only."""

    kv_moved_cold_bytes: float
    """Per run when each call lands on a worker without its prefix: what session affinity saves."""


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """What `loha plan --serving` reports."""

    setup: ServingSetup
    components: dict[str, int]
    """Bytes on one rank."""

    kv_bytes_per_token: int
    """On one rank."""

    kv_tokens: int
    """Tokens whose keys and values fit beside the rest."""

    latents_per_observation: int
    latent_bytes_per_observation: int
    """What an encoder worker sends, or a shared store keeps, for one observation."""

    text_kv_bytes_per_observation: int
    latent_kv_bytes_per_observation: int
    """Over all ranks, markers included."""

    encode_flops_per_observation: int
    allreduce_bytes_per_token: int
    """Sent by each rank of a tensor-parallel group for one token."""

    arms: tuple[ArmTraffic, ...]

    @property
    def fits(self) -> bool:
        """Return whether the longest call of each K and P fits a replica."""
        return all(arm.last_context <= self.kv_tokens for arm in self.arms)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        report = asdict(self)
        report["setup"] = {
            "gpu": self.setup.gpu.name,
            "tensor_parallel": self.setup.tensor_parallel,
            "encoder_cache_latents": self.setup.encoder_cache_latents,
            "run": asdict(self.setup.run),
        }
        return report


def plan_serving(setup: ServingSetup, windows: Sequence[Window]) -> ServingPlan:
    """Return memory, the room for keys and values, and the traffic of each K and P."""
    decoder, run, size = setup.decoder, setup.run, setup.element_bytes
    components = _components(setup)
    room = int(setup.gpu.memory_bytes * setup.memory_share) - sum(components.values())
    kv_rank = decoder.kv_bytes_per_token(size) * _kv_heads_per_rank(setup) // decoder.kv_heads
    kv_tokens = max(0, room // kv_rank)
    latents = run.latents
    return ServingPlan(
        setup=setup,
        components=components,
        kv_bytes_per_token=kv_rank,
        kv_tokens=kv_tokens,
        latents_per_observation=latents,
        latent_bytes_per_observation=latents * decoder.width * size,
        text_kv_bytes_per_observation=run.observation_tokens * decoder.kv_bytes_per_token(size),
        latent_kv_bytes_per_observation=(latents + MARKERS_PER_LATENT_OBSERVATION) * decoder.kv_bytes_per_token(size),
        encode_flops_per_observation=encoder_flops(setup.encoder, run.observation_tokens, window=run.encoder_window)
        + adapter_flops(setup.encoder.width, decoder.width, latents),
        allreduce_bytes_per_token=_allreduce_bytes(setup),
        arms=tuple(_arm(setup, window, kv_tokens) for window in windows),
    )


def _components(setup: ServingSetup) -> dict[str, int]:
    """Return the bytes on one rank: the decoder is split, encoder, adapter and latents are on every rank."""
    decoder, encoder, size = setup.decoder, setup.encoder, setup.element_bytes
    adapter = encoder.width * decoder.width + decoder.width * decoder.width + 2 * decoder.width + encoder.width
    step = decoder.mlp_width * 2 // setup.tensor_parallel + 4 * decoder.width
    window = 3 * encoder.mlp_width + 4 * encoder.width
    return {
        "decoder weights": decoder.parameters() * size // setup.tensor_parallel,
        "encoder and adapter weights": (encoder.parameters(with_head=False) + adapter) * size,
        "encoder cache": setup.encoder_cache_latents * decoder.width * size,
        "encoding batch": setup.encode_batch_tokens * window * size,
        "decoder step": setup.step_tokens * step * size,
        "logits": setup.concurrency * decoder.vocabulary * 4,
    }


def _arm(setup: ServingSetup, window: Window, kv_tokens: int) -> ArmTraffic:
    calls = list(replay(setup.run, window, cache_block=16))
    models = Models(decoder=setup.decoder, encoder=setup.encoder, encoder_window=setup.run.encoder_window)
    columns = arm_columns([calls], models=models).mean
    last = calls[-1].context_tokens + calls[-1].output_tokens
    kv_token = setup.decoder.kv_bytes_per_token(setup.element_bytes)
    return ArmTraffic(
        k=format_k(window.k),
        polling=window.polling,
        mean_context=columns.in_per_call,
        last_context=last,
        prefilled_tokens=columns.decoder_input * (1 - columns.cached_share),
        cached_share=columns.cached_share,
        decoder_pflops=columns.decoder_pflops or 0.0,
        encoder_pflops=columns.encoder_pflops or 0.0,
        kv_bytes=last * kv_token,
        runs_resident=int(kv_tokens / (columns.in_per_call + setup.run.action_tokens)),
        kv_moved_bytes=columns.decoder_input * (1 - columns.cached_share) * kv_token,
        kv_moved_cold_bytes=columns.decoder_input * kv_token,
    )


def _kv_heads_per_rank(setup: ServingSetup) -> int:
    """Return key-value heads of one rank; with more ranks than heads each rank holds one."""
    return max(1, setup.decoder.kv_heads // setup.tensor_parallel)


def _allreduce_bytes(setup: ServingSetup) -> int:
    """Return two sums per layer of a width-wide vector, as a ring sends them."""
    ranks = setup.tensor_parallel
    return 4 * setup.decoder.layers * setup.decoder.width * setup.element_bytes * (ranks - 1) // ranks
