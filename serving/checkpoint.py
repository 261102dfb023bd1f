"""Serving checkpoints: what must be there before a server starts, the renderer that belongs to one, its identity."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from loha.errors import LohaError
from loha.fingerprint import require_match, weights_hash
from loha.hf_config import MODEL_TYPE, LohaConfig
from loha.render import LatentSettings, Renderer
from loha.serving_checkpoint import ENCODER_TOKENIZER, ServingCheckpoint
from loha.tokenizer_dir import load_tokenizer
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
    checkpoint_renderer(folder, checkpoint.config)
    return checkpoint.config


def checkpoint_renderer(folder: str | Path, config: LohaConfig, *, chat_template: str | None = None) -> Renderer:
    """Return the renderer of a serving checkpoint.

    Args:
        folder: where its tokenizers lie.
        config: of the checkpoint.
        chat_template: replaces the tokenizer's own; then the template's fingerprint is not compared.

    Raises:
        LohaError: when a tokenizer or the template is not the one that the checkpoint was exported with.
    """
    renderer = Renderer(
        load_tokenizer(folder),
        encoder_tokenizer=load_tokenizer(Path(folder) / ENCODER_TOKENIZER),
        settings=LatentSettings(ratio=config.compression_ratio, window=config.encoder_window),
        placeholder_id=config.placeholder_token_id,
        chat_template=chat_template,
    )
    expected = dict(config.fingerprint)
    if chat_template is not None:
        expected.pop("chat_template", None)
    require_match(renderer.fingerprint, expected, found_in=f"the files in {folder}", expected_by="this checkpoint")
    return renderer


def checkpoint_hash(folder: Path, config: LohaConfig) -> str:
    """Return a name for everything that a checkpoint's replies depend on: weights, tokenizers, template, settings."""
    parts = [weights_hash(folder), sorted(config.fingerprint.items()), config.compression_ratio, config.encoder_window]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def latent_identity(folder: str | Path, config: LohaConfig, dtype: Any) -> str:
    """Return a name for everything that changes latents besides the ids: weights, settings and number format.

    Caches of latents can outlive a server (vLLM's encoder-cache connectors), so the weights themselves are hashed:
    adapter and markers whole, the encoder through the hash that the export recorded, or whole where it did not.
    """
    digest = hashlib.sha256(f"{config.compression_ratio}|{config.encoder_window}|{dtype}".encode())
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
