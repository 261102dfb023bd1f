"""The Hugging Face config of a serving checkpoint. Needs transformers only."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

MODEL_TYPE = "loha"
ARCHITECTURE = "LohaForCausalLM"


class LohaConfig(PretrainedConfig):
    """A decoder that reads latents, the encoder that makes them, and how.

    Args:
        text_config: the decoder's whole config, `model_type` included.
        encoder_config: the encoder's whole config.
        compression_ratio: encoder tokens per latent.
        encoder_window: encoder tokens per independent window.
        placeholder_token_id: decoder id that fills latent positions.
        loha_version: of the program that wrote the checkpoint.
        fingerprint: of the parts that went into it.
    """

    model_type = MODEL_TYPE
    sub_configs = {"text_config": AutoConfig, "encoder_config": AutoConfig}  # noqa: RUF012

    def __init__(
        self,
        text_config: dict[str, Any] | PretrainedConfig | None = None,
        encoder_config: dict[str, Any] | PretrainedConfig | None = None,
        compression_ratio: int = 16,
        encoder_window: int = 1024,
        placeholder_token_id: int = 0,
        loha_version: str = "",
        fingerprint: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.text_config = _nested(text_config)
        self.encoder_config = _nested(encoder_config)
        self.compression_ratio = compression_ratio
        self.encoder_window = encoder_window
        self.placeholder_token_id = placeholder_token_id
        self.loha_version = loha_version
        self.fingerprint = fingerprint or {}
        kwargs.setdefault("architectures", [ARCHITECTURE])
        kwargs.setdefault("tie_word_embeddings", getattr(self.text_config, "tie_word_embeddings", False))
        super().__init__(**kwargs)

    def get_text_config(self, *args: Any, **kwargs: Any) -> PretrainedConfig:
        """Return the decoder's config."""
        return self.text_config


def _nested(config: dict[str, Any] | PretrainedConfig | None) -> PretrainedConfig:
    if config is None:
        config = {"model_type": "qwen3"}  # transformers builds a default config to compare with when it writes one
    if isinstance(config, PretrainedConfig):
        return config
    return AutoConfig.for_model(**config)


def register() -> None:
    """Teach transformers the model type; calling it again does nothing."""
    AutoConfig.register(MODEL_TYPE, LohaConfig, exist_ok=True)


register()
