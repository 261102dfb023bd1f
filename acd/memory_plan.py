"""Bytes of one training rank, by component, from shapes alone. Pure Python.

What each layer saves for its backward pass was read off the code and is checked against tensors that autograd really
saved, and against the bytes that were really alive at the peak (tests/unit/test_planner_memory.py). GPU-only parts
(flash attention's workspaces, pinned-memory offload, allocator slack) are stated and not measured.

Notation: T tokens of the row, D width, F MLP width, Q heads * head width, KV likewise, N heads, R rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from loha.model_shape import ModelShape

Phase = Literal["loss", "backward", "whole"]
"""`whole`: sharded ranks hold all weights for a moment, when they load, evaluate and save."""

ROW: tuple[Phase, ...] = ("loss", "backward")
"""While a row is trained."""

FLOAT32 = 4
INT64 = 8
ACTIVATION_GRADIENTS = 3
"""MLP-wide tensors beside gate and up in the activation's backward pass: the gradient that comes in and the two that go
out, which are written over what they are made of (`loha.mlp`)."""

CONTEXT_BYTES = 1_500_000_000
"""Driver context, matrix-product workspaces and communication buffers of one process. Assumed."""

GATHERED_LAYERS = 3
"""Layers of sharded weights that a rank holds whole: the one at work, the next one's buffer, and its copy out of it.
Assumed, from how FSDP2 prefetches."""

SLACK = 0.04
"""Share of the activations that the caching allocator cannot use. Assumed."""


@dataclass(frozen=True, kw_only=True)
class MemorySetup:
    """What decides the bytes of a rank."""

    decoder: ModelShape
    encoder: ModelShape | None = None
    rank: int = 64
    element_bytes: int = 2
    """Of frozen weights and activations: 2 for bfloat16, 4 for float32."""

    tokens_per_row: int = 204_800
    loss_positions: int = 180_000
    """Supervised positions of the fullest row; all of them in one term."""

    latents: int = 0
    """Latents of the row with the most of them."""

    checkpointing: bool = True
    offload: bool = False
    mlp_chunks: int = 1
    loss_chunk: int = 1024
    candidates: int = 64
    ranks: int = 1
    """Data-parallel processes; more than one adds the buckets that gradients are exchanged in."""

    shard: bool = False
    """Each of several ranks keeps its part of decoder, adapter and moments (`acd.sharding`)."""

    on_gpu: bool = True
    """False counts as the CPU back-end does: no flash workspaces, no offload, a float32 copy of the head."""

    several_pieces: bool = False
    """CPU only: several pieces in a row, whose attention outputs are joined by a copy."""

    @property
    def parts(self) -> int:
        """Return the number of parts that decoder, adapter and moments are kept in."""
        return self.ranks if self.shard else 1

    @property
    def trained_parameters(self) -> int:
        """Return the elements of patch, gains and adapter."""
        return sum(self.trained().values())

    def trained(self) -> dict[str, int]:
        """Return the elements of each trained group."""
        width = self.decoder.width
        source = self.encoder.width if self.encoder else 0
        adapter = source + width * source + width + width * width + width if self.encoder else 0
        return {
            "patch": self.decoder.patch_parameters(self.rank),
            "gains": self.decoder.gain_parameters,
            "adapter": adapter,
        }


@dataclass(frozen=True, kw_only=True)
class Component:
    """One line of the table."""

    name: str
    bytes: int
    phases: tuple[Phase, ...] = ("loss", "backward", "whole")
    """When these bytes are alive."""

    host: bool = False
    """In pinned host memory instead of the accelerator's."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """All components of one rank."""

    components: tuple[Component, ...]

    def phase_bytes(self, phase: Phase) -> int:
        """Return the device bytes alive in a phase."""
        return sum(c.bytes for c in self.components if phase in c.phases and not c.host)

    @property
    def peak_phase(self) -> Phase:
        """Return when the most is alive."""
        return max(("backward", "loss", "whole"), key=self.phase_bytes)

    @property
    def peak_bytes(self) -> int:
        """Return the most device bytes alive at one time."""
        return self.phase_bytes(self.peak_phase)

    @property
    def host_bytes(self) -> int:
        """Return the pinned host bytes of one rank."""
        return sum(c.bytes for c in self.components if c.host)

    def of(self, name: str) -> int:
        """Return the bytes of a component; 0 when there is none of that name."""
        return sum(c.bytes for c in self.components if c.name == name)


