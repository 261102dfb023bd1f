"""The one loss: KL or cross-entropy from hidden states and a frozen head, without logits for more than one chunk.

Notation, per position: S the C stored candidates, p_i their teacher probabilities and p_T the teacher's mass on the
rest; z the student's logits, T the logsumexp of z outside S. The student's bucket logits are u = [z_i for i in S, T]
and its bucket distribution q = softmax(u), C + 1 entries, so no tail is ever computed as one minus a sum.

    forward   KL(p||q) = sum_b p_b (log p_b - log q_b)    gradient by u_b: q_b sum(p) - p_b
    reverse   KL(q||p) = sum_b q_b (log q_b - log p_b)    gradient by u_b: q_b (log q_b - log p_b - KL)

A candidate's logit is its bucket's logit, and T spreads its gradient over the rest of the vocabulary as a softmax
does. The head is frozen, so only the hidden gradient is needed and it is made while the logits are at hand: two
matrix products per chunk instead of three, and one [chunk, V] buffer.

Source: the ACD paper's coarsened divergence; the derivation stands in full above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Direction = Literal["forward", "reverse"]

TEACHER_FLOOR = -50.0
"""Nats. In the reverse direction a bucket without teacher mass costs this much per unit of student mass, not inf."""


_ROWS = 8192


class SumCount(NamedTuple):
    """A loss that is not divided yet: one place divides, after the counts of all ranks are known."""

    sum: Tensor
    """Scalar, nats."""

    count: int  # type: ignore[assignment]  # tuple.count is not missed
    """How many positions it sums over."""


@dataclass(frozen=True)
class Targets:
    """What the teacher predicts at N positions. Natural logs."""

    ids_NC: Tensor
    """int64, distinct within a row."""

    logp_NC: Tensor
    """float32, log-probabilities of these ids."""

    tail_N: Tensor
    """float32, log of the teacher's mass on all other ids; -inf for none."""

    def __len__(self) -> int:
        return self.ids_NC.shape[0]

    def to(self, device: torch.device) -> Targets:
        """Return the targets on `device`."""
        return Targets(*(t.to(device, non_blocking=True) for t in (self.ids_NC, self.logp_NC, self.tail_N)))

    def select(self, index: Tensor | slice) -> Targets:
        """Return the targets of some positions."""
        return Targets(self.ids_NC[index], self.logp_NC[index], self.tail_N[index])

    @staticmethod
    def join(parts: Sequence[Targets]) -> Targets:
        """Return the targets of several runs of positions, at least one."""
        columns = ([p.ids_NC for p in parts], [p.logp_NC for p in parts], [p.tail_N for p in parts])
        return Targets(*(torch.cat(column) for column in columns))


def certain_targets(ids_N: Tensor) -> Targets:
    """Return targets that put all mass on one id, which makes the forward KL a cross-entropy."""
    zero_N = torch.zeros(ids_N.shape[0], dtype=torch.float32, device=ids_N.device)
    return Targets(ids_N[:, None], zero_N[:, None], torch.full_like(zero_N, float("-inf")))


def fused_kl(
    hidden_ND: Tensor,
    lm_head_VD: Tensor,
    ids_NC: Tensor,
    logp_NC: Tensor,
    tail_N: Tensor,
    *,
    direction: Direction = "forward",
    chunk: int = 512,
) -> SumCount:
    """Return the summed divergence between stored teacher buckets and the student, and its hidden gradient.

    Args:
        hidden_ND: student hidden states after the final norm at the N loss positions; float64, float32 or bfloat16.
        lm_head_VD: frozen output matrix of the same dtype.
        ids_NC: int64 candidate ids, distinct within a row, C < V.
        logp_NC: natural log of the teacher's probability of each candidate.
        tail_N: natural log of the teacher's mass outside the candidates; -inf where there is none.
        direction: forward is KL(teacher||student), reverse is KL(student||teacher).
        chunk: positions whose logits exist at one time; memory is chunk * V * 4 bytes.

    Returns:
        The sum over positions in nats (float32, float64 for float64 input) and N. Logits are float32 also for
        bfloat16 input.
    """
    check_targets(hidden_ND, lm_head_VD, ids_NC)
    total = _FusedKL.apply(hidden_ND, lm_head_VD, ids_NC, logp_NC, tail_N, direction, chunk)
    return SumCount(total, hidden_ND.shape[0])


