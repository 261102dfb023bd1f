"""LCLM checkpoints: a folder with an encoder, an adapter and (usually) a decoder that reads latents."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModel

from loha.adapter import Adapter
from loha.atomic import atomic_path
from loha.encoder import EncoderSettings
from loha.errors import LohaError
from loha.tokenizer_dir import load_tokenizer
from loha.weight_files import WeightFiles, read_json, save_tensors

CONFIG_NAME = "model_config.json"
MARKERS = ("<|memory_start|>", "<|memory_end|>")
EMBEDDING = "model.embed_tokens.weight"
_SETTING_KEYS = {
    "compression_ratio": "ratio",
    "encoder_window_size": "window",
    "pooling": "pooling",
    "encoder_mask_type": "mask",
    "boundary_overlap": "overlap",
    "adapter_type": "adapter_type",
}


@dataclass(frozen=True, kw_only=True)
class Lclm:
    """A loaded LCLM checkpoint; the decoder's weights stay on disk."""

    folder: Path
    settings: EncoderSettings
    encoder: nn.Module
    encoder_tokenizer: Any
    adapter: Adapter
    markers: torch.Tensor | None
    """float32 `[2, D]`: the decoder's embedding rows of the start and end marker; None without a decoder."""
    decoder_folder: Path | None

    @property
    def encoder_folder(self) -> Path:
        """Where the encoder and its tokenizer lie."""
        return self.folder / "encoder"


