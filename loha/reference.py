"""The reference: a serving checkpoint run by plain transformers, exact and simple. The server is compared with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

from loha.encoder import LatentEncoder
from loha.lclm import load_weights
from loha.render import Renderer
from loha.rendering import Rendering
from loha.serving_checkpoint import ServingCheckpoint


class ReferenceModel:
    """Decoder, encoder, adapter and markers of a serving checkpoint.

    Args:
        checkpoint: opened.
        decoder: Hugging Face causal LM with the merged weights.
        latent_encoder: of the checkpoint.
        adapter: of the checkpoint.
        markers: `[2, D]`.
    """

    def __init__(
        self,
        checkpoint: ServingCheckpoint,
        decoder: Any,
        latent_encoder: LatentEncoder,
        adapter: nn.Module,
        markers: torch.Tensor,
    ) -> None:
        self.checkpoint = checkpoint
        self.decoder = decoder
        self.latent_encoder = latent_encoder
        self.adapter = adapter
        self.markers = markers
        self.renderer: Renderer = checkpoint.renderer()
        self.eos_token_ids = checkpoint.eos_token_ids()

    @classmethod
    def from_checkpoint(cls, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> ReferenceModel:
        """Load a serving checkpoint.

        Args:
            folder: made by `loha export`.
            dtype: of weights and computation.

        Raises:
            LohaError: when the folder is no complete serving checkpoint.
        """
        checkpoint = ServingCheckpoint.open(folder)
        config = checkpoint.config
        with torch.device("meta"):
            decoder = AutoModelForCausalLM.from_config(config.text_config, dtype=dtype, attn_implementation="sdpa")
            encoder = AutoModel.from_config(config.encoder_config, dtype=dtype)
        load_weights(decoder, checkpoint.weights, dtype=dtype, prefix="decoder.")
        load_weights(encoder, checkpoint.weights, dtype=dtype, prefix="encoder.")
        return cls(
            checkpoint,
            decoder.eval(),
            LatentEncoder(encoder, checkpoint.settings),
            checkpoint.adapter().to(dtype),
            checkpoint.weights.tensor("markers").to(dtype),
        )

    @torch.no_grad()
    def latents(self, encoder_ids: list[int] | tuple[int, ...]) -> torch.Tensor:
        """Return the `[count, D]` latents of one observation."""
        (pooled_LE,) = self.latent_encoder([torch.tensor(encoder_ids)])
        return self.adapter(pooled_LE)

    @torch.no_grad()
    def embeds(self, rendering: Rendering) -> torch.Tensor:
        """Return the `[T, D]` input vectors of a rendering."""
        embeds_TD = self.decoder.get_input_embeddings()(torch.tensor(rendering.token_ids)).clone()
        for region in rendering.latents:
            stop = region.start + region.count + 2
            latents_LD = self.latents(region.encoder_ids)
            assert len(latents_LD) == region.count, "the rendering and the encoder disagree on the latent count"
            embeds_TD[region.start : stop] = torch.cat([self.markers[:1], latents_LD, self.markers[1:]])
        return embeds_TD

    @torch.no_grad()
    def logits(self, rendering: Rendering) -> torch.Tensor:
        """Return the `[T, V]` logits of a rendering."""
        return self.decoder(inputs_embeds=self.embeds(rendering).unsqueeze(0), use_cache=False).logits[0]

    @torch.no_grad()
    def greedy(self, rendering: Rendering, max_new_tokens: int, *, ignore_eos: bool = False) -> list[int]:
        """Return the most likely continuation of a rendering, token by token.

        Args:
            rendering: with the generation prompt.
            max_new_tokens: at most this many.
            ignore_eos: do not stop at an end token.

        Returns:
            New decoder ids; the end token, when one comes, is the last.
        """
        cache = DynamicCache(config=self.decoder.config)
        inputs = {"inputs_embeds": self.embeds(rendering).unsqueeze(0)}
        new_ids: list[int] = []
        while len(new_ids) < max_new_tokens:
            logits = self.decoder(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            new_ids.append(int(logits[0, -1].argmax()))
            if new_ids[-1] in self.eos_token_ids and not ignore_eos:
                break
            inputs = {"input_ids": torch.tensor([[new_ids[-1]]])}
        return new_ids
