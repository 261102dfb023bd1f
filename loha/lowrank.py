"""The reading patch: a low-rank update beside a frozen projection, lean in memory.

W = W0 + B A with float32 masters A `[R, in]` and B `[out, R]`; the product runs in the dtype of the activations and is
accumulated in place into the frozen projection's output, so no full-size temporary and no scaling multiply exist.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LowRankLinear(nn.Module):
    """A frozen Linear plus a trainable low-rank update.

    `weight` and `bias` are the frozen Linear's own tensors, so the decoder's state dict keeps its names.

    Args:
        linear: the projection to wrap; it is frozen.
        rank: R, at most the smaller side of the projection.
    """

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        assert 1 <= rank <= min(linear.weight.shape), f"rank {rank} does not fit {tuple(linear.weight.shape)}"
        device = linear.weight.device
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight.requires_grad_(False)
        self.bias = None if linear.bias is None else linear.bias.requires_grad_(False)
        self.A = nn.Parameter(torch.zeros(rank, linear.in_features, dtype=torch.float32, device=device))
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank, dtype=torch.float32, device=device))
        self.enabled = True

    def forward(self, input_TI: torch.Tensor) -> torch.Tensor:
        """Return `input @ (W0 + B A)^T + bias`; the frozen projection's own bits when the patch is off."""
        if not self.enabled:
            return nn.functional.linear(input_TI, self.weight, self.bias)
        return _LowRank.apply(input_TI, self.weight, self.bias, self.A, self.B)

    def extra_repr(self) -> str:
        """Describe the layer in a printed model."""
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.A.shape[0]}"


class _LowRank(torch.autograd.Function):
    """Saves the input and its R-wide projection; casts of A and B are remade in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        input_TI: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        A: torch.Tensor,
        B: torch.Tensor,
    ):
        output = nn.functional.linear(input_TI, weight, bias)
        reduced = nn.functional.linear(input_TI, A.to(input_TI.dtype))
        _rows(output).addmm_(_rows(reduced), B.to(input_TI.dtype).t())
        ctx.save_for_backward(input_TI, reduced, weight, A, B)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor):
        input_TI, reduced, weight, A, B = ctx.saved_tensors
        grad_output = _rows(grad_output)
        grad_reduced = grad_output @ B.to(grad_output.dtype)
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = grad_output @ weight
            grad_input.addmm_(grad_reduced, A.to(grad_output.dtype))
            grad_input = grad_input.view(input_TI.shape)
        grad_A = _outer(grad_reduced, _rows(input_TI), A.dtype) if ctx.needs_input_grad[3] else None
        grad_B = _outer(grad_output, _rows(reduced), B.dtype) if ctx.needs_input_grad[4] else None
        return grad_input, None, None, grad_A, grad_B


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, tensor.shape[-1]) if tensor.is_contiguous() else tensor.reshape(-1, tensor.shape[-1])


def _outer(left_TO: torch.Tensor, right_TI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `left^T right`, summed over tokens, in the dtype of the masters.

    On a GPU the product leaves the float32 accumulator without a rounding to bf16 first.
    """
    if left_TO.is_cuda and left_TO.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32:
        return torch.mm(left_TO.t(), right_TI, out_dtype=torch.float32)
    return (left_TO.t() @ right_TI).to(dtype)


def fresh_factors(
    shape: tuple[int, ...], rank: int, *, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors of a zero patch: A random (as PEFT draws it), B zero.

    Args:
        shape: `(out, in)` of the projection.
        rank: wanted; clipped to the smaller side.
        generator: of the random numbers.

    Returns:
        float32 A `[R, in]` and B `[out, R]`.
    """
    out_features, in_features = shape
    rank = min(rank, *shape)
    bound = 1.0 / math.sqrt(in_features)
    A = torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)
    return A, torch.zeros(out_features, rank)
