"""What only a GPU can show, in less than 8 minutes on one H100 or H200: `python scripts/gpu_check.py`.

1. Packed attention (flash-attn, or torch's own variable-length kernel) against float32 attention piece by piece,
   forward and gradients.
2. The fused loss in bfloat16 against a dense float64 reference, value and hidden gradient.
3. A training step of a row with the configuration's shapes and random weights: peak memory against `loha plan`'s
   estimate, without and with offload to pinned host memory, and tokens per second.

`--dry-run` goes through the same code on the CPU with tiny shapes and judges nothing but that it runs. The last line of
standard output is one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3Model

from acd.config import LossConfig
from acd.loss import Targets, certain_targets, fused_kl
from acd.memory_plan import MemorySetup, plan_memory
from acd.rows import Packed, Supervised, TrainingRow
from acd.step import AcdModel
from loha.adapter import Adapter
from loha.attention import Pieces, packed_attention
from loha.cli import run_main
from loha.console import err, out
from loha.decoder import is_projection
from loha.encoder import EncoderSettings, LatentEncoder
from loha.errors import LohaError
from loha.model_shape import ModelShape
from loha.student import Student
from loha.student_files import StudentConfig

ATTENTION_ERROR = 2e-2
"""Of the scale of outputs and gradients, in bfloat16 (8 bits of mantissa)."""
LOSS_ERROR = 5e-3
"""Relative, of the summed loss from bfloat16 states and head; the gradient to its scale."""
PLAN_ERROR = 0.15
"""Relative: the plan leaves out the CUDA context and the allocator's gaps."""
GB = 1e9

QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
ENCODER = QWEN3_4B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the check."""

    tokens: int = 204_800
    """Of the row."""

    pieces: int = 8
    """In the row, of equal length."""

    latents: int = 8_192
    """Of the row."""

    positions: int = 100_000
    """Supervised positions of the row."""

    rank: int = 64
    offload: bool = True
    """Also run a step with layer inputs in pinned host memory."""

    dry_run: bool = False
    """On the CPU, with tiny shapes."""

    seed: int = 0


def main(options: Options) -> int:
    """Check attention, loss and memory on a GPU."""
    if not options.dry_run and not torch.cuda.is_available():
        raise LohaError("no GPU is visible to torch; --dry-run goes through the same code on the CPU")
    torch.manual_seed(options.seed)
    device = torch.device("cpu" if options.dry_run else "cuda")
    result: dict[str, Any] = {"device": "cpu" if options.dry_run else torch.cuda.get_device_name()}
    checks: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("attention", lambda: check_attention(device)),
        ("loss", lambda: check_loss(device)),
        ("step", lambda: check_step(options, device, offload=False)),
    ]
    if options.offload and not options.dry_run:
        checks.append(("step_with_offload", lambda: check_step(options, device, offload=True)))
    for name, check in checks:
        begin = time.perf_counter()
        try:
            result[name] = check()
        except torch.cuda.OutOfMemoryError as error:
            result[name] = {"passes": False, "error": str(error).partition(".")[0]}
        result[name]["seconds"] = round(time.perf_counter() - begin, 1)
        err(f"{name}: {json.dumps(result[name])}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    result["passes"] = all(result[name]["passes"] for name, _ in checks)
    out(json.dumps(result))
    return 0 if result["passes"] or options.dry_run else 1


def check_attention(device: torch.device) -> dict[str, Any]:
    """Compare packed attention in bfloat16 with causal attention in float32, one piece at a time."""
    lengths = (700, 33, 1024, 700, 1) if device.type == "cuda" else (7, 3, 7)
    heads, kv_heads, width = 32, 8, 128
    total = sum(lengths)
    shapes = ((1, heads, total, width), (1, kv_heads, total, width), (1, kv_heads, total, width))
    query, key, value = (torch.randn(s, device=device, dtype=torch.bfloat16).requires_grad_(True) for s in shapes)
    module = torch.nn.Module()
    module.num_key_value_groups = heads // kv_heads  # type: ignore[assignment]
    module.is_causal = True  # type: ignore[assignment]
    got, _ = packed_attention(module, query, key, value, None, scaling=width**-0.5, pieces=Pieces.of(lengths, device))
    weight = torch.randn_like(got)
    grads = torch.autograd.grad((got * weight).sum(), (query, key, value))
    wide = [tensor.detach().float().requires_grad_(True) for tensor in (query, key, value)]
    wanted = torch.cat([_attend(*(t[:, :, a:b] for t in wide)) for a, b in _ranges(lengths)], dim=1)
    wanted_grads = torch.autograd.grad((wanted * weight.float()).sum(), wide)
    errors = {"forward": _error(got, wanted)}
    errors |= {f"grad_{n}": _error(g, w) for n, g, w in zip("qkv", grads, wanted_grads, strict=True)}
    return {"passes": max(errors.values()) <= ATTENTION_ERROR, "kernel": _kernel(), **errors}


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


def _ranges(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _kernel() -> str:
    if not torch.cuda.is_available():
        return "sdpa"
    try:
        import flash_attn
    except ImportError:
        return "torch varlen"
    return f"flash-attn {flash_attn.__version__}"


def check_loss(device: torch.device) -> dict[str, Any]:
    """Compare the fused loss from bfloat16 tensors with a dense float64 reference on the same numbers."""
    rows, vocabulary, width = (512, 151_936, 2560) if device.type == "cuda" else (16, 300, 32)
    hidden_ND = torch.randn(rows, width, device=device, dtype=torch.bfloat16).requires_grad_(True)
    head_VD = (torch.randn(vocabulary, width, device=device) * 4 / width**0.5).bfloat16()
    targets = random_targets(rows, vocabulary, device)
    found = fused_kl(hidden_ND, head_VD, targets.ids_NC, targets.logp_NC, targets.tail_N)
    (grad_ND,) = torch.autograd.grad(found.sum, hidden_ND)
    wide_ND = hidden_ND.detach().double().requires_grad_(True)
    logq_NV = (wide_ND @ head_VD.double().t()).log_softmax(1)
    inside_NV = torch.zeros_like(logq_NV, dtype=torch.bool).scatter(1, targets.ids_NC, True)
    tail_N = logq_NV.masked_fill(inside_NV, float("-inf")).logsumexp(1)
    logq_NB = torch.cat([logq_NV.gather(1, targets.ids_NC), tail_N[:, None]], 1)
    logp_NB = torch.cat([targets.logp_NC, targets.tail_N[:, None]], 1).double()
    wanted = (logp_NB.exp() * (logp_NB - logq_NB)).sum()
    (wanted_ND,) = torch.autograd.grad(wanted, wide_ND)
    errors = {
        "value": abs(float(found.sum.detach()) / float(wanted.detach()) - 1),
        "gradient": _error(grad_ND, wanted_ND),
    }
    return {"passes": max(errors.values()) <= LOSS_ERROR, **errors}


def random_targets(rows: int, vocabulary: int, device: torch.device, candidates: int = 64) -> Targets:
    """Return targets with distinct random ids and a proper distribution over the buckets."""
    ids_NC = torch.randint(0, vocabulary // candidates, (rows, candidates), device=device)
    ids_NC += torch.arange(candidates, device=device) * (vocabulary // candidates)
    logp_NB = (torch.randn(rows, candidates + 1, device=device) * 3).log_softmax(1)
    return Targets(ids_NC, logp_NB[:, :-1], logp_NB[:, -1])


def check_step(options: Options, device: torch.device, *, offload: bool) -> dict[str, Any]:
    """Run one step of a row, compare the peak with the plan, and time a second step."""
    tiny = device.type == "cpu"
    tokens, latents, positions = (256, 8, 100) if tiny else (options.tokens, options.latents, options.positions)
    student = random_student(
        TINY if tiny else QWEN3_4B, TINY if tiny else ENCODER, options.rank if not tiny else 8, device
    )
    student.enable_checkpointing(offload=offload)
    model = AcdModel(student, LossConfig(), candidates=64).train()
    optimizer = torch.optim.AdamW(student.trainable().values(), lr=1e-5, fused=not tiny)
    row = random_row(student, tokens, options.pieces, latents, positions)
    seconds = 0.0
    for _ in range(2):  # the second has the moments in place
        if not tiny:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss = model(row).sum() / positions
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        finite = bool(torch.isfinite(loss))
        seconds = time.perf_counter() - begin
    setup = MemorySetup(
        decoder=ModelShape.from_config(student.decoder.config.to_dict()),
        encoder=ModelShape.from_config(student.latent_encoder.encoder.config.to_dict()),
        rank=student.config.rank,
        tokens_per_row=tokens,
        loss_positions=positions,
        latents=latents,
        offload=offload,
    )
    planned = plan_memory(setup).peak_bytes
    peak = 0 if tiny else torch.cuda.max_memory_allocated()
    fits = tiny or abs(peak / planned - 1) <= PLAN_ERROR
    return {
        "passes": finite and fits,
        "tokens": tokens,
        "peak_gb": round(peak / GB, 2),
        "planned_gb": round(planned / GB, 2),
        "tokens_per_s": round(tokens / seconds, 1),
    }


def random_student(decoder: dict[str, Any], encoder: dict[str, Any], rank: int, device: torch.device) -> Student:
    """Return a student of given shapes with random weights, made on its device."""
    config = Qwen3Config(**decoder, tie_word_embeddings=True, max_position_embeddings=262_144)
    with device:
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        reader = Qwen3Model(Qwen3Config(**encoder)).bfloat16()
        adapter = Adapter(encoder["hidden_size"], decoder["hidden_size"])
        markers = torch.zeros(2, decoder["hidden_size"])
    names = [name for name, _ in base.named_modules() if is_projection(name)]
    about = StudentConfig(base="", encoder="", ratio=16, window=1024, rank=rank, start="zero")
    latent_encoder = LatentEncoder(reader, EncoderSettings(ratio=16, window=1024))
    return Student(base, latent_encoder, adapter, markers, about, dict.fromkeys(names, rank)).to(device)


def random_row(student: Student, tokens: int, pieces: int, latents: int, positions: int) -> TrainingRow:
    """Return a row of equal pieces with one latent region, and supervised positions of the latent view."""
    device = student.markers.device
    vocabulary = student.decoder.config.vocab_size
    ids_T = torch.randint(1, vocabulary, (tokens,), device=device)
    start = min(4, tokens - latents - 2)
    ids_T[start : start + latents + 2] = 0
    encoder_ids = torch.randint(0, student.latent_encoder.encoder.config.vocab_size, (latents * 16,), device=device)
    lengths = tuple([tokens // pieces] * (pieces - 1) + [tokens - tokens // pieces * (pieces - 1)])
    states_N = torch.randperm(tokens, device=device)[:positions].sort().values
    nothing = Supervised(states_N[:0], certain_targets(states_N[:0]))
    packed = Packed(ids_T, Pieces.of(lengths, device).position_ids(), lengths, ((start, encoder_ids),))
    distill = Supervised(states_N, random_targets(positions, vocabulary, device))
    return TrainingRow(packed, distill=distill, read_back=nothing, anchor=nothing)


def _error(got: Tensor, wanted: Tensor) -> float:
    """Return the largest difference over the scale of what is wanted."""
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).abs().max() / wanted.abs().max())


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:], prog="scripts/gpu_check.py"))