def plan_memory(setup: MemorySetup) -> MemoryPlan:
    """Return the components of one rank while it trains one row."""
    parts = [*_resident(setup), *_row(setup), *_loss(setup), *_layer(setup)]
    if setup.on_gpu:
        parts.append(Component(name="driver context, workspaces", bytes=CONTEXT_BYTES))
        for phase in ("loss", "backward"):
            activations = sum(c.bytes for c in _in_phase([*_row(setup), *_loss(setup), *_layer(setup)], phase))
            parts.append(
                Component(name=f"allocator slack ({phase})", bytes=int(SLACK * activations), phases=(phase,))  # type: ignore[arg-type]
            )
    return MemoryPlan(components=tuple(part for part in parts if part.bytes))


def layer_saved_elements(setup: MemorySetup, *, mlp: bool = True) -> tuple[int, int]:
    """Return what one lean layer saves per token: (elements of the activation dtype, float32 elements).

    Its input is included. Read off `LowRankLinear` (input, R-wide product), `GainRMSNorm` (input, one float32 per row),
    `LeanMLP` (gate, up, and their product as the input of down_proj), rotary embedding (nothing of its own), and
    attention (query, key, value, output, float32 log-sum-exp per head).

    Args:
        setup: shapes and rank.
        mlp: include the MLP's own tensors; without, what is left when the MLP runs in checkpointed chunks.
    """
    shape = setup.decoder
    ranks = {name: min(setup.rank, *sides) for name, sides in shape.projections().items()}
    attention_ranks = sum(ranks[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    elements = 4 * shape.width + 2 * shape.query_width + 2 * shape.kv_width + attention_ranks
    wide = 2 + shape.heads
    if shape.head_norms:
        elements += shape.query_width + shape.kv_width
        wide += shape.heads + shape.kv_heads
    if setup.several_pieces:
        elements += shape.query_width
    if mlp:
        elements += 3 * shape.mlp_width + ranks["gate_proj"] + ranks["up_proj"] + ranks["down_proj"]
    return elements, wide


def layer_saved_bytes(setup: MemorySetup) -> int:
    """Return the bytes per token that one layer saves, its input included."""
    elements, wide = layer_saved_elements(setup)
    return elements * setup.element_bytes + wide * FLOAT32


def _resident(setup: MemorySetup) -> list[Component]:
    trained = setup.trained()
    total = setup.trained_parameters * FLOAT32
    decoder = setup.decoder.parameters() * setup.element_bytes
    parts = [
        Component(name="frozen decoder", bytes=math.ceil(decoder / setup.parts)),
        Component(
            name="frozen encoder",
            bytes=setup.encoder.parameters(with_head=False) * setup.element_bytes if setup.encoder else 0,
        ),
        *(
            Component(name=f"{name} (float32)", bytes=math.ceil(count * FLOAT32 / setup.parts))
            for name, count in trained.items()
        ),
        # Sharded ranks, too, keep them whole until the exchange after the last row of a step.
        Component(name="gradients", bytes=total),
        Component(name="Adam moments", bytes=math.ceil(2 * total / setup.parts)),
    ]
    if setup.parts > 1:
        parts.append(Component(name="gathered weights", bytes=_gathered_bytes(setup), phases=ROW))
        others = (decoder + total) * (setup.parts - 1) // setup.parts
        parts.append(Component(name="weights of other ranks", bytes=others, phases=("whole",)))
    elif setup.ranks > 1:
        parts.append(Component(name="gradient exchange buckets", bytes=total))
    return parts


def _gathered_bytes(setup: MemorySetup) -> int:
    """Return the bytes of sharded weights that a rank holds whole while a row runs.

    FSDP2 gathers what belongs to no layer (vocabulary matrices, last norm, adapter) once, and the rest layer by layer.
    """
    shape, trained = setup.decoder, setup.trained()
    matrices = (1 if shape.tied else 2) * shape.embedding_parameters
    frozen = (shape.parameters() - matrices) * setup.element_bytes
    layer = (frozen + (trained["patch"] + trained["gains"]) * FLOAT32) // shape.layers
    return matrices * setup.element_bytes + trained["adapter"] * FLOAT32 + GATHERED_LAYERS * layer


def _row(setup: MemorySetup) -> list[Component]:
    """Return what lives from the forward pass of a row to the end of its backward pass."""
    shape, tokens, size = setup.decoder, setup.tokens_per_row, setup.element_bytes
    boundary = tokens * shape.width * size
    rotary = 2 * tokens * shape.head_width * size
    # Token ids and positions; then ids, log-probabilities and tail of every supervised position.
    targets = setup.loss_positions * (setup.candidates * (INT64 + FLOAT32) + FLOAT32 + INT64)
    source = setup.encoder.width if setup.encoder else 0
    parts = [
        Component(name="rotary tables, ids, targets", bytes=rotary + 2 * tokens * INT64 + targets, phases=ROW),
        Component(
            name="adapter activations", bytes=setup.latents * (3 * source + 2 * shape.width) * FLOAT32, phases=ROW
        ),
    ]
    if not setup.checkpointing:
        saved = shape.layers * tokens * layer_saved_bytes(setup)
        return [*parts, Component(name="saved by all layers", bytes=saved, phases=ROW)]
    boundaries = Component(name="layer inputs", bytes=shape.layers * boundary, phases=ROW)
    if not (setup.offload and setup.on_gpu):
        return [*parts, boundaries]
    return [
        *parts,
        Component(name="layer inputs in flight", bytes=2 * boundary, phases=ROW),
        Component(name="layer inputs (host)", bytes=boundaries.bytes, host=True),
    ]


def _loss(setup: MemorySetup) -> list[Component]:
    """Return what lives while the loss runs over its chunks, after the last layer."""
    shape, size = setup.decoder, setup.element_bytes
    chunk = min(setup.loss_chunk, setup.loss_positions) * shape.vocabulary
    per_logit = FLOAT32 + (size if setup.on_gpu and size < FLOAT32 else 0)
    states = setup.loss_positions * shape.width * size
    parts = [
        Component(name="loss chunk", bytes=chunk * per_logit, phases=("loss",)),
        Component(name="loss states and their gradient", bytes=2 * states, phases=("loss",)),
        # The last layer's output, which the final norm saved, and the final hidden states.
        Component(name="final hidden states", bytes=2 * setup.tokens_per_row * shape.width * size, phases=("loss",)),
    ]
    if not setup.on_gpu and size < FLOAT32:
        widened = shape.embedding_parameters * FLOAT32
        parts.append(Component(name="float32 copy of the head", bytes=widened, phases=("loss",)))
    return parts


def _layer(setup: MemorySetup) -> list[Component]:
    """Return what lives at the worst moment of one layer's backward pass, beside its input."""
    tokens = setup.tokens_per_row
    moments = {"MLP": _mlp_moment(setup), "attention": _attention_moment(setup)}
    worst = max(moments, key=lambda name: sum(moments[name]))
    saved, gradients = moments[worst]
    if not setup.checkpointing:
        saved = 0
    return [
        Component(name="recomputed layer", bytes=tokens * saved, phases=("backward",)),
        Component(name=f"gradients inside a layer ({worst})", bytes=tokens * gradients, phases=("backward",)),
    ]


def _mlp_moment(setup: MemorySetup) -> tuple[int, int]:
    """Return (saved, gradient) bytes per token in the activation's backward pass.

    down_proj is done and its input is free.
    """
    shape, size, chunks = setup.decoder, setup.element_bytes, setup.mlp_chunks
    elements, wide = layer_saved_elements(setup, mlp=False)
    ranks = sum(min(setup.rank, *shape.projections()[name]) for name in ("gate_proj", "up_proj"))
    saved = (elements - shape.width) * size + wide * FLOAT32 + (2 * shape.mlp_width + ranks) * size // chunks
    # The gradient of the layer's output; with chunks also that of the chunks done before.
    streams = shape.width * (2 if chunks > 1 else 1)
    return saved, streams * size + ACTIVATION_GRADIENTS * shape.mlp_width * size // chunks


def _attention_moment(setup: MemorySetup) -> tuple[int, int]:
    """Return (saved, gradient) bytes per token in the attention kernel's backward pass; the MLP half is free."""
    shape, size = setup.decoder, setup.element_bytes
    elements, wide = layer_saved_elements(setup, mlp=False)
    # Left out: the input (a boundary), the second norm's input and output, o_proj's R-wide product.
    saved = (elements - 3 * shape.width - min(setup.rank, shape.width, shape.query_width)) * size
    saved += (wide - 1) * FLOAT32
    gradients = (shape.width + 2 * shape.query_width + 2 * shape.kv_width) * size
    if setup.several_pieces:
        saved -= shape.query_width * size
    if setup.on_gpu:
        # Flash attention adds up the query gradient in float32, and key and value gradients per query head.
        gradients += shape.query_width * FLOAT32 + 2 * shape.query_width * size
    return saved, gradients


def _in_phase(components: list[Component], phase: str) -> list[Component]:
    return [c for c in components if phase in c.phases and not c.host]