def kl_to(
    targets: Targets, hidden_ND: Tensor, lm_head_VD: Tensor, *, direction: Direction = "forward", chunk: int = 512
) -> SumCount:
    """`fused_kl` against a `Targets`."""
    return fused_kl(
        hidden_ND, lm_head_VD, targets.ids_NC, targets.logp_NC, targets.tail_N, direction=direction, chunk=chunk
    )


@torch.no_grad()
def score(targets: Targets, hidden_ND: Tensor, lm_head_VD: Tensor, *, chunk: int = 512) -> tuple[Tensor, Tensor]:
    """Return per position the forward KL(teacher||student) in nats and the student's likeliest id, for evaluation."""
    check_targets(hidden_ND, lm_head_VD, targets.ids_NC)
    head = Head(lm_head_VD)
    kl, best = [hidden_ND.new_zeros(0, dtype=head.compute_dtype)], [targets.ids_NC.new_zeros(0)]
    for start in range(0, len(hidden_ND), chunk):
        part = targets.select(slice(start, start + chunk))
        buckets = student_buckets(head.logits(hidden_ND[start : start + chunk]), part.ids_NC)
        logp_nB = torch.cat([part.logp_NC, part.tail_N[:, None]], dim=1).to(head.compute_dtype)
        kl.append(_divergence(logp_nB, buckets.logq_nB, "forward")[0])
        top_n, index_n = buckets.logits_nC.max(dim=1)
        candidate_n = part.ids_NC.gather(1, index_n[:, None])[:, 0]
        best.append(torch.where(top_n >= buckets.tail_max_n, candidate_n, buckets.tail_exp_nV.argmax(dim=1)))
    return torch.cat(kl), torch.cat(best)


def check_targets(hidden_ND: Tensor, lm_head_VD: Tensor, ids_NC: Tensor) -> None:
    """Assert that shapes agree, that a tail exists and that the head is frozen."""
    positions, width = hidden_ND.shape
    assert lm_head_VD.shape[1] == width, f"head of width {lm_head_VD.shape[1]} against hidden states of {width}"
    assert ids_NC.shape[0] == positions, f"{ids_NC.shape[0]} targets for {positions} positions"
    assert ids_NC.shape[1] < lm_head_VD.shape[0], "candidates fill the vocabulary: no tail is left"
    assert not lm_head_VD.requires_grad, "the fused loss gives no gradient to the head: freeze it"


class _FusedKL(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_ND: Tensor,
        lm_head_VD: Tensor,
        ids_NC: Tensor,
        logp_NC: Tensor,
        tail_N: Tensor,
        direction: Direction,
        chunk: int,
    ) -> Tensor:
        wants_grad = ctx.needs_input_grad[0]
        head = Head(lm_head_VD)
        grad_ND = torch.empty_like(hidden_ND) if wants_grad else None
        # float64 sums cost nothing next to the products and make the result independent of the chunk size.
        total = torch.zeros((), dtype=torch.float64, device=hidden_ND.device)
        for start in range(0, hidden_ND.shape[0], chunk):
            rows = slice(start, start + chunk)
            logp_nB = torch.cat([logp_NC[rows], tail_N[rows, None]], dim=1)
            loss_n, grad_nD = _chunk(head, hidden_ND[rows], ids_NC[rows], logp_nB, direction, wants_grad)
            total += loss_n.sum(dtype=torch.float64)
            if grad_ND is not None and grad_nD is not None:
                grad_ND[rows] = grad_nD
        ctx.save_for_backward(grad_ND)
        return total.to(head.compute_dtype)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad_ND,) = ctx.saved_tensors
        scaled_ND = torch.empty_like(grad_ND)
        for start in range(0, len(grad_ND), _ROWS):
            # In float32: a factor such as 1/350,000 rounded to bfloat16 first would be off by up to 0.4 %.
            scaled_ND[start : start + _ROWS] = grad_ND[start : start + _ROWS].to(grad_total.dtype) * grad_total
        return (scaled_ND, None, None, None, None, None, None)


