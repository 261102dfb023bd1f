"""The fused loss against a dense float64 reference that keeps all logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from acd.loss import certain_targets, fused_kl, kl_to
from acd.teacher import top_candidates
from tests.tolerances import LOSS_GRADIENT_FP32, LOSS_GRADIENT_FP64, LOSS_VALUE_FP32


def dense_kl(
    hidden_ND: Tensor, head_VD: Tensor, ids_NC: Tensor, logp_NC: Tensor, tail_N: Tensor, direction: str
) -> Tensor:
    """The same divergence, written as its definition: all logits, float64, autograd."""
    logq_NV = (hidden_ND @ head_VD.T).log_softmax(1)
    outside_NV = torch.ones_like(logq_NV, dtype=torch.bool).scatter_(1, ids_NC, False)
    tail_logq_N = logq_NV.masked_fill(~outside_NV, float("-inf")).logsumexp(1)
    logq_NB = torch.cat([logq_NV.gather(1, ids_NC), tail_logq_N[:, None]], 1)
    logp_NB = torch.cat([logp_NC, tail_N[:, None]], 1).double()
    if direction == "forward":
        return (logp_NB.exp() * torch.where(logp_NB > -1e9, logp_NB - logq_NB, 0.0)).sum()
    return (logq_NB.exp() * (logq_NB - logp_NB)).sum()


def problem(
    n: int, v: int, d: int, c: int, seed: int, spread: float = 3.0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random float64 student states and teacher buckets that sum to one."""
    g = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(n, d, generator=g, dtype=torch.float64)
    head_VD = torch.randn(v, d, generator=g, dtype=torch.float64) * spread / d**0.5
    logp_NV = (torch.randn(n, v, generator=g, dtype=torch.float64) * spread).log_softmax(1)
    logp_NC, ids_NC = logp_NV.topk(c, dim=1)
    tail_N = logp_NV.scatter(1, ids_NC, float("-inf")).logsumexp(1)
    return hidden_ND, head_VD, ids_NC, logp_NC, tail_N


