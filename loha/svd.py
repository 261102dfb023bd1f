"""The best low-rank approximation of a weight change, exactly, on the smaller side of the matrix.

With G = D D^T (or D^T D, whichever is smaller) in float64, the eigenvectors of G are the singular vectors of D and its
eigenvalues the squared singular values. Truncating them is optimal in the Frobenius norm (Eckart-Young).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

REPORT_RANKS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class LowRankDelta:
    """Balanced factors of a truncated delta, and its spectrum."""

    A: torch.Tensor
    """float32 `[R, in]`, rows scaled by the square roots of the singular values."""
    B: torch.Tensor
    """float32 `[out, R]`, columns scaled likewise; `B @ A` is the rank-R optimum."""
    singular_values: torch.Tensor
    """float64, all of them, descending."""

    def energy(self, rank: int) -> float:
        """Return the share of the squared Frobenius norm kept by the first `rank` singular values."""
        squares = self.singular_values.square()
        total = squares.sum().item()
        return 1.0 if total == 0.0 else squares[:rank].sum().item() / total


def truncate(delta: torch.Tensor, rank: int) -> LowRankDelta:
    """Return the best approximation of a matrix by one of rank at most `rank`.

    Args:
        delta: `[out, in]`, any float dtype.
        rank: clipped to the smaller side.

    Returns:
        Factors whose residual is within 1e-5 of optimal, each scaled by the square roots of the singular values: one
        learning rate then moves both alike. Directions without energy get zero factors.
    """
    rank = min(rank, *delta.shape)
    if delta.shape[0] > delta.shape[1]:
        flipped = truncate(delta.t(), rank)
        return LowRankDelta(flipped.B.t().contiguous(), flipped.A.t().contiguous(), flipped.singular_values)
    wide = delta.double()
    values, vectors = torch.linalg.eigh(wide @ wide.t())
    sigma = values.flip(0).clamp_min(0).sqrt()
    left = vectors.flip(1)[:, :rank]
    right = left.t() @ wide  # rows are sigma_i v_i
    # sigma from the projection itself: more exact than the square root of a small eigenvalue
    norms = right.norm(dim=1, keepdim=True)
    roots = norms.sqrt()
    right = torch.where(norms > sigma[0] * 1e-9, right / roots.clamp_min(1e-300), 0.0)
    left = torch.where(norms.t() > sigma[0] * 1e-9, left * roots.t(), 0.0)
    return LowRankDelta(right.float().contiguous(), left.float().contiguous(), sigma)


def rounding_floor(weight: torch.Tensor) -> float:
    """Return the largest singular value that the rounding of a stored matrix alone would give a delta.

    Rounding errors are uniform within one unit in the last place, nearly white: the top singular value of such noise
    is about its standard deviation times (sqrt(rows) + sqrt(columns)). Singular values below it carry nothing.

    Args:
        weight: as stored, in its stored dtype.
    """
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}[weight.dtype]
    _, exponent = torch.frexp(weight.float())
    ulp = torch.exp2((exponent - bits).float())
    std = math.sqrt(ulp.double().square().mean().item() / 12)
    return std * (math.sqrt(weight.shape[0]) + math.sqrt(weight.shape[1]))
