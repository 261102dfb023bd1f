"""The adapter: its formula, its tensors, and errors about them."""

from __future__ import annotations

import math

import pytest
import torch

from loha.adapter import ADAPTER_TENSORS, Adapter
from loha.errors import LohaError


def tensors(encoder_width: int = 5, decoder_width: int = 7) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "norm.weight": torch.rand(encoder_width),
        "fc1.weight": torch.randn(decoder_width, encoder_width),
        "fc1.bias": torch.randn(decoder_width),
        "fc2.weight": torch.randn(decoder_width, decoder_width),
        "fc2.bias": torch.randn(decoder_width),
    }


def test_formula() -> None:
    weights = {name: tensor.double() for name, tensor in tensors().items()}
    adapter = Adapter.from_tensors(weights, source="x")
    x = torch.randn(3, 5, dtype=torch.float64)
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weights["norm.weight"]
    inner = normed @ weights["fc1.weight"].T + weights["fc1.bias"]
    gelu = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    expected = gelu @ weights["fc2.weight"].T + weights["fc2.bias"]
    torch.testing.assert_close(adapter(x), expected, rtol=0, atol=1e-12)


def test_names_are_those_of_the_file() -> None:
    assert set(dict(Adapter(5, 7).named_parameters())) == set(ADAPTER_TENSORS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc2.bias": None}, "lacks 'fc2.bias'"),
        ({"fc3.bias": torch.zeros(1)}, "unknown tensor 'fc3.bias'"),
        ({"fc1.weight": torch.zeros(7, 6)}, r"'fc1.weight' has shape \[7, 6\], expected \[7, 5\]"),
    ],
)
def test_wrong_tensors(change: dict[str, torch.Tensor | None], message: str) -> None:
    wrong = {name: tensor for name, tensor in (tensors() | change).items() if tensor is not None}
    with pytest.raises(LohaError, match=message):
        Adapter.from_tensors(wrong, source="adapter.safetensors")


def test_fresh_latents_have_the_asked_size() -> None:
    adapter = Adapter.fresh(256, 192, output_rms=0.02, seed=3)
    latents = adapter(torch.randn(400, 256) * 5)
    assert 0.7 < latents.square().mean().sqrt().item() / 0.02 < 1.4
    again = Adapter.fresh(256, 192, output_rms=0.02, seed=3)
    assert torch.equal(adapter.fc2.weight, again.fc2.weight)
