"""The best low-rank approximation of a weight change, by the Gram matrix of its smaller side.

With G = D D^T the eigenvectors of G are the left singular vectors of D and its eigenvalues the squared singular values;
truncating them is optimal in the Frobenius norm (Eckart-Young). Squaring costs precision, so the wanted subspace is
then refined on D itself in float64: one step of subspace iteration and a Rayleigh-Ritz projection. That leaves the
residual within 1e-5 of optimal even where G was formed in float32, which halves the time of large matrices. Of a large
matrix with a broad spectrum, as full fine-tunes have, all eigenvalues but only the leading eigenvectors are computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

REPORT_RANKS = (8, 16, 32, 64, 128, 256)
FLOAT64_SIDE = 1024
"""Up to this smaller side the Gram matrix is formed and decomposed in float64; beyond it in float32."""
OVERSAMPLING = 32
"""Directions refined beyond the rank."""
FILTERED = 416
"""Directions filtered beyond the refined ones: the further the filter's edge, the faster it separates."""
ROUNDS, DEGREE = 2, 4
"""Of the filter, orthonormalised after each round."""
DYNAMIC_RANGE = 64
"""Largest eigenvalue over the one at the filter's edge: beyond it strong directions drown the others in float32."""


@dataclass(frozen=True)
class LowRankDelta:
    """Balanced factors of a truncated delta, and its spectrum."""

    A: torch.Tensor
    """float32 `[R, in]`, rows scaled by the square roots of the singular values."""
    B: torch.Tensor
    """float32 `[out, R]`, columns scaled likewise; `B @ A` is the rank-R optimum."""
    singular_values: torch.Tensor
    """float64, all of them, descending; those beyond the refined ones to about 3e-4 of the first."""
    norm: float
    """Frobenius norm of the delta."""

    def energy(self, rank: int) -> float:
        """Return the share of the squared Frobenius norm kept by the first `rank` singular values."""
        return 1.0 if self.norm == 0.0 else self.singular_values[:rank].square().sum().item() / self.norm**2


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
        return LowRankDelta(
            flipped.B.t().contiguous(), flipped.A.t().contiguous(), flipped.singular_values, flipped.norm
        )
    wide = delta.double()
    norm = wide.norm().item()
    if norm == 0.0:
        sigma = torch.zeros(len(delta), dtype=torch.float64)
        return LowRankDelta(torch.zeros(rank, delta.shape[1]), torch.zeros(len(delta), rank), sigma, norm)
    narrow = (wide / norm).to(torch.float64 if len(delta) <= FLOAT64_SIDE else torch.float32)
    values, basis = _leading(_gram(narrow), rank + OVERSAMPLING)
    sigma = values.double().clamp_min(0).sqrt() * norm
    left, refined = _refine(wide, basis.double())
    sigma[: len(refined)] = refined
    left = left[:, :rank]
    right = left.t() @ wide  # rows are sigma_i v_i
    roots = sigma[:rank].sqrt()
    scale = torch.where(sigma[:rank] > sigma[0] * 1e-7, 1 / roots, 0.0)
    A, B = right * scale[:, None], left * torch.where(scale > 0, roots, 0.0)
    return LowRankDelta(A.float().contiguous(), B.float().contiguous(), sigma, norm)


def _gram(wide: torch.Tensor, *, blocks: int = 8) -> torch.Tensor:
    """Return `wide @ wide^T` for 9/16 of the work of a product that does not know it is symmetric."""
    gram = wide.new_empty(len(wide), len(wide))
    width = math.ceil(len(wide) / blocks)
    for start in range(0, len(wide), width):
        stop = start + width
        product = wide[start:] @ wide[start:stop].t()
        gram[start:, start:stop], gram[start:stop, start:] = product, product.t()
    return gram


def _leading(gram: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all eigenvalues of a positive semidefinite matrix, descending, and the eigenvectors of the first `count`.

    The vectors of a large float32 matrix are approximate: a basis for `_refine`.
    """
    block = count + FILTERED
    if gram.dtype == torch.float64 or 4 * block > len(gram):
        return _all_vectors(gram, count)
    values = torch.linalg.eigvalsh(gram).flip(0)
    # Chebyshev polynomials stay within 1 on [0, 2 half] and grow steeply beyond: what is not wanted is damped.
    half = values[block].item() / 2
    if not 2 * half * DYNAMIC_RANGE >= values[0].item():
        return _all_vectors(gram, count)
    generator = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(len(gram), block, generator=generator).to(gram.device))
    for _ in range(ROUNDS):
        before, now = basis, (gram @ basis) / half - basis
        for _ in range(DEGREE - 1):
            before, now = now, 2 * ((gram @ now) / half - now) - before
        basis, _ = torch.linalg.qr(now)
    _, rotation = torch.linalg.eigh(basis.t() @ (gram @ basis))
    return values, (basis @ rotation.flip(1))[:, :count]


def _all_vectors(gram: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, vectors = torch.linalg.eigh(gram)
    return values.flip(0), vectors.flip(1)[:, :count]


def _refine(wide: torch.Tensor, basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return left singular vectors and singular values from an approximate basis of their span, float64."""
    basis, _ = torch.linalg.qr(wide @ (wide.t() @ basis))
    projected = basis.t() @ wide
    values, rotation = torch.linalg.eigh(projected @ projected.t())
    return basis @ rotation.flip(1), values.flip(0).clamp_min(0).sqrt()


def rounding_floor(weight: torch.Tensor) -> float:
    """Return the largest singular value that the rounding of a stored matrix alone would give a delta.

    Rounding errors are uniform within one unit in the last place, nearly white: the top singular value of such noise
    is about its standard deviation times (sqrt(rows) + sqrt(columns)). Singular values below it carry nothing.

    Args:
        weight: as stored, in its stored dtype.
    """
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}[weight.dtype]
    _, exponent = torch.frexp(weight.float())
    ulp = torch.where(weight == 0, 0.0, torch.exp2((exponent - bits).float()))  # a zero is exact
    std = math.sqrt(ulp.double().square().mean().item() / 12)
    return std * (math.sqrt(weight.shape[0]) + math.sqrt(weight.shape[1]))
