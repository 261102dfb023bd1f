"""Serving checkpoints: what must be there before a server starts, the renderer that belongs to one, its identity."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from loha.errors import LohaError
from loha.fingerprint import weights_hash
from loha.hf_config import MODEL_TYPE, LohaConfig
from loha.serving_checkpoint import ServingCheckpoint
from loha.weight_files import WeightFiles, read_json

_REQUIRED = ("text_config", "encoder_config", "compression_ratio", "encoder_window", "placeholder_token_id")
_OUTSIDE_DECODER = ("adapter.", "markers", "encoder.")


def check_checkpoint(folder: Path) -> LohaConfig:
    """Check that a folder is a complete serving checkpoint whose tokenizers are those of the export.

    Returns:
        Its configuration.

    Raises:
        LohaError: naming what is missing or different, and the remedy.
    """
    if not folder.is_dir():
        raise LohaError(f"no checkpoint at {folder}: expected a folder written by `loha export STUDENT --out DIR`")
    config = read_json(folder / "config.json")
    if config.get("model_type") != MODEL_TYPE:
        raise LohaError(
            f"{folder} holds a checkpoint of type {config.get('model_type')!r}, expected {MODEL_TYPE!r}: "
            "export a student with `loha export STUDENT --out DIR` and serve that folder"
        )
    for key in _REQUIRED:
        if key not in config:
            raise LohaError(f"{folder / 'config.json'} lacks {key!r}: export the student again with this version")
    checkpoint = ServingCheckpoint.open(folder)
    checkpoint.renderer()
    return checkpoint.config


def checkpoint_hash(folder: Path, config: LohaConfig) -> str:
    """Return a name for everything that a checkpoint's replies depend on: weights, tokenizers, template, settings."""
    parts = [weights_hash(folder), sorted(config.fingerprint.items()), config.compression_ratio, config.encoder_window]
    parts += [_architecture(config.text_config), _architecture(config.encoder_config)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def latent_identity(folder: str | Path, config: LohaConfig, dtype: Any) -> str:
    """Return a name for everything that changes latents besides the ids: weights, settings and number format.

    Caches of latents can outlive a server (vLLM's encoder-cache connectors), so the weights themselves are hashed:
    adapter and markers whole, the encoder through the hash that the export recorded, or whole where it did not.
    """
    settings = f"{config.compression_ratio}|{config.encoder_window}|{dtype}|{_architecture(config.encoder_config)}"
    digest = hashlib.sha256(settings.encode())
    recorded = config.fingerprint.get("encoder_weights")
    digest.update(str(recorded).encode())
    weights = WeightFiles(folder)
    for name in sorted(weights.names()):
        if not name.startswith(_OUTSIDE_DECODER) or (recorded and name.startswith("encoder.")):
            continue
        tensor = weights.tensor(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _architecture(config: PretrainedConfig) -> str:
    """Return a model's configuration as text: equal weights compute other things at another rope or epsilon."""
    return json.dumps(config.to_dict(), sort_keys=True, default=str)
