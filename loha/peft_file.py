"""The reading patch as a PEFT LoRA folder, so that peft and vLLM can load it. The only file that knows peft."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from loha.errors import LohaError
from loha.lowrank import PROJECTIONS
from loha.weight_files import read_header, read_json, save_tensors

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
_PREFIX = "base_model.model."
Factors = tuple[torch.Tensor, torch.Tensor]


def save_patch(folder: Path, patch: Mapping[str, Factors], *, rank: int, base: str) -> None:
    """Write the patch in PEFT's layout. Scaling is 1: alpha equals the rank, per projection.

    Args:
        folder: to create.
        patch: float32 A `[R, in]` and B `[out, R]` by projection name (`model.layers.0.self_attn.q_proj`).
        rank: asked for; projections with a smaller side have less.
        base: path or name of the base, as PEFT records it.
    """
    from peft import LoraConfig, TaskType

    clipped = {re.escape(name): A.shape[0] for name, (A, _) in patch.items() if A.shape[0] != rank}
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(PROJECTIONS),
        rank_pattern=clipped,
        alpha_pattern=dict(clipped),
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=base,
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    tensors = {}
    for name, (A, B) in patch.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = A.detach().cpu().contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = B.detach().cpu().contiguous()
    save_tensors(tensors, folder / WEIGHTS_NAME)


def load_patch(folder: Path) -> dict[str, Factors]:
    """Read a patch that `save_patch` wrote.

    Raises:
        LohaError: when the folder holds no complete patch of ours (another scale, dropout, bias or tensor names).
    """
    config = read_json(folder / CONFIG_NAME)
    if config.get("lora_alpha") != config.get("r") or config.get("use_rslora") or config.get("bias") != "none":
        raise LohaError(f"{folder / CONFIG_NAME}: a reading patch has lora_alpha = r, no rslora and no bias")
    read_header(folder / WEIGHTS_NAME)
    tensors = load_file(folder / WEIGHTS_NAME)
    names = sorted(key[len(_PREFIX) : -len(".lora_A.weight")] for key in tensors if key.endswith(".lora_A.weight"))
    try:
        pairs = {
            n: (tensors.pop(f"{_PREFIX}{n}.lora_A.weight"), tensors.pop(f"{_PREFIX}{n}.lora_B.weight")) for n in names
        }
    except KeyError as error:
        raise LohaError(f"{folder / WEIGHTS_NAME} lacks {error}") from error
    if tensors or not pairs:
        raise LohaError(f"{folder / WEIGHTS_NAME} is no reading patch: unexpected tensor {next(iter(tensors), None)!r}")
    return pairs
