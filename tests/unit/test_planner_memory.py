"""The planner's bytes against bytes: what autograd saves in a layer, and what is alive in a real training step."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

import loha.gains
from acd.config import LossConfig
from acd.loss import Targets, certain_targets
from acd.memory_plan import MemorySetup, layer_saved_bytes, plan_memory
from acd.rows import Packed, Supervised, TrainingRow
from acd.sharding import shard
from acd.step import AcdModel
from loha.adapter import Adapter
from loha.attention import Pieces
from loha.decoder import is_projection
from loha.encoder import EncoderSettings, LatentEncoder
from loha.model_shape import KNOWN_SHAPES, ModelShape
from loha.student import Student
from loha.student_files import StudentConfig
from tests.acd_processes import finish, prepare, start
from tests.tolerances import PLANNED_PEAK, PLANNED_PEAK_LATENTS, PLANNED_PEAK_WITHOUT_CHECKPOINTS

CANDIDATES = 8
RANK = 8
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
ENCODER: dict[str, Any] = SMALL | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}


class AliveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that are alive and were made inside the block."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.known = list(known)
        self.seen = {tensor.untyped_storage()._cdata for tensor in self.known}
        self.alive = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.alive -= size


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms work in chunks of 64 MiB, more than a whole row here: keep their share of the peak small."""
    monkeypatch.setattr(loha.gains, "ELEMENTS_AT_ONCE", 8192)


def make_student(decoder: Any, dtype: torch.dtype = torch.bfloat16) -> Student:
    encoder = Qwen3Model(Qwen3Config(**ENCODER)).to(dtype)
    width = decoder.config.hidden_size
    return Student(
        decoder.to(dtype),
        LatentEncoder(encoder, EncoderSettings()),
        Adapter(ENCODER["hidden_size"], width),
        torch.zeros(2, width),
        StudentConfig(base="", encoder="", ratio=16, window=1024, rank=RANK, start="zero"),
        {name: RANK for name, _ in decoder.named_modules() if is_projection(name)},
    )


def setup_of(student: Student, **changes: Any) -> MemorySetup:
    setup = MemorySetup(
        decoder=ModelShape.from_config(student.decoder.config.to_dict()),
        encoder=ModelShape.from_config(student.latent_encoder.encoder.config.to_dict()),
        rank=RANK,
        element_bytes=student.decoder.dtype.itemsize,
        candidates=CANDIDATES,
        on_gpu=False,
    )
    return replace(setup, **changes)


def make_row(tokens: int, lengths: tuple[int, ...], positions: int, latents: int) -> TrainingRow:
    """Return a row with `positions` supervised positions, of one term."""
    vocabulary = SMALL["vocab_size"]
    token_ids = torch.randint(1, vocabulary, (tokens,))
    regions: tuple[tuple[int, torch.Tensor], ...] = ()
    if latents:
        regions = ((4, torch.randint(0, vocabulary, (latents * 16,))),)
        token_ids[4 : 4 + latents + 2] = 0
    candidates = torch.rand(positions, vocabulary).topk(CANDIDATES).indices
    targets = Targets(candidates, torch.full((positions, CANDIDATES), -3.0), torch.full((positions,), -1.0))
    supervised = Supervised(torch.arange(positions), targets)
    nothing = Supervised(torch.arange(0), certain_targets(torch.arange(0)))
    packed = Packed(token_ids, Pieces.of(lengths).position_ids(), lengths, regions)
    terms = {"distill": nothing, "read_back": nothing, "anchor": nothing}
    return TrainingRow(packed, **(terms | {"distill" if latents else "anchor": supervised}))


