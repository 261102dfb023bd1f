"""The vLLM plugin: teaches vLLM the checkpoint format, the model and the chat renderer.

vLLM calls `register` in every process (API server, engine core, workers), sometimes more than once.
"""

from __future__ import annotations

MODE = "loha"
"""Name of the tokenizer mode that selects our chat renderer."""

ARCHITECTURE = "LohaForCausalLM"


def register() -> None:
    """Register everything that is not registered yet. Imports nothing heavy that vLLM has not imported by then."""
    from vllm import ModelRegistry
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    from loha import hf_config
    from serving.encoder_cache import register_budget

    hf_config.register()
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, "serving.model:LohaForCausalLM")
    if MODE not in RENDERER_REGISTRY.renderers:
        RENDERER_REGISTRY.register(MODE, "serving.renderer", "LohaChatRenderer")
    if MODE not in TokenizerRegistry.tokenizers:
        TokenizerRegistry.register(MODE, "vllm.tokenizers.hf", "CachedHfTokenizer")
    register_budget(ARCHITECTURE)