def load_lclm(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Lclm:
    """Load an LCLM checkpoint.

    Args:
        folder: with `encoder/`, `adapter/adapter.safetensors`, `model_config.json` and perhaps `decoder/`; or a parent
            of `checkpoint_<n>/` folders, of which the one with the highest number is taken.
        dtype: of the encoder and the adapter.

    Raises:
        LohaError: when a part is missing, malformed, of the wrong shape, or asks for something that is not built.

    Source: the layout of the released latent-context checkpoints.
    """
    root = find_lclm(folder)
    settings = read_settings(root)
    encoder = load_encoder(root / "encoder", dtype=dtype)
    adapter = load_adapter(root)
    if adapter.norm.weight.shape[0] != encoder.config.hidden_size:
        raise LohaError(
            f"{root}: the adapter reads width {adapter.norm.weight.shape[0]}, but the encoder's width is "
            f"{encoder.config.hidden_size}; the parts are of different checkpoints"
        )
    decoder_folder = root / "decoder" if (root / "decoder").is_dir() else None
    return Lclm(
        folder=root,
        settings=settings,
        encoder=encoder,
        encoder_tokenizer=load_tokenizer(root / "encoder"),
        adapter=adapter.to(dtype),
        markers=read_markers(decoder_folder) if decoder_folder else None,
        decoder_folder=decoder_folder,
    )


def find_lclm(folder: str | Path) -> Path:
    """Return the checkpoint folder itself: `folder`, or its newest `checkpoint_<n>`.

    Raises:
        LohaError: when neither holds a `model_config.json`.
    """
    root = Path(folder)
    if not root.is_dir():
        raise LohaError(f"{root} is not a folder; expected an LCLM checkpoint")
    if (root / CONFIG_NAME).is_file():
        return root
    numbered = [
        (int(match[1]), child) for child in root.iterdir() if (match := re.fullmatch(r"checkpoint_(\d+)", child.name))
    ]
    if not numbered:
        raise LohaError(f"{root} holds neither {CONFIG_NAME} nor checkpoint_<n> folders; it is not an LCLM checkpoint")
    newest = max(numbered)[1]
    if not (newest / CONFIG_NAME).is_file():
        raise LohaError(f"{newest} (the newest checkpoint of {root}) lacks {CONFIG_NAME}; was it written completely?")
    return newest


def read_settings(folder: Path) -> EncoderSettings:
    """Read `model_config.json`.

    Raises:
        LohaError: when the ratio or the window is missing, or a setting is not supported; by name.
    """
    config = read_json(folder / CONFIG_NAME)
    for key in ("compression_ratio", "encoder_window_size"):
        if key not in config:
            raise LohaError(f"{folder / CONFIG_NAME} lacks {key!r}; got {sorted(config)}")
    try:
        return EncoderSettings(**{_SETTING_KEYS[key]: value for key, value in config.items() if key in _SETTING_KEYS})
    except LohaError as error:
        raise LohaError(f"{folder / CONFIG_NAME}: {error}") from error


def load_encoder(folder: Path, *, dtype: torch.dtype) -> nn.Module:
    """Load the encoder, a Hugging Face base model, in evaluation mode.

    Raises:
        LohaError: when its files are missing or do not fit its config.
    """
    config = load_config(folder)
    with torch.device("meta"):
        encoder = AutoModel.from_config(config, dtype=dtype)
    load_weights(encoder, WeightFiles(folder), dtype=dtype)
    return encoder.eval()


def load_config(folder: str | Path) -> Any:
    """Read a Hugging Face `config.json`.

    Raises:
        LohaError: when it is missing, malformed, or of an unknown model type.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise LohaError(f"{folder} is not a folder; expected a Hugging Face checkpoint")
    read_json(folder / "config.json")
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise LohaError(
            f"{folder / 'config.json'} is not a model config that transformers knows: {_first_line(error)}"
        ) from error


def load_weights(model: nn.Module, weights: WeightFiles, *, dtype: torch.dtype, prefix: str = "") -> None:
    """Fill a model built on the meta device from safetensors, checking names and shapes.

    Args:
        model: a Hugging Face model whose parameters have no storage yet.
        weights: the checkpoint.
        dtype: of the parameters.
        prefix: of the names in the checkpoint; other tensors are ignored.

    Raises:
        LohaError: when a tensor is missing or of the wrong shape.
    """
    tied = (
        set(getattr(model, "_tied_weights_keys", None) or {})
        if getattr(model.config, "tie_word_embeddings", False)
        else set()
    )
    state = {}
    for name, parameter in model.state_dict().items():
        if name in tied and prefix + name not in weights:
            continue
        state[name] = weights.tensor(prefix + name, shape=tuple(parameter.shape)).to(dtype)
    model.load_state_dict(state, assign=True, strict=False)
    if tied:
        model.tie_weights()
    _materialise_buffers(model)


def load_adapter(folder: Path) -> Adapter:
    """Read `adapter/adapter.safetensors` of an LCLM folder."""
    weights = WeightFiles(folder / "adapter")
    return Adapter.from_tensors(dict(weights.items()), source=str(folder / "adapter" / "adapter.safetensors"))


def read_markers(decoder_folder: Path) -> torch.Tensor:
    """Read the embedding rows of the two region markers.

    Returns:
        float32 `[2, D]`: start, end.

    Raises:
        LohaError: when the decoder's tokenizer does not know the markers.
    """
    tokenizer = load_tokenizer(decoder_folder)
    known = tokenizer.get_vocab()
    missing = [marker for marker in MARKERS if marker not in known]
    if missing:
        raise LohaError(f"{decoder_folder}: the tokenizer has no token {missing[0]!r}; it is not an LCLM decoder")
    return WeightFiles(decoder_folder).rows(EMBEDDING, [known[marker] for marker in MARKERS]).float()


def lclm_from_layers(
    base_dir: str | Path, *, layers: int, ratio: int, window: int, out_dir: str | Path, seed: int
) -> None:
    """Write an LCLM folder without a decoder: the encoder is a base's own first layers, the adapter is untrained.

    A start for a base that no LCLM exists for. The encoder keeps the base's final norm, tokenizer and weights' dtype.

    Args:
        base_dir: Hugging Face causal LM.
        layers: how many of its first layers.
        ratio: encoder tokens per latent.
        window: encoder tokens per window.
        out_dir: to write.
        seed: of the adapter.

    Raises:
        LohaError: when the base has fewer layers.
    """
    base = WeightFiles(base_dir)
    config = read_json(Path(base_dir) / "config.json")
    if not 1 <= layers <= config["num_hidden_layers"]:
        raise LohaError(f"{base_dir} has {config['num_hidden_layers']} layers, asked for the first {layers}")
    settings = EncoderSettings(ratio=ratio, window=window)
    names = [name for name in base.names() if name.startswith("model.") and _layer(name) < layers]
    config |= {"num_hidden_layers": layers, "architectures": [_base_class(config)]}
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][:layers]
    width = base.shape(EMBEDDING)[1]
    adapter = Adapter.fresh(width, width, output_rms=embedding_rms(base), seed=seed)
    document = {key: getattr(settings, field) for key, field in _SETTING_KEYS.items()}
    with atomic_path(out_dir) as temporary:
        (temporary / "encoder").mkdir(parents=True)
        (temporary / "adapter").mkdir()
        tensors = {name.removeprefix("model."): base.tensor(name) for name in names}
        save_tensors(tensors, temporary / "encoder" / "model.safetensors")
        (temporary / "encoder" / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in sorted(Path(base_dir).glob("tokenizer*")):
            shutil.copyfile(file, temporary / "encoder" / file.name)
        save_tensors(adapter.state_dict(), temporary / "adapter" / "adapter.safetensors")
        (temporary / CONFIG_NAME).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def embedding_rms(base: WeightFiles) -> float:
    """Return the root mean square of a base's embedding, the size that fresh latents should have."""
    embedding = base.tensor(EMBEDDING)
    return torch.linalg.vector_norm(embedding, dtype=torch.float32).item() / math.sqrt(embedding.numel())


def _layer(name: str) -> int:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return int(match[1]) if match else 0


def _base_class(config: dict[str, Any]) -> str:
    return config["architectures"][0].replace("ForCausalLM", "Model")


def _materialise_buffers(model: nn.Module) -> None:
    """Recompute the buffers that no checkpoint holds (rotary frequencies) after a build on the meta device."""
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            fresh = type(module)(config=module.config)
            for name, buffer in fresh.named_buffers(recurse=False):
                module.register_buffer(name, buffer, persistent=False)
    left = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    assert not left, f"{left[0]} was not loaded"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