def alive_at_peak(
    student: Student, row: TrainingRow, *, loss_chunk: int = 32, checkpointing: bool = True, mlp_chunks: int = 1
) -> tuple[int, int]:
    """Return the bytes alive at the peak of the forward pass with the loss, and of the backward pass."""
    if checkpointing:
        student.enable_checkpointing(mlp_chunks=mlp_chunks)
    model = AcdModel(student, LossConfig(chunk=loss_chunk), candidates=CANDIDATES).train()
    trained = list(student.trainable().values())
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    known = [*model.parameters(), *model.buffers(), *(p.grad for p in trained if p.grad is not None)]
    with AliveBytes(known) as alive:
        loss = model(row).sum()
        forward, alive.peak = alive.peak, alive.alive
        loss.backward()
    return forward, alive.peak


def planned(setup: MemorySetup, phase: Any) -> int:
    """Return the planned bytes of a phase without what the measurement takes as given: weights, optimizer, row."""
    plan = plan_memory(setup)
    given = ("frozen", "patch", "gains", "adapter (", "gradients", "Adam", "rotary tables, ids, targets")
    rotary = 2 * setup.tokens_per_row * setup.decoder.head_width * setup.element_bytes
    # "gradients inside a layer" is measured; "gradients" alone are given.
    shown = [c for c in plan.components if phase in c.phases and (not c.name.startswith(given) or "inside" in c.name)]
    return sum(c.bytes for c in shown) + rotary


