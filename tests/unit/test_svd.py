"""The truncated delta against a float64 SVD (Eckart-Young)."""

from __future__ import annotations

import pytest
import torch

from loha import svd
from loha.svd import rounding_floor, truncate
from tests.tolerances import SVD_EXCESS


def with_spectrum(rows: int, columns: int, sigma: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(rows)
    left, _ = torch.linalg.qr(torch.randn(rows, len(sigma), dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, len(sigma), dtype=torch.float64))
    return (left * sigma) @ right.t()


SPECTRA = {
    "flat": torch.ones(40).double(),
    "power": torch.arange(1, 41).double() ** -0.7,
    "steep": torch.logspace(0, -6, 40).double(),
    "spikes": torch.cat([torch.tensor([100.0, 50.0]), torch.ones(38)]).double(),
}


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(60, 40), (40, 60), (47, 123)])
@pytest.mark.parametrize("gram", ["float64", "float32"])
def test_residual_is_optimal(spectrum: str, shape: tuple[int, int], gram: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svd, "FLOAT64_SIDE", 1000 if gram == "float64" else 1)
    monkeypatch.setattr(svd, "OVERSAMPLING", 4)
    delta = with_spectrum(*shape, SPECTRA[spectrum])
    result = truncate(delta, 9)
    sigma = torch.linalg.svdvals(delta)
    residual = (delta - result.B.double() @ result.A.double()).norm()
    optimal = sigma[9:].norm()
    assert residual / optimal - 1 < SVD_EXCESS
    torch.testing.assert_close(result.singular_values[:9], sigma[:9], rtol=1e-6, atol=0)
    assert result.energy(9) == pytest.approx((sigma[:9].norm() / sigma.norm()).item() ** 2, rel=1e-6)


@pytest.mark.parametrize("spectrum", ["noise", "power", "steep", "few"])
def test_filtered_directions_are_as_good(spectrum: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of large matrices, on one that is large next to rank, oversampling and filter."""
    for name, value in (("FLOAT64_SIDE", 1), ("OVERSAMPLING", 8), ("FILTERED", 40)):
        monkeypatch.setattr(svd, name, value)
    torch.manual_seed(3)
    delta = {
        "noise": torch.randn(300, 400).double() + with_spectrum(300, 400, SPECTRA["spikes"]),
        "power": with_spectrum(300, 400, torch.arange(1, 301).double() ** -0.7),
        "steep": with_spectrum(300, 400, torch.logspace(0, -8, 300).double()),
        "few": with_spectrum(300, 400, SPECTRA["power"]),
    }[spectrum]
    called = []
    eigh = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: called.append(len(matrix)) or eigh(matrix))
    result = truncate(delta, 10)
    assert called == [58 if spectrum == "noise" else 300, 18], "a steep spectrum needs all eigenvectors"
    sigma = torch.linalg.svdvals(delta)
    residual = (delta - result.B.double() @ result.A.double()).norm()
    assert residual / sigma[10:].norm() - 1 < SVD_EXCESS
    torch.testing.assert_close(result.singular_values[:10], sigma[:10], rtol=1e-5, atol=0)
    assert result.energy(10) == pytest.approx((sigma[:10].norm() / sigma.norm()).item() ** 2, rel=1e-5)


def test_factors_are_balanced() -> None:
    result = truncate(with_spectrum(40, 60, SPECTRA["power"]), 5)
    roots = result.singular_values[:5].sqrt().float()
    torch.testing.assert_close(result.A.norm(dim=1), roots)
    torch.testing.assert_close(result.B.norm(dim=0), roots)


def test_rank_is_clipped() -> None:
    delta = torch.randn(6, 9)
    result = truncate(delta, 64)
    assert result.A.shape == (6, 9)
    assert result.B.shape == (6, 6)
    torch.testing.assert_close(result.B @ result.A, delta, rtol=0, atol=1e-5)


@pytest.mark.parametrize("energy", [0, 2])
def test_directions_without_energy_get_zero_factors(energy: int) -> None:
    delta = with_spectrum(20, 30, torch.cat([torch.ones(energy), torch.zeros(6)]).double())
    result = truncate(delta, 5)
    assert (result.A[energy:] == 0).all()
    assert (result.B[:, energy:] == 0).all()
    torch.testing.assert_close((result.B @ result.A).double(), delta, rtol=0, atol=1e-6)
    assert torch.isfinite(result.A).all()


def test_rounding_floor_is_what_rounding_gives() -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 200) * 0.02
    stored = weight.bfloat16()
    noise = torch.linalg.svdvals((stored.float() - weight).double())[0].item()
    assert rounding_floor(stored) == pytest.approx(noise, rel=0.1)
