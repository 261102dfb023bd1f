"""The base decoder: load it, and put the trainable layers in place of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from loha.errors import LohaError
from loha.gains import GainRMSNorm, is_rms_norm
from loha.lclm import load_config, load_weights
from loha.lowrank import PROJECTIONS, LowRankLinear
from loha.mlp import LeanMLP, is_gated_silu
from loha.weight_files import WeightFiles


def wrap_projections(decoder: nn.Module, ranks: dict[str, int]) -> None:
    """Replace the named projections of a decoder by `LowRankLinear`, in place.

    Raises:
        LohaError: when a name is no Linear projection of the decoder.
    """
    modules = dict(decoder.named_modules())
    for name, rank in ranks.items():
        linear = modules.get(name)
        if not isinstance(linear, nn.Linear):
            raise LohaError(f"the base has no linear projection {name!r}; the patch belongs to another architecture")
        if rank > min(linear.weight.shape):
            raise LohaError(f"{name}: rank {rank} does not fit a projection of {list(linear.weight.shape)}")
        parent, _, attribute = name.rpartition(".")
        setattr(modules[parent], attribute, LowRankLinear(linear, rank))


def wrap_norms(decoder: nn.Module) -> None:
    """Replace every RMSNorm of a decoder by `GainRMSNorm`, in place."""
    for name, module in list(decoder.named_modules()):
        if is_rms_norm(module):
            parent, _, attribute = name.rpartition(".")
            setattr(decoder.get_submodule(parent), attribute, GainRMSNorm(module))


def wrap_mlps(decoder: nn.Module) -> None:
    """Replace every gated SiLU MLP of a decoder by `LeanMLP`, in place; other MLPs stay as they are."""
    for name, module in list(decoder.named_modules()):
        if is_gated_silu(module):
            parent, _, attribute = name.rpartition(".")
            setattr(decoder.get_submodule(parent), attribute, LeanMLP(module))


def is_projection(name: str) -> bool:
    """Return whether a module name is one of the seven projections of a decoder layer."""
    return ".layers." in name and name.rpartition(".")[2] in PROJECTIONS


def load_decoder(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    weights: WeightFiles | None = None,
) -> Any:
    """Load a base causal LM.

    Args:
        folder: Hugging Face checkpoint with safetensors weights.
        dtype: of the weights; the checkpoint's own by default.
        device: where to put it.
        weights: to use in place of the folder's, such as merged ones.

    Raises:
        LohaError: when the folder is no checkpoint, or its tensors do not fit its config.
    """
    config = load_config(folder)
    dtype = dtype or config.dtype or torch.float32
    with torch.device("meta"):
        decoder = AutoModelForCausalLM.from_config(config, dtype=dtype)
    load_weights(decoder, weights or WeightFiles(folder), dtype=dtype)
    return decoder.to(device).eval()
