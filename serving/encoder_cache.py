"""Size of the engine's encoder cache: how many latents it keeps for prompts that are rewritten or preempted.

vLLM sizes this cache like one step's token budget. Latents are small and encoding them is the costly part, so we keep
a working set instead.
"""

from __future__ import annotations

from typing import Any

DEFAULT_CACHE_LATENTS = 65_536
"""One million source tokens at ratio 16: 16 trajectories of 60K. 320 MiB at width 2,560 in bfloat16, taken as used."""

DEFAULT_BATCH_TOKENS = 16_384
"""Encoder tokens per mini-batch of windows: bounds the encoder's activations whatever the scheduler asks for."""

CONFIG_KEY = "loha"
"""Key of our settings in vLLM's --additional-config."""


def engine_setting(vllm_config: Any, name: str, default: int) -> int:
    """Return one of our engine settings.

    Args:
        vllm_config: vLLM's configuration; our settings sit in its `additional_config["loha"]`.
        name: `encoder_cache_latents` or `encode_batch_tokens`.
        default: used when it was not set.

    Raises:
        ValueError: when it is no positive whole number.
    """
    additional = vllm_config.additional_config
    value = additional.get(CONFIG_KEY, {}).get(name, default) if isinstance(additional, dict) else default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"--additional-config loha.{name} must be a positive whole number, got {value!r}")
    return value


def register_budget(architecture: str) -> None:
    """Let vLLM apply our cache size when it finalises the configuration of this architecture."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    class LohaBudget(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            scheduler = vllm_config.scheduler_config
            latents = engine_setting(vllm_config, "encoder_cache_latents", DEFAULT_CACHE_LATENTS)
            scheduler.encoder_cache_size = max(scheduler.encoder_cache_size, latents)

    MODELS_CONFIG_MAP.setdefault(architecture, LohaBudget)
