"""Trainable RMSNorm gains: float32 masters under bf16 activations.

bf16 gains do not move at the learning rates used (1 + 5e-5 is 1 in bf16), and float32 gains in the stock layer turn all
activations float32. Here the gain is float32 and the output has the dtype of the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

ELEMENTS_AT_ONCE = 1 << 24
"""Elements whose float32 copies exist at one time (64 MiB each)."""


class GainRMSNorm(nn.Module):
    """An RMSNorm with a trainable float32 gain beside the base's frozen one.

    Args:
        norm: the base's RMSNorm; its `weight` is frozen and kept, so that `enabled = False` is the base bit for bit.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.weight.requires_grad_(False)  # type: ignore[operator,union-attr]
        self.eps: float = norm_eps(norm)
        self.gain = nn.Parameter(self.weight.detach().float().clone())
        self.enabled = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the normalised `[..., D]` hidden states times the gain, in the dtype of `hidden`.

        With the gain at its base value the result equals the stock layer's: the product of two bf16 values is exact in
        float32 and is rounded once either way.
        """
        if self.enabled:
            return _GainNorm.apply(hidden, self.gain, self.eps)
        normed = hidden.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(hidden.dtype)

    def extra_repr(self) -> str:
        """Describe the layer in a printed model."""
        return f"{tuple(self.gain.shape)}, eps={self.eps}"


class _GainNorm(torch.autograd.Function):
    """Saves the input as it is (bf16) and one float32 number per row; works through the rows in chunks."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        output = torch.empty_like(rows)
        rstd = torch.empty(len(rows), 1, dtype=_wide(hidden.dtype), device=hidden.device)
        for part in _chunks(rows):
            wide = rows[part].to(rstd.dtype)
            rstd[part] = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
            # through the input dtype, as the stock layer does: an exported bf16 gain then changes nothing else
            output[part] = gain * (wide * rstd[part]).to(hidden.dtype)
        ctx.save_for_backward(hidden, rstd, gain)
        return output.view(hidden.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor):
        hidden, rstd, gain = ctx.saved_tensors
        rows, grad_rows = hidden.reshape(-1, hidden.shape[-1]), grad_output.reshape(-1, hidden.shape[-1])
        grad_hidden = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        grad_gain = torch.zeros_like(gain)
        for part in _chunks(rows):
            normed = rows[part].to(rstd.dtype) * rstd[part]
            grad = grad_rows[part].to(rstd.dtype)
            grad_gain += (grad * normed.to(hidden.dtype)).sum(0)
            if grad_hidden is not None:
                grad = grad * gain
                grad_hidden[part] = rstd[part] * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        return None if grad_hidden is None else grad_hidden.view(hidden.shape), grad_gain, None


def is_rms_norm(module: nn.Module) -> bool:
    """Return whether a module is a Hugging Face RMSNorm with a gain vector."""
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("RMSNorm") and isinstance(weight, nn.Parameter) and weight.ndim == 1


def norm_eps(norm: nn.Module) -> float:
    """Return the epsilon of a Hugging Face or torch RMSNorm."""
    eps = getattr(norm, "variance_epsilon", None)
    return float(norm.eps if eps is None else eps)  # type: ignore[arg-type]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(rows: torch.Tensor) -> Iterator[slice]:
    step = max(1, ELEMENTS_AT_ONCE // rows.shape[-1])
    return (slice(start, start + step) for start in range(0, len(rows), step))