def _chunk(
    head: Head, hidden_nD: Tensor, ids_nC: Tensor, logp_nB: Tensor, direction: Direction, wants_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Return loss and hidden gradient of n positions. A function of its own, so that its [n, V] buffer ends with it."""
    buckets = student_buckets(head.logits(hidden_nD), ids_nC)
    loss_n, grad_nB = _divergence(logp_nB.to(head.compute_dtype), buckets.logq_nB, direction)
    return loss_n, head.hidden_grad(_logit_grad(buckets, grad_nB, ids_nC)) if wants_grad else None


class Head:
    """Products with the frozen head that take its dtype in and give float32 (float64 for float64) out.

    A float32 copy of a bfloat16 head would make the product several times slower on a GPU, and a bfloat16 result
    puts a grid of 1/8 nat on logits of 16 to 32.
    """

    def __init__(self, lm_head_VD: Tensor) -> None:
        self.compute_dtype = torch.float64 if lm_head_VD.dtype == torch.float64 else torch.float32
        self.mixed = lm_head_VD.is_cuda and lm_head_VD.dtype in (torch.bfloat16, torch.float16)
        # The CPU has no product with a wider output dtype (torch 2.13): there the head is widened once per call.
        self.weight_VD = lm_head_VD if self.mixed else lm_head_VD.to(self.compute_dtype)

        self._buffer_nV: Tensor | None = None

    def logits(self, hidden_nD: Tensor) -> Tensor:
        """Return [n, V] logits in the compute dtype, which the next call overwrites."""
        if self.mixed:
            return torch.mm(hidden_nD.to(self.weight_VD.dtype), self.weight_VD.T, out_dtype=self.compute_dtype)
        # One buffer for all chunks: fresh pages would cost the CPU as much as all elementwise work.
        if self._buffer_nV is None or len(self._buffer_nV) < len(hidden_nD):
            self._buffer_nV = self.weight_VD.new_empty(len(hidden_nD), len(self.weight_VD))
        return torch.mm(hidden_nD.to(self.compute_dtype), self.weight_VD.T, out=self._buffer_nV[: len(hidden_nD)])

    def hidden_grad(self, grad_nV: Tensor) -> Tensor:
        """Return [n, D], accumulated in the compute dtype over the whole vocabulary."""
        if self.mixed:
            return torch.mm(grad_nV.to(self.weight_VD.dtype), self.weight_VD, out_dtype=self.compute_dtype)
        return grad_nV @ self.weight_VD


class Buckets(NamedTuple):
    """The student's distribution over candidates and tail, for one chunk of n positions."""

    logq_nB: Tensor
    """[n, C + 1] log-probabilities; the tail comes last."""

    logits_nC: Tensor
    tail_exp_nV: Tensor
    """exp(logit - tail_max) outside the candidates, 0 on them. Takes over the memory of the logits."""

    tail_sum_n: Tensor
    tail_max_n: Tensor


def student_buckets(logits_nV: Tensor, ids_nC: Tensor) -> Buckets:
    """Coarsen logits to candidates + tail. Overwrites `logits_nV`.

    The tail's own logsumexp is exact at any mass; one minus a sum, or a difference of two logsumexps, is noise below
    about 1e-5 and infinite below 1e-6 in float32.
    """
    logits_nC = logits_nV.gather(1, ids_nC)
    tail_nV = logits_nV.scatter_(1, ids_nC, float("-inf"))
    tail_max_n = tail_nV.amax(dim=1)
    tail_exp_nV = tail_nV.sub_(tail_max_n[:, None]).exp_()
    tail_sum_n = tail_exp_nV.sum(dim=1)
    bucket_nB = torch.cat([logits_nC, (tail_max_n + tail_sum_n.log())[:, None]], dim=1)
    return Buckets(bucket_nB.log_softmax(dim=1), logits_nC, tail_exp_nV, tail_sum_n, tail_max_n)


def _divergence(logp_nB: Tensor, logq_nB: Tensor, direction: Direction) -> tuple[Tensor, Tensor]:
    """Return the divergence per position and its gradient by the student's bucket logits."""
    if direction == "forward":
        p_nB = logp_nB.exp()
        # 0 log 0 is 0: a teacher that is certain has an infinite log-probability on the tail.
        gap_nB = torch.where(p_nB > 0, logp_nB - logq_nB, 0.0)
        return (p_nB * gap_nB).sum(1), logq_nB.exp() * p_nB.sum(1, keepdim=True) - p_nB
    if direction == "reverse":
        q_nB = logq_nB.exp()
        gap_nB = logq_nB - logp_nB.clamp_min(TEACHER_FLOOR)
        loss_n = (q_nB * gap_nB).sum(1)
        return loss_n, q_nB * (gap_nB - loss_n[:, None])
    raise AssertionError(f"direction must be forward or reverse, got {direction!r}")


def _logit_grad(buckets: Buckets, grad_nB: Tensor, ids_nC: Tensor) -> Tensor:
    """Spread bucket gradients over the vocabulary, in the memory of the logits."""
    scale_n = grad_nB[:, -1] / buckets.tail_sum_n
    return buckets.tail_exp_nV.mul_(scale_n[:, None]).scatter_(1, ids_nC, grad_nB[:, :-1])