@pytest.mark.parametrize("lengths", [(123,), (50, 73)], ids=["one piece", "two pieces"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_layer_saves_exactly_the_planned_bytes(family: str, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    decoder = Qwen3ForCausalLM(Qwen3Config(**SMALL)) if family == "qwen3" else LlamaForCausalLM(LlamaConfig(**SMALL))
    student = make_student(decoder)
    tokens = sum(lengths)
    hidden = torch.randn(1, tokens, SMALL["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    pieces = Pieces.of(lengths)
    rotary = student.decoder.model.rotary_emb(hidden, pieces.position_ids())
    given = {t.untyped_storage().data_ptr() for t in (*student.parameters(), *rotary)}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        student.decoder.model.layers[0](
            hidden, position_embeddings=rotary, position_ids=pieces.position_ids(), pieces=pieces, use_cache=False
        )
    measured = sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in given)
    setup = setup_of(student, several_pieces=len(lengths) > 1)
    assert measured == tokens * layer_saved_bytes(setup)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {}),
        ({}, {"mlp_chunks": 4}),
        ({}, {"lengths": (100, 157)}),
        ({"num_hidden_layers": 5, "intermediate_size": 640}, {}),
        ({"intermediate_size": 64, "num_attention_heads": 8}, {}),  # attention is the worst moment
        ({}, {"dtype": torch.float32, "tokens": 300, "mlp_chunks": 2}),
    ],
    ids=str,
)
def test_planned_peak_is_alive_at_the_peak(config: dict[str, Any], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    student = make_student(Qwen3ForCausalLM(Qwen3Config(**(SMALL | config))), options.get("dtype", torch.bfloat16))
    lengths = options.get("lengths", (options.get("tokens", 257),))
    tokens, chunks = sum(lengths), options.get("mlp_chunks", 1)
    _, backward = alive_at_peak(student, make_row(tokens, lengths, 85, 0), mlp_chunks=chunks)
    setup = setup_of(
        student, tokens_per_row=tokens, loss_positions=85, mlp_chunks=chunks, several_pieces=len(lengths) > 1
    )
    assert planned(setup, "backward") == pytest.approx(backward, rel=PLANNED_PEAK)


@pytest.mark.parametrize(
    ("latents", "checkpointing", "tolerance"),
    [(64, True, PLANNED_PEAK_LATENTS), (0, False, PLANNED_PEAK_WITHOUT_CHECKPOINTS)],
)
def test_planned_peak_with_latents_and_without_checkpoints(latents: int, checkpointing: bool, tolerance: float) -> None:
    torch.manual_seed(0)
    student = make_student(Qwen3ForCausalLM(Qwen3Config(**SMALL)))
    _, backward = alive_at_peak(student, make_row(257, (257,), 85, latents), checkpointing=checkpointing)
    setup = setup_of(student, tokens_per_row=257, loss_positions=85, latents=latents, checkpointing=checkpointing)
    assert planned(setup, "backward") == pytest.approx(backward, rel=tolerance)


def test_planned_loss_is_alive_in_the_loss() -> None:
    """With a large vocabulary the loss is the peak of the forward pass."""
    torch.manual_seed(0)
    student = make_student(Qwen3ForCausalLM(Qwen3Config(**(SMALL | {"vocab_size": 8192}))))
    forward, _ = alive_at_peak(student, make_row(257, (257,), 85, 0), loss_chunk=64)
    setup = setup_of(student, tokens_per_row=257, loss_positions=85, loss_chunk=64)
    assert planned(setup, "loss") == pytest.approx(forward, rel=PLANNED_PEAK)


def test_resident_bytes_are_the_students() -> None:
    student = make_student(Qwen3ForCausalLM(Qwen3Config(**SMALL)))
    setup = setup_of(student)
    plan = plan_memory(setup)
    trained = {name: sum(p.numel() for p in group.values()) for name, group in student.groups().items()}
    assert setup.trained() == trained
    assert plan.of("gradients") == 4 * sum(trained.values())
    assert plan.of("Adam moments") == 8 * sum(trained.values())
    encoder = student.latent_encoder.encoder
    assert plan.of("frozen encoder") == sum(p.nbytes for p in encoder.parameters())
    frozen = sum(p.nbytes for p in student.decoder.parameters() if not p.requires_grad)
    assert plan.of("frozen decoder") == frozen


def write_kept_bytes(words: list[str], rank: int, world: int, port: int) -> None:
    """Shard the small student and write what this rank keeps of it."""
    prepare(rank, world, port)
    dist.init_process_group("gloo")
    student = make_student(Qwen3ForCausalLM(Qwen3Config(**SMALL)))
    shard(AcdModel(student, LossConfig(), candidates=CANDIDATES), torch.device("cpu"))
    kept = {"frozen decoder": [p for p in student.decoder.parameters() if not p.requires_grad]}
    kept |= {f"{name} (float32)": list(group.values()) for name, group in student.groups().items()}
    kept["frozen encoder"] = list(student.latent_encoder.encoder.parameters())
    local = {name: sum(getattr(p, "to_local", lambda p=p: p)().nbytes for p in group) for name, group in kept.items()}
    Path(words[0], f"{rank}.json").write_text(json.dumps(local))


def test_a_sharded_rank_keeps_the_planned_bytes(tmp_path: Path) -> None:
    assert finish(start(write_kept_bytes, str(tmp_path), world=2)) == [0, 0]
    student = make_student(Qwen3ForCausalLM(Qwen3Config(**SMALL)))
    plan = plan_memory(setup_of(student, ranks=2, shard=True))
    for rank in range(2):
        kept = json.loads((tmp_path / f"{rank}.json").read_text())
        assert kept == {name: plan.of(name) for name in kept}


def test_the_papers_row_on_one_h100() -> None:
    """Against the estimates made from measured layers before this code existed: 85, 70, 49 and 34 GB."""
    setup = MemorySetup(decoder=KNOWN_SHAPES["qwen3-4b"], encoder=KNOWN_SHAPES["qwen3-embedding-0.6b"], latents=22_700)
    for offload, chunks, estimate in ((False, 1, 85), (False, 8, 70), (True, 1, 49), (True, 8, 34)):
        plan = plan_memory(replace(setup, offload=offload, mlp_chunks=chunks))
        assert plan.peak_bytes / 1e9 == pytest.approx(estimate, rel=0.10)
        assert plan.host_bytes == (36 * 204_800 * 2560 * 2 if offload else 0)
    # The lean layer: no more than the frozen stock layer's 120.6 KB a token.
    assert layer_saved_bytes(setup) == 110_760
