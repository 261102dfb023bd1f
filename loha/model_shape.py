"""The shape of a decoder or encoder, from its Hugging Face config alone: no weights, no tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loha.errors import LohaError


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a dense transformer with grouped-query attention and a gated MLP (Qwen3, Qwen2, Llama, Mistral)."""

    layers: int
    width: int
    """D for a decoder, E for an encoder."""

    mlp_width: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    """Rows of the embedding."""

    tied: bool = True
    """The output matrix is the embedding."""

    head_norms: bool = False
    """q_norm and k_norm exist (Qwen3)."""

    biases: int = 0
    """Bias elements per layer."""

    windows: tuple[int | None, ...] | None = None
    """Sliding window per layer; None for full attention everywhere."""

    longest: int | None = None
    """Positions that the config allows."""

    @property
    def query_width(self) -> int:
        """Return heads times head width."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Return key-value heads times head width."""
        return self.kv_heads * self.head_width

    def projections(self) -> dict[str, tuple[int, int]]:
        """Return (out, in) of the seven projections of a layer."""
        return {
            "q_proj": (self.query_width, self.width),
            "k_proj": (self.kv_width, self.width),
            "v_proj": (self.kv_width, self.width),
            "o_proj": (self.width, self.query_width),
            "gate_proj": (self.mlp_width, self.width),
            "up_proj": (self.mlp_width, self.width),
            "down_proj": (self.width, self.mlp_width),
        }

    @property
    def projection_parameters(self) -> int:
        """Return the elements of all projections of all layers: what every token is multiplied with."""
        return self.layers * sum(rows * columns for rows, columns in self.projections().values())

    @property
    def gain_parameters(self) -> int:
        """Return the elements of all RMSNorm gains."""
        per_layer = 2 * self.width + (2 * self.head_width if self.head_norms else 0)
        return self.layers * per_layer + self.width

    @property
    def embedding_parameters(self) -> int:
        """Return the elements of one vocabulary matrix."""
        return self.vocabulary * self.width

    def patch_parameters(self, rank: int) -> int:
        """Return the elements of a reading patch on every projection; the rank is clipped to the smaller side."""
        per_layer = sum(min(rank, *sides) * sum(sides) for sides in self.projections().values())
        return self.layers * per_layer

    def parameters(self, *, with_head: bool = True) -> int:
        """Return all elements.

        Args:
            with_head: count an untied output matrix; an encoder has none.
        """
        matrices = 1 + (with_head and not self.tied)
        return (
            self.projection_parameters
            + self.gain_parameters
            + self.layers * self.biases
            + matrices * self.embedding_parameters
        )

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_width * element_bytes

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, source: str = "config.json") -> ModelShape:
        """Read a Hugging Face config; of a nested one (`text_config`) its decoder.

        Args:
            config: the content of a config.json.
            source: names it in errors.

        Raises:
            LohaError: when a size is missing, or the model is a mixture of experts.
        """
        if isinstance(config.get("text_config"), Mapping):
            config = config["text_config"]
        experts = next(
            (key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), None
        )
        if experts:
            raise LohaError(f"{source}: {experts} is {config[experts]}; only dense models are planned")
        width, heads = _size(config, "hidden_size", source), _size(config, "num_attention_heads", source)
        layers = _size(config, "num_hidden_layers", source)
        model_type = str(config.get("model_type", ""))
        shape = cls(
            layers=layers,
            width=width,
            mlp_width=_size(config, "intermediate_size", source),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_width=int(config.get("head_dim") or width // heads),
            vocabulary=_size(config, "vocab_size", source),
            tied=bool(config.get("tie_word_embeddings", False)),
            head_norms=model_type.startswith("qwen3"),
            windows=_windows(config, layers),
            longest=config.get("max_position_embeddings"),
        )
        return replace(shape, biases=_biases(config, model_type, shape))


KNOWN_SHAPES: dict[str, ModelShape] = {
    "qwen3-4b": ModelShape(
        layers=36,
        width=2560,
        mlp_width=9728,
        heads=32,
        kv_heads=8,
        head_width=128,
        vocabulary=151_936,
        head_norms=True,
        longest=262_144,
    ),
    "qwen3-embedding-0.6b": ModelShape(
        layers=28,
        width=1024,
        mlp_width=3072,
        heads=16,
        kv_heads=8,
        head_width=128,
        vocabulary=151_669,
        head_norms=True,
        longest=32_768,
    ),
}
"""Public models that a plan can name before they are downloaded. Source: their config.json on the Hugging Face hub."""

# The LCLM names stand for their encoder, all that a plan takes from them.
_ALIASES = {
    "qwen3-4b-instruct-2507": "qwen3-4b",
    "swe-master-4b": "qwen3-4b",
    "swe-master-4b-rl": "qwen3-4b",
    "0.6b-4b-lclm-4x": "qwen3-embedding-0.6b",
    "0.6b-4b-lclm-8x": "qwen3-embedding-0.6b",
    "0.6b-4b-lclm-16x": "qwen3-embedding-0.6b",
}


def read_shape(where: str | Path) -> ModelShape:
    """Return the shape of a checkpoint folder, of a config.json, or of a known model by name.

    Args:
        where: for instance `models/Qwen3-4B`, `models/Qwen3-4B/config.json` or `Qwen/Qwen3-4B-Instruct-2507`.

    Raises:
        LohaError: when there is neither such a file nor such a known name, or the file is no config.
    """
    path = Path(where)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return ModelShape.from_config(read_config(path), source=str(path))
    shape = known_shape(Path(where).name)
    if shape is None:
        raise LohaError(
            f"{where}: no folder with a config.json, and no known model name; give the folder, the config.json, or one "
            f"of {', '.join(sorted([*KNOWN_SHAPES, *_ALIASES]))}"
        )
    return shape


def known_shape(name: str) -> ModelShape | None:
    """Return the shape of a known model, by its name without the owner; None for other names."""
    return KNOWN_SHAPES.get(_ALIASES.get(name.lower(), name.lower()))


def read_config(path: Path) -> dict[str, Any]:
    """Return the mapping in a config.json.

    Raises:
        LohaError: when it is not JSON or no mapping.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LohaError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise LohaError(f"{path}: expected a mapping of sizes, got {type(config).__name__}")
    return config


def _size(config: Mapping[str, Any], key: str, source: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LohaError(
            f"{source}: {key} is {value!r}, expected a whole number of at least 1; is this a model's config?"
        )
    return value


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...] | None:
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return None
    kinds = config.get("layer_types") or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _biases(config: Mapping[str, Any], model_type: str, shape: ModelShape) -> int:
    query_key_value = shape.query_width + 2 * shape.kv_width
    if model_type == "qwen2":
        return query_key_value
    attention = query_key_value + shape.width if config.get("attention_bias") else 0
    mlp = 2 * shape.mlp_width + shape.width if config.get("mlp_bias") else 0
    return attention + mlp