def both_ways(
    args: tuple[Tensor, ...], direction: str, dtype: torch.dtype, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss and hidden gradient: fused in `dtype`, dense in float64 on the same rounded inputs."""
    hidden_ND, head_VD, ids_NC, logp_NC, tail_N = args
    fused_in = hidden_ND.to(dtype).requires_grad_()
    head = head_VD.to(dtype)
    total, count = fused_kl(fused_in, head, ids_NC, logp_NC, tail_N, direction=direction, chunk=chunk)  # type: ignore[arg-type]
    assert count == hidden_ND.shape[0]
    (total * 0.5).backward()
    dense_in = fused_in.detach().double().requires_grad_()
    reference = dense_kl(dense_in, head.double(), ids_NC, logp_NC, tail_N, direction)
    (reference * 0.5).backward()
    assert fused_in.grad is not None and dense_in.grad is not None
    return total.detach(), fused_in.grad, reference.detach(), dense_in.grad


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize(("n", "v", "d", "c"), [(3, 47, 5, 7), (47, 123, 31, 46), (123, 1009, 47, 64)])
def test_float64_equals_dense(n: int, v: int, d: int, c: int, chunk: int, direction: str) -> None:
    loss, grad, want_loss, want_grad = both_ways(problem(n, v, d, c, 1), direction, torch.float64, chunk)
    torch.testing.assert_close(loss, want_loss, atol=1e-9, rtol=1e-12)
    torch.testing.assert_close(grad, want_grad, atol=LOSS_GRADIENT_FP64, rtol=0)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_float32_close_to_dense(direction: str) -> None:
    loss, grad, want_loss, want_grad = both_ways(problem(123, 1009, 47, 64, 2), direction, torch.float32, 17)
    torch.testing.assert_close(loss.double(), want_loss, rtol=LOSS_VALUE_FP32, atol=0)
    torch.testing.assert_close(grad.double(), want_grad, atol=LOSS_GRADIENT_FP32, rtol=0)


def test_bfloat16_inputs_get_float32_logits() -> None:
    """On the same bfloat16 inputs the loss is as exact as in float32; only the returned gradient is rounded."""
    loss, grad, want_loss, want_grad = both_ways(problem(47, 509, 33, 16, 3), "forward", torch.bfloat16, 10)
    torch.testing.assert_close(loss.double(), want_loss, rtol=LOSS_VALUE_FP32, atol=0)
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad.double(), want_grad, rtol=2**-7, atol=1e-4)


def test_the_divisor_is_not_rounded_to_bfloat16() -> None:
    hidden_ND, head_VD, ids_NC, logp_NC, tail_N = problem(200, 123, 40, 9, 7)
    grads = []
    for divisor in (1.0, 3000.0):
        leaf = hidden_ND.bfloat16().requires_grad_()
        (fused_kl(leaf, head_VD.bfloat16(), ids_NC, logp_NC, tail_N).sum / divisor).backward()
        assert leaf.grad is not None
        grads.append(leaf.grad.double())
    bias = float((grads[1] * grads[0]).sum() * 3000 / grads[0].square().sum() - 1)
    assert abs(bias) < 3e-4, "1/3000 in bfloat16 is off by 1.4e-3"


def test_read_back_is_cross_entropy() -> None:
    hidden_ND, head_VD, ids_NC, _, _ = problem(47, 123, 9, 3, 4)
    answer_N = ids_NC[:, 2]
    fused_in, dense_in = hidden_ND.clone().requires_grad_(), hidden_ND.clone().requires_grad_()
    total, _ = kl_to(certain_targets(answer_N), fused_in, head_VD, chunk=10)
    total.backward()
    want = torch.nn.functional.cross_entropy(dense_in @ head_VD.T, answer_N, reduction="sum")
    want.backward()
    torch.testing.assert_close(total, want)
    torch.testing.assert_close(fused_in.grad, dense_in.grad, atol=LOSS_GRADIENT_FP64, rtol=0)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("log_tail", [-27.6, -60.0, float("-inf")])
def test_tiny_tails_are_finite(log_tail: float, direction: str) -> None:
    """A teacher tail of 1e-12 or nothing, and a student tail just as small: no inf, no NaN, exact in float32."""
    head_VD = torch.eye(9) * 28.0
    hidden_ND = torch.zeros(2, 9)
    hidden_ND[:, :3] = torch.tensor([1.0, 0.98, 0.97])
    ids_NC = torch.tensor([[0, 1, 2]] * 2)
    logp_NC = torch.tensor([[0.6, 0.3, 0.1]] * 2).log()
    tail_N = torch.full((2,), log_tail)
    fused_in = hidden_ND.clone().requires_grad_()
    total, _ = fused_kl(fused_in, head_VD, ids_NC, logp_NC, tail_N, direction=direction)  # type: ignore[arg-type]
    total.backward()
    assert fused_in.grad is not None
    assert torch.isfinite(total) and torch.isfinite(fused_in.grad).all()
    tail_logq = (hidden_ND @ head_VD.T).double().log_softmax(1)[:, 3:].logsumexp(1)
    if direction == "forward" and log_tail == -27.6:
        want = dense_kl(hidden_ND.double(), head_VD.double(), ids_NC, logp_NC, tail_N, "forward")
        torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-6)
    assert (tail_logq < -24).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(2, 60), st.floats(0.1, 8.0))
def test_bucketed_kl_laws(seed: int, n: int, v: int, spread: float) -> None:
    """0 <= bucketed KL <= full KL, and equal to 0 for a student that is the teacher."""
    g = torch.Generator().manual_seed(seed)
    c = 1 + seed % (v - 1)
    teacher_ND, student_ND = torch.randn(2, n, 6, generator=g, dtype=torch.float64)
    head_VD = torch.randn(v, 6, generator=g, dtype=torch.float64) * spread
    targets = top_candidates(teacher_ND, head_VD, c, chunk=5)
    logp_NV, logq_NV = (teacher_ND @ head_VD.T).log_softmax(1), (student_ND @ head_VD.T).log_softmax(1)
    full = (logp_NV.exp() * (logp_NV - logq_NV)).sum()
    bucketed = kl_to(targets, student_ND, head_VD, chunk=3).sum
    same = kl_to(targets, teacher_ND, head_VD, chunk=3).sum
    slack = 1e-6 * (1 + float(full))  # targets are float32
    assert -slack <= float(bucketed) <= float(full) + slack
    assert abs(float(same)) <= slack


def test_no_positions_still_give_a_gradient() -> None:
    hidden_ND = torch.zeros(0, 5, requires_grad=True)
    empty = torch.zeros(0, 3)
    total, count = fused_kl(hidden_ND, torch.randn(9, 5), empty.long(), empty, torch.zeros(0))
    total.backward()
    assert count == 0 and float(total.detach()) == 0 and hidden_ND.grad is not None


def test_chunk_size_does_not_matter() -> None:
    hidden_ND, head_VD, ids_NC, logp_NC, tail_N = problem(61, 123, 8, 9, 5)
    totals = {
        chunk: fused_kl(hidden_ND, head_VD, ids_NC, logp_NC, tail_N, chunk=chunk).sum for chunk in (1, 13, 61, 500)
    }
    for total in totals.values():
        torch.testing.assert_close(total, totals[1], rtol=1e-12, atol=0)


def test_unfrozen_head_is_refused() -> None:
    hidden_ND, head_VD, ids_NC, logp_NC, tail_N = problem(3, 47, 5, 7, 6)
    with pytest.raises(AssertionError, match="freeze"):
        fused_kl(hidden_ND, head_VD.requires_grad_(), ids_NC, logp_NC, tail_N)
