"""Trainable gains against the stock RMSNorm."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from loha import gains
from loha.gains import GainRMSNorm, is_rms_norm


def stock(kind: type[nn.Module], width: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    norm = kind(width)
    nn.init.uniform_(norm.weight, 0.5, 1.5)  # type: ignore[arg-type]
    return norm.to(dtype)


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, Qwen2RMSNorm, LlamaRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_base_gains_are_the_stock_layer_bit_for_bit(kind: type[nn.Module], dtype: torch.dtype) -> None:
    norm = stock(kind, 47, dtype)
    x = (torch.randn(3, 123, 47) * 3).to(dtype)
    expected = norm(x)
    module = GainRMSNorm(norm)
    assert torch.equal(module(x), expected)
    assert module(x).dtype == dtype
    module.gain.data += 0.25
    assert not torch.equal(module(x), expected)
    module.enabled = False
    assert torch.equal(module(x), expected)


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    module = GainRMSNorm(stock(Qwen3RMSNorm, 7, torch.float64)).double()
    x = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    gain = torch.rand(7, dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, {"gain": gain}, (x,))

    assert torch.autograd.gradcheck(function, (x, gain))
    monkeypatch.setattr(gains, "ELEMENTS_AT_ONCE", 14)  # two rows at a time, the last alone
    assert torch.autograd.gradcheck(function, (x, gain))


def test_gradients_equal_the_stock_layers() -> None:
    norm = stock(Qwen3RMSNorm, 64, torch.float32)
    module = GainRMSNorm(norm)
    norm.weight.requires_grad_(True)  # type: ignore[union-attr]
    x = torch.randn(5, 64)
    weight = torch.randn(5, 64)
    grads = []
    for layer, parameter in ((norm, norm.weight), (module, module.gain)):
        leaf = x.clone().requires_grad_(True)
        grads.append(torch.autograd.grad((layer(leaf) * weight).sum(), (leaf, parameter)))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_gains_move_at_a_small_learning_rate() -> None:
    module = GainRMSNorm(stock(Qwen3RMSNorm, 32, torch.bfloat16))
    before = module.gain.detach().clone()
    optimizer = torch.optim.AdamW([module.gain], lr=5e-5, weight_decay=0.0)
    for _ in range(10):
        optimizer.zero_grad()
        module(torch.randn(4, 32, dtype=torch.bfloat16)).float().square().sum().backward()
        optimizer.step()
    assert (module.gain != before).all()
    assert (module.gain.bfloat16() == before.bfloat16()).any()  # as bf16 masters they would have stood still


def test_finds_norms_only() -> None:
    assert is_rms_norm(stock(LlamaRMSNorm, 4, torch.float32))
    assert is_rms_norm(nn.RMSNorm(4))
    assert not is_rms_norm(nn.LayerNorm(4))
    assert not is_rms_norm(nn.RMSNorm(4, elementwise_affine=False))
