"""The lean MLP against the stock one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from loha.mlp import LeanMLP, _SwiGLU, is_gated_silu
from tests.tiny_models import config


@pytest.mark.parametrize(("kind", "stock"), [("qwen3", Qwen3MLP), ("llama", LlamaMLP)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_as_the_stock_layer(kind: str, stock: type[torch.nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mlp = stock(config(kind)).to(dtype)
    x = torch.randn(2, 47, 32).to(dtype)
    lean = LeanMLP(copy.deepcopy(mlp))
    assert torch.equal(lean(x), mlp(x))
    assert set(lean.state_dict()) == set(mlp.state_dict())


@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_gradients_equal_the_stock_layers(chunks: int) -> None:
    torch.manual_seed(0)
    mlp = Qwen3MLP(config("qwen3")).double()
    lean = LeanMLP(copy.deepcopy(mlp))
    lean.chunks = chunks
    x = torch.randn(1, 47, 32, dtype=torch.float64)
    results = []
    for layer in (mlp, lean):
        leaf = x.clone().requires_grad_(True)
        output = layer(leaf)
        grads = torch.autograd.grad(output.square().sum(), [leaf, *layer.parameters()])
        results.append([output, *grads])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_swiglu_gradient() -> None:
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(_SwiGLU.apply, (gate, up))


class _Buffers(TorchDispatchMode):
    """Counts the results that got storage of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, torch.Tensor] = {}  # holds them, so that no storage is used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {a.data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.data_ptr() not in known:
            self.seen[result.data_ptr()] = result
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_has_the_plain_formula_s_bits_in_two_buffers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up, grad = (torch.randn(47, 123).to(dtype) * 3 for _ in range(3))
    expected = torch.ops.aten.silu_backward(grad * up, gate), grad * torch.nn.functional.silu(gate)
    output = _SwiGLU.apply(gate.requires_grad_(True), up.requires_grad_(True))
    with _Buffers() as buffers:
        got = torch.autograd.grad(output, [gate, up], grad)
    assert all(map(torch.equal, got, expected))
    assert len(buffers.seen) == 2


def test_other_activations_are_left_alone() -> None:
    assert is_gated_silu(Qwen3MLP(config("qwen3")))
    assert not is_gated_silu(Qwen3MLP(config("qwen3", hidden_act="gelu")))
