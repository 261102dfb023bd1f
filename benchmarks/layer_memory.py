"""Bytes saved for the backward pass by one decoder layer: frozen, against patch and gains (Qwen3-4B widths by default).

Every tensor that autograd saves is recorded once per storage; the weights themselves are not counted. The last line of
standard output is one JSON object.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3Model

from loha.attention import PACKED_ATTENTION
from loha.cli import run_main
from loha.console import out
from loha.decoder import wrap_mlps, wrap_norms, wrap_projections
from loha.lowrank import PROJECTIONS


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark; the widths are Qwen3-4B's by default."""

    hidden: int = 2560
    """D."""
    intermediate: int = 9728
    """Width of the MLP."""
    heads: int = 32
    """Query heads."""
    kv_heads: int = 8
    """Key heads."""
    head_width: int = 128
    """H."""
    rank: int = 64
    """Of the patch."""
    tokens: int = 128
    """Length of the row."""
    mlp_chunks: int = 4
    """Token chunks of the last variant."""


def main(options: Options) -> None:
    """Measure the frozen layer, the student's layer, and the student's layer with its MLP in token chunks."""
    model = build(options)
    frozen = saved_bytes(model, options)
    wrap(model, options.rank)
    lean = saved_bytes(model, options)
    for module in model.modules():
        if hasattr(module, "chunks"):
            module.chunks = options.mlp_chunks
    chunked = saved_bytes(model, options)
    out(
        json.dumps(
            {
                "benchmark": "layer_memory",
                "hidden": options.hidden,
                "intermediate": options.intermediate,
                "rank": options.rank,
                "tokens": options.tokens,
                "frozen_bytes_per_token": frozen / options.tokens,
                "student_bytes_per_token": lean / options.tokens,
                "student_over_frozen": round(lean / frozen, 4),
                "student_chunked_mlp_bytes_per_token": chunked / options.tokens,
            }
        )
    )


def build(options: Options) -> Any:
    """Return a model of one frozen bf16 layer with random weights."""
    config = Qwen3Config(
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.head_width,
        num_hidden_layers=1,
        vocab_size=16,
        dtype=torch.bfloat16,
    )
    config._attn_implementation = PACKED_ATTENTION
    torch.manual_seed(0)
    return Qwen3Model(config).to(torch.bfloat16).requires_grad_(False)


def wrap(model: nn.Module, rank: int) -> None:
    """Put the student's layers in place."""
    names = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in PROJECTIONS]
    wrap_projections(model, dict.fromkeys(names, rank))
    wrap_norms(model)
    wrap_mlps(model)


def saved_bytes(model: Any, options: Options) -> int:
    """Run the layer once and return the bytes of distinct storages saved for the backward pass, weights excluded."""
    layer = copy.deepcopy(model.layers[0]).train()
    weights = {tensor.untyped_storage().data_ptr() for tensor in layer.parameters()}
    hidden = torch.randn(1, options.tokens, options.hidden, dtype=torch.bfloat16, requires_grad=True)
    positions = model.rotary_emb(hidden, torch.arange(options.tokens).unsqueeze(0))
    seen: dict[int, tuple[torch.Tensor, int]] = {}  # keeps the tensors, so that no address is used twice

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        layer(hidden, attention_mask=None, position_embeddings=positions)
    return sum(size for _, size in seen.values())


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:], prog="layer_memory.py"))
