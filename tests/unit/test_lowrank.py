"""The low-rank projection against the dense product it stands for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loha.lowrank import LowRankLinear, fresh_factors


def layer(out_features: int = 11, in_features: int = 7, rank: int = 3, *, bias: bool = True) -> LowRankLinear:
    torch.manual_seed(0)
    module = LowRankLinear(nn.Linear(in_features, out_features, bias=bias), rank)
    nn.init.normal_(module.A)
    nn.init.normal_(module.B)
    return module


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (1, 47, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_dense_product(shape: tuple[int, ...], bias: bool) -> None:
    module = layer(bias=bias).double()
    x = torch.randn(*shape, dtype=torch.float64)
    expected = nn.functional.linear(x, module.weight + module.B @ module.A, module.bias)
    torch.testing.assert_close(module(x), expected, rtol=0, atol=1e-12)


def test_gradients() -> None:
    module = layer().double()
    x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, {"A": A, "B": B}, (x,))

    A, B = (p.detach().clone().requires_grad_() for p in (module.A, module.B))
    assert torch.autograd.gradcheck(function, (x, A, B))
    assert torch.autograd.gradcheck(lambda A, B: function(x.detach(), A, B), (A, B))


def test_only_the_factors_train_and_they_stay_float32() -> None:
    module = LowRankLinear(nn.Linear(7, 11).bfloat16(), 3)
    nn.init.normal_(module.A)
    nn.init.normal_(module.B)
    x = torch.randn(1, 5, 7, dtype=torch.bfloat16, requires_grad=True)
    output = module(x)
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert [n for n, p in module.named_parameters() if p.requires_grad] == ["A", "B"]
    assert module.A.grad is not None and module.A.grad.dtype == torch.float32
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert module.weight.grad is None


def test_a_zero_patch_and_a_disabled_patch_are_the_base_bit_for_bit() -> None:
    linear = nn.Linear(48, 96).bfloat16()
    x = torch.randn(33, 48, dtype=torch.bfloat16)
    expected = linear(x)
    module = LowRankLinear(linear, 8)
    nn.init.normal_(module.A)
    assert torch.equal(module(x), expected)
    nn.init.normal_(module.B)
    assert not torch.equal(module(x), expected)
    module.enabled = False
    assert torch.equal(module(x), expected)


def test_the_state_dict_keeps_the_projections_names() -> None:
    assert set(layer().state_dict()) == {"weight", "bias", "A", "B"}


def test_fresh_factors() -> None:
    A, B = fresh_factors((11, 7), 64, generator=torch.Generator().manual_seed(1))
    assert A.shape == (7, 7)
    assert B.shape == (11, 7)
    assert B.abs().max() == 0
    assert A.abs().min() > 0
    assert torch.equal(A, fresh_factors((11, 7), 64, generator=torch.Generator().manual_seed(1))[0])
