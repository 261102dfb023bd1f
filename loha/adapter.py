"""The adapter: from the encoder's width to the decoder's input space."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from loha.errors import LohaError

ADAPTER_TENSORS = ("norm.weight", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
NORM_EPS = 1e-6


class Adapter(nn.Module):
    """RMSNorm, Linear, exact GELU, Linear; parameter names are those of `adapter.safetensors`.

    Args:
        encoder_width: E.
        decoder_width: D, also the width of the hidden layer.

    Source: the LCLM release (adapter type `mlp`).
    """

    def __init__(self, encoder_width: int, decoder_width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(encoder_width, eps=NORM_EPS)
        self.fc1 = nn.Linear(encoder_width, decoder_width)
        self.fc2 = nn.Linear(decoder_width, decoder_width)

    def forward(self, pooled_LE: torch.Tensor) -> torch.Tensor:
        """Map pooled encoder states to latents.

        Args:
            pooled_LE: `[L, E]` or with leading dimensions, any float dtype.

        Returns:
            `[L, D]` in the dtype of the parameters.
        """
        hidden = self.norm(pooled_LE.to(self.fc1.weight.dtype))
        return self.fc2(nn.functional.gelu(self.fc1(hidden)))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], *, source: str) -> Adapter:
        """Build the adapter from the tensors of an `adapter.safetensors`.

        Args:
            tensors: by name.
            source: where they come from, for the error message.

        Raises:
            LohaError: when a tensor is missing, unknown, or of a shape that does not fit the others.
        """
        missing = [name for name in ADAPTER_TENSORS if name not in tensors]
        unknown = sorted(set(tensors) - set(ADAPTER_TENSORS))
        if missing or unknown:
            wrong = f"lacks {missing[0]!r}" if missing else f"holds the unknown tensor {unknown[0]!r}"
            raise LohaError(f"{source} {wrong}; expected exactly {', '.join(ADAPTER_TENSORS)}")
        encoder_width = tensors["norm.weight"].shape[0]
        decoder_width = tensors["fc2.weight"].shape[0]
        adapter = cls(encoder_width, decoder_width)
        for name, parameter in adapter.named_parameters():
            if tensors[name].shape != parameter.shape:
                got, expected = list(tensors[name].shape), list(parameter.shape)
                raise LohaError(f"{source}: tensor {name!r} has shape {got}, expected {expected}")
            parameter.data = tensors[name].detach().clone()
        return adapter

    @classmethod
    def fresh(cls, encoder_width: int, decoder_width: int, *, output_rms: float, seed: int) -> Adapter:
        """Build an untrained adapter whose latents have the size of embedding rows.

        Args:
            encoder_width: E.
            decoder_width: D.
            output_rms: root mean square wanted in the latents, for instance that of the decoder's embedding.
            seed: of the random weights.
        """
        adapter = cls(encoder_width, decoder_width)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            adapter.fc1.weight.normal_(0.0, 1.0 / math.sqrt(encoder_width), generator=generator)
            # E[gelu(z)^2] is 0.425 for a standard normal z
            adapter.fc2.weight.normal_(0.0, output_rms / math.sqrt(0.425 * decoder_width), generator=generator)
            adapter.fc1.bias.zero_()
            adapter.fc2.bias.zero_()
        return adapter
