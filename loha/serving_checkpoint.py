"""The serving checkpoint: one folder with decoder, encoder, adapter and markers, for the server and the reference.

Tensors are named `decoder.*` (Hugging Face causal-LM names), `encoder.*` (base-model names), `adapter.*` and `markers`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from loha.adapter import Adapter
from loha.encoder import EncoderSettings
from loha.errors import LohaError
from loha.fingerprint import require_match
from loha.hf_config import ARCHITECTURE, LohaConfig
from loha.render import Renderer
from loha.rendering import LatentSettings
from loha.tokenizer_dir import load_tokenizer
from loha.weight_files import INDEX_NAME, WeightFiles, read_json, save_tensors

ENCODER_TOKENIZER = "encoder_tokenizer"
SHARD_BYTES = 4 << 30
SIDE_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)


@dataclass(frozen=True, kw_only=True)
class ServingCheckpoint:
    """An opened serving checkpoint; weights are read on demand."""

    folder: Path
    config: LohaConfig
    weights: WeightFiles

    @classmethod
    def open(cls, folder: str | Path) -> ServingCheckpoint:
        """Open a folder that `loha export` wrote.

        Raises:
            LohaError: when it is something else or incomplete.
        """
        folder = Path(folder)
        values = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        if values.get("architectures") != [ARCHITECTURE]:
            got = f"config.json names {values.get('architectures')}" if values else "no config.json there"
            raise LohaError(f"{folder} is no serving checkpoint: {got}; make one with `loha export STUDENT --out DIR`")
        checkpoint = cls(folder=folder, config=LohaConfig(**values), weights=WeightFiles(folder))
        if "markers" not in checkpoint.weights:
            raise LohaError(f"{folder} lacks the tensor 'markers'; was it written completely?")
        return checkpoint

    @property
    def settings(self) -> EncoderSettings:
        """Ratio and window."""
        return EncoderSettings(ratio=self.config.compression_ratio, window=self.config.encoder_window)

    def adapter(self) -> Adapter:
        """Return the adapter."""
        prefix = "adapter."
        names = [name for name in self.weights.names() if name.startswith(prefix)]
        tensors = {name[len(prefix) :]: self.weights.tensor(name) for name in names}
        return Adapter.from_tensors(tensors, source=str(self.folder))

    def renderer(self) -> Renderer:
        """Return the renderer that this checkpoint was made for."""
        return checkpoint_renderer(self.folder, self.config)

    def eos_token_ids(self) -> frozenset[int]:
        """Return the ids that end a reply: from generation_config.json, else from the decoder's config."""
        path = self.folder / "generation_config.json"
        value = read_json(path).get("eos_token_id") if path.is_file() else None
        if value is None:
            value = self.config.text_config.eos_token_id
        return frozenset([] if value is None else [value] if isinstance(value, int) else value)


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
    found = renderer.fingerprint
    if chat_template is not None:
        del found["chat_template"]
    require_match(found, config.fingerprint, found_in=f"the files in {folder}", expected_by=f"the checkpoint {folder}")
    return renderer


def write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors to `model.safetensors`, or to numbered shards with an index when they are many.

    Args:
        folder: existing.
        tensors: (name, tensor), consumed one at a time; at most one shard is in memory.
        shard_bytes: size at which a new shard begins.
    """
    files: list[list[str]] = []
    total = 0
    for shard in _shards(tensors, shard_bytes):
        save_tensors(shard, folder / f"part-{len(files)}.tmp")
        files.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(files) == 1:
        (folder / "part-0.tmp").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(files):
        file = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{index}.tmp").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def copy_side_files(source: Path, target: Path) -> None:
    """Copy the tokenizer, the chat template and the generation config of a model folder."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in SIDE_FILES:
        for file in sorted(source.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON object for people and programs."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    if shard:
        yield shard
