"""The decoder's gated MLP, lean in memory: recomputed activation, optional token chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


class LeanMLP(nn.Module):
    """The same projections and the same bits as the stock gated MLP, with less saved for the backward pass.

    Args:
        mlp: has gate_proj, up_proj and down_proj, and SiLU as its activation.
    """

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.chunks = 1
        """Token chunks in training. Each is checkpointed on its own inside the layer's checkpoint (both non-reentrant,
        which works under DDP): one more forward of the MLP for 1/chunks of its activations."""

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        """Return `down(silu(gate(x)) * up(x))`, `[B, T, D]`."""
        if self.chunks == 1 or not torch.is_grad_enabled():
            return self._chunk(hidden_BTD)
        parts = hidden_BTD.chunk(self.chunks, dim=1)
        return torch.cat([checkpoint(self._chunk, part, use_reentrant=False) for part in parts], dim=1)

    def _chunk(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(_SwiGLU.apply(self.gate_proj(hidden_BTD), self.up_proj(hidden_BTD)))


def is_gated_silu(module: nn.Module) -> bool:
    """Return whether `LeanMLP` can stand in for a module."""
    parts = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj"))
    return parts and type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


class _SwiGLU(torch.autograd.Function):
    """`silu(gate) * up`, saving only the two inputs."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return nn.functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor):
        gate, up = ctx.saved_tensors
        # Both products are written over one of their factors: two buffers of the MLP's width instead of four.
        grad_gate = grad_output * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, nn.functional.silu(gate).mul_(grad_output)
