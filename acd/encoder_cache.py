"""Keep pooled encoder states from step to step: the encoder is frozen, so an observation is encoded once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from loha.encoder import LatentEncoder


class PooledCache(nn.Module):
    """Stands in for a `LatentEncoder` and remembers what it gave, in host memory, least recently used out first.

    Each missing observation is encoded on its own: its result then does not depend, not even in the last bit, on what
    else was missing, so a resumed run with an empty cache equals an uninterrupted one.

    Args:
        encoder: to ask for what is not known yet.
        max_bytes: of the pooled states.
    """

    def __init__(self, encoder: LatentEncoder, *, max_bytes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.max_bytes = max_bytes
        self.bytes = 0
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()

    def forward(self, encoder_ids: Sequence[Tensor]) -> list[Tensor]:
        """Return the pooled states of each observation, as `LatentEncoder` does."""
        device = next(self.encoder.parameters()).device
        return [self._pooled(ids).to(device, non_blocking=True) for ids in encoder_ids]

    def train(self, mode: bool = True) -> PooledCache:
        """Stay in evaluation mode."""
        return super().train(False)

    def _pooled(self, ids: Tensor) -> Tensor:
        key = hashlib.sha256(ids.to(torch.int64).cpu().numpy().tobytes()).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        (pooled_LE,) = self.encoder([ids])
        kept = self._known[key] = pooled_LE.cpu()
        self.bytes += kept.nbytes
        while self.bytes > self.max_bytes:
            self.bytes -= self._known.popitem(last=False)[1].nbytes
        return kept
