"""The served model: a decoder that vLLM runs, with a latent encoder as its multimodal tower."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import AutoModel
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal, SupportsPP
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    init_vllm_registered_model,
    maybe_prefix,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from loha.adapter import Adapter
from loha.encoder import EncoderSettings, LatentEncoder
from serving import metrics
from serving.encoder_cache import DEFAULT_BATCH_TOKENS, engine_setting
from serving.pieces import COUNTED, FIRST, LAST
from serving.processor import MODALITY, ObservationDummies, ObservationInfo, ObservationProcessor


@MULTIMODAL_REGISTRY.register_processor(ObservationProcessor, info=ObservationInfo, dummy_inputs=ObservationDummies)
class LohaForCausalLM(nn.Module, SupportsMultiModal, SupportsPP):
    """Decoder of any architecture that vLLM serves from embeddings; encoder of any Hugging Face base model.

    Under tensor parallelism the decoder is split and the encoder is replicated: it is small, and every rank needs
    all latents.
    """

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"decoder.": "language_model.", "encoder.": "latent_encoder.encoder."}
    )

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """Return None: our chat renderer places observations by position, not by text."""
        return None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.configure_mm_token_handling(config.text_config.vocab_size, [config.placeholder_token_id])
        with self._mark_tower_model(vllm_config, {MODALITY}):
            self.latent_encoder = _latent_encoder(vllm_config)
            self.adapter = Adapter(config.encoder_config.hidden_size, config.text_config.hidden_size)
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(
                vllm_config=vllm_config,
                hf_config=config.text_config,
                prefix=maybe_prefix(prefix, "language_model"),
                architectures=config.text_config.architectures,
            )
        self.markers = nn.Parameter(torch.empty(2, config.text_config.hidden_size), requires_grad=False)
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors
        metrics.mark_engine_live()

    @torch.inference_mode()
    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings:
        """Return the input vectors of all waiting items, in order.

        Args:
            kwargs: `observation_ids`, one 1-D int32 tensor per item (or one 2-D tensor when all are of one
                length), and `observation_flags`, one value per item (see `serving.pieces`).

        Returns:
            One `[count + markers, D]` tensor per item.
        """
        ids: Any = kwargs.get("observation_ids")
        if ids is None:
            return []
        flags: list[int] = torch.as_tensor(_stacked(kwargs["observation_flags"])).flatten().tolist()
        pooled = self.latent_encoder([item.flatten() for item in ids])
        latents = self.adapter(torch.cat(pooled)).split([len(item) for item in pooled])
        self._count(ids, flags, latents)
        return [self._with_markers(item, flag) for item, flag in zip(latents, flags, strict=True)]

    def _with_markers(self, latents_LD: torch.Tensor, flags: int) -> torch.Tensor:
        parts = [latents_LD]
        if flags & FIRST:
            parts.insert(0, self.markers[:1])
        if flags & LAST:
            parts.append(self.markers[1:])
        return torch.cat(parts)

    def _count(self, ids: Any, flags: list[int], latents: Iterable[torch.Tensor]) -> None:
        if get_tensor_model_parallel_rank() != 0:
            return
        real = [bool(flag & COUNTED) for flag in flags]
        metrics.count_encoded(
            observations=sum(counted and bool(flag & LAST) for counted, flag in zip(real, flags, strict=True)),
            source_tokens=sum(item.numel() for item, counted in zip(ids, real, strict=True) if counted),
            latents=sum(len(item) for item, counted in zip(latents, real, strict=True) if counted),
        )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        """Run the decoder over embeddings (first pipeline stage) or over the previous stage's states."""
        if intermediate_tensors is not None:
            inputs_embeds = None
        return self.language_model(input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return the decoder's logits."""
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a serving checkpoint: `decoder.*`, `encoder.*`, `adapter.*`, `markers`."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def _latent_encoder(vllm_config: VllmConfig) -> LatentEncoder:
    """Build the encoder without weights, in the default dtype and on the default device that vLLM has set.

    No `.to(dtype)` afterwards: it would round the float32 rotary frequencies of the encoder too.
    """
    config = vllm_config.model_config.hf_config
    encoder = AutoModel.from_config(config.encoder_config, dtype=torch.get_default_dtype())
    settings = EncoderSettings(ratio=config.compression_ratio, window=config.encoder_window)
    batch_tokens = engine_setting(vllm_config, "encode_batch_tokens", DEFAULT_BATCH_TOKENS)
    return LatentEncoder(encoder, settings, tokens_per_batch=batch_tokens)


def _stacked(flags: Any) -> Any:
    return torch.stack([torch.as_tensor(flag) for flag in flags]) if isinstance(flags, list) else flags
