"""The latent encoder: a frozen language model whose states are averaged, one vector per `ratio` tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn

from loha.attention import PACKED_ATTENTION, Pieces
from loha.errors import LohaError
from loha.layout import latent_count

TOKENS_PER_BATCH = 8192
"""Encoder tokens computed at once: what bounds the memory of a 3 MB observation."""


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """How a body becomes latents, from the LCLM's `model_config.json`."""

    ratio: int = 16
    """Tokens per latent."""

    window: int = 1024
    """Tokens per encoder window. Windows are independent; positions restart at 0 in each."""

    pooling: str = "mean"
    """How the tokens of a group become one vector: only mean is built."""

    mask: str = "causal"
    """What a token sees inside its window: only causal is built."""

    overlap: int = 0
    """Tokens that neighbouring windows share: only 0 is built."""

    adapter_type: str = "mlp"
    """Only mlp is built."""

    def __post_init__(self) -> None:
        for name, built in (("pooling", "mean"), ("mask", "causal"), ("overlap", 0), ("adapter_type", "mlp")):
            got = getattr(self, name)
            if got != built:
                raise LohaError(f"LCLM setting {name} is {got!r}; only {built!r} is supported: use another checkpoint")
        for name in ("ratio", "window"):
            got = getattr(self, name)
            if not isinstance(got, int) or isinstance(got, bool) or got < 1:
                raise LohaError(f"LCLM setting {name} is {got!r}, expected a whole number of at least 1")

    def count(self, tokens: int) -> int:
        """Return how many latents a body of `tokens` encoder tokens becomes."""
        return latent_count(tokens, ratio=self.ratio, window=self.window)


@dataclass(frozen=True)
class _Window:
    observation: int
    part: int
    ids: torch.Tensor


class LatentEncoder(nn.Module):
    """Encode observations in independent windows and average each group of `ratio` states.

    The mean is taken in float32. The last group of a window averages the states it has. No padding enters: windows
    of any lengths are packed side by side into bounded mini-batches, so the result for one observation does not depend
    on what else is in the batch (to the noise of matrix products of another size).

    Args:
        encoder: a Hugging Face base model (Qwen3Model, LlamaModel, ...) with causal attention; it is frozen.
        settings: ratio and window.
        tokens_per_batch: how many tokens are computed at once; at least one window.
    """

    def __init__(
        self, encoder: nn.Module, settings: EncoderSettings, *, tokens_per_batch: int = TOKENS_PER_BATCH
    ) -> None:
        super().__init__()
        use_packed_attention(encoder)
        self.encoder = encoder.requires_grad_(False).eval()
        self.settings = settings
        self.tokens_per_batch = max(tokens_per_batch, settings.window)

    @property
    def width(self) -> int:
        """E, the width of the pooled states."""
        return self.encoder.config.hidden_size

    def train(self, mode: bool = True) -> LatentEncoder:
        """Stay in evaluation mode: the encoder is frozen, and gradient checkpointing must not wrap it."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, encoder_ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the pooled states of each observation.

        Args:
            encoder_ids: one 1-D integer tensor per observation, without special tokens.

        Returns:
            One float32 `[count, E]` per observation, in order; count is `settings.count(len(ids))`.

        Raises:
            LohaError: when an observation has no tokens: an empty body is text, never an empty region.
        """
        windows = sorted(self._windows(encoder_ids), key=lambda window: -len(window.ids))
        parts: list[dict[int, torch.Tensor]] = [{} for _ in encoder_ids]
        for batch in self._batches(windows):
            for window, pooled_LE in zip(batch, self._encode(batch), strict=True):
                parts[window.observation][window.part] = pooled_LE
        outputs = [torch.cat([part[i] for i in range(len(part))]) for part in parts]
        for ids, pooled_LE in zip(encoder_ids, outputs, strict=True):
            assert len(pooled_LE) == self.settings.count(len(ids)), "latent count does not match the settings"
        return outputs

    def _windows(self, encoder_ids: Sequence[torch.Tensor]) -> Iterator[_Window]:
        for index, ids in enumerate(encoder_ids):
            if ids.ndim != 1 or not len(ids):
                raise LohaError(
                    f"observation {index} of {len(encoder_ids)} has no encoder tokens; an empty body must stay text"
                )
            for part, window_ids in enumerate(ids.split(self.settings.window)):
                yield _Window(index, part, window_ids)

    def _batches(self, windows: Iterable[_Window]) -> Iterator[list[_Window]]:
        batch: list[_Window] = []
        tokens = 0
        for window in windows:
            if batch and tokens + len(window.ids) > self.tokens_per_batch:
                yield batch
                batch, tokens = [], 0
            batch.append(window)
            tokens += len(window.ids)
        if batch:
            yield batch

    def _encode(self, batch: list[_Window]) -> Iterator[torch.Tensor]:
        device = self.encoder.get_input_embeddings().weight.device
        pieces = Pieces.of([len(window.ids) for window in batch], device)
        ids_1T = torch.cat([window.ids for window in batch]).to(device, torch.long).unsqueeze(0)
        hidden_1TE = self.encoder(
            input_ids=ids_1T, position_ids=pieces.position_ids(), attention_mask=None, use_cache=False, pieces=pieces
        ).last_hidden_state
        for start, count, length in pieces.runs():
            states_WTE = hidden_1TE[0, start : start + count * length].unflatten(0, (count, length))
            yield from pool(states_WTE, self.settings.ratio)


def pool(states_WTE: torch.Tensor, ratio: int) -> torch.Tensor:
    """Average each `ratio` states of each window in float32; the last group averages what it has.

    Args:
        states_WTE: `[W, T, E]`, W windows of T tokens.
        ratio: states per group.

    Returns:
        float32 `[W, ceil(T / ratio), E]`.
    """
    whole = states_WTE.shape[1] // ratio
    groups = [states_WTE[:, : whole * ratio].float().unflatten(1, (whole, ratio)).mean(2)] if whole else []
    if whole * ratio < states_WTE.shape[1]:
        groups.append(states_WTE[:, whole * ratio :].float().mean(1, keepdim=True))
    return torch.cat(groups, dim=1)


def use_packed_attention(model: Any) -> None:
    """Switch a Hugging Face model to attention over explicit pieces.

    Raises:
        LohaError: when a layer uses a sliding window, which packed rows do not support.
    """
    config = model.config
    kinds = [kind for kind, _ in groupby(getattr(config, "layer_types", None) or []) if kind != "full_attention"]
    if kinds:
        raise LohaError(f"{type(model).__name__} has {kinds[0]} layers; only full attention is supported")
    config._attn_implementation = PACKED_ATTENTION
