"""Attention over packed rows: several independent causal pieces in one row, with no mask and no leakage.

transformers builds a block-diagonal mask from `position_ids` only when no 2-D mask and no cache are present, and that
mask is quadratic in the row. Here the pieces are told explicitly, so neither can go wrong: each run of equally long
pieces is one batched call of scaled-dot-product attention, and on a GPU one variable-length flash call does the row.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKED_ATTENTION = "loha_packed"


@dataclass(frozen=True)
class Pieces:
    """The lengths of the pieces of one packed row, ready for the attention kernels."""

    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor
    """int32 `[pieces + 1]` on the device of the row: where each piece starts, and the total."""
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Pieces:
        """Build from piece lengths, which must be positive."""
        assert lengths and all(n > 0 for n in lengths), f"piece lengths must be positive, got {list(lengths)[:8]}"
        starts = [0, *itertools.accumulate(lengths)]
        # non_blocking: no host sync, the values are only read by kernels on the same stream
        cu_seqlens = torch.tensor(starts, dtype=torch.int32).to(device, non_blocking=True)
        return cls(tuple(lengths), cu_seqlens, max(lengths))

    def position_ids(self) -> torch.Tensor:
        """Return `[1, T]` positions that restart at 0 in each piece."""
        rows = [torch.arange(n, device=self.cu_seqlens.device) for n in self.lengths]
        return torch.cat(rows).unsqueeze(0)

    def runs(self) -> list[tuple[int, int, int]]:
        """Return (start, pieces, length) of each run of neighbouring pieces of one length."""
        found, start = [], 0
        for length, group in itertools.groupby(self.lengths):
            count = sum(1 for _ in group)
            found.append((start, count, length))
            start += count * length
        return found


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    pieces: Pieces | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally within each piece: the transformers attention interface.

    Args:
        module: the attention layer.
        query: `[B, N, T, H]`; B is 1 when `pieces` is given.
        key: `[B, kv heads, T, H]`.
        value: as `key`.
        attention_mask: must be None.
        scaling: of the scores.
        pieces: of the packed row; None is one piece per row.
        kwargs: dropout and others, not used: the decoder is frozen and its dropout is off.

    Returns:
        `[B, T, N, H]`, and None for the attention weights.
    """
    assert attention_mask is None, f"{PACKED_ATTENTION} attention takes no mask"
    if query.shape[2] != key.shape[2]:
        assert query.shape[2] == 1, "with a cache, tokens are fed one at a time after the first call"
        return _sdpa(module, query, key, value, scaling), None
    if pieces is None or len(pieces.lengths) == 1:
        return _sdpa(module, query, key, value, scaling), None
    assert query.shape[0] == 1 and sum(pieces.lengths) == query.shape[2], "piece lengths do not cover the row"
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, scaling, pieces), None
    outputs = []
    for start, count, length in pieces.runs():
        queries, keys, values = (_fold(tensor, start, count, length) for tensor in (query, key, value))
        outputs.append(_sdpa(module, queries, keys, values, scaling).flatten(0, 1))
    return torch.cat(outputs).unsqueeze(0), None


def _sdpa(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, is_causal=True)[0]


def _fold(tensor_1NTH: torch.Tensor, start: int, count: int, length: int) -> torch.Tensor:
    part = tensor_1NTH[0, :, start : start + count * length]
    return part.unflatten(1, (count, length)).transpose(0, 1)


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, pieces: Pieces
) -> torch.Tensor:
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return _varlen_kernel()(query, key, value, pieces.cu_seqlens, pieces.longest, scaling).unsqueeze(0)


@functools.cache
def _varlen_kernel() -> Callable[..., torch.Tensor]:
    """Return flash-attn's kernel where it is installed, else the one inside torch."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        from torch.nn.attention.varlen import varlen_attn

        def torch_kernel(q, k, v, cu, longest, scale):  # type: ignore[no-untyped-def]
            return varlen_attn(
                q, k, v, cu, cu, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1]
            )

        return torch_kernel

    def flash_kernel(q, k, v, cu, longest, scale):  # type: ignore[no-untyped-def]
        return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, softmax_scale=scale, causal=True)

    return flash_kernel


# transformers makes no mask for an implementation that it does not know a mask for.
AttentionInterface.register(PACKED_ATTENTION, packed_attention)
