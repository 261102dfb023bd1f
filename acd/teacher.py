"""What the frozen base predicts: the top candidates at each position, their log-probabilities, and the tail's mass."""

from __future__ import annotations

import torch
from torch import Tensor

from acd.loss import Head, Targets


def candidates_for(vocabulary: int, wanted: int) -> int:
    """Return how many candidates a vocabulary can give: one id must be left for the tail."""
    return min(wanted, vocabulary - 1)


@torch.no_grad()
def top_candidates(hidden_ND: Tensor, lm_head_VD: Tensor, count: int, *, chunk: int = 256) -> Targets:
    """Return the teacher's `count` likeliest ids at each position.

    Args:
        hidden_ND: teacher hidden states after the final norm.
        lm_head_VD: its output matrix; the whole of V enters the softmax.
        count: candidates kept (C), at most V - 1.
        chunk: positions whose logits exist at one time.

    Returns:
        Targets on the same device, likeliest id first. The tail is the logsumexp of what is left, never one minus a
        sum.
    """
    head = Head(lm_head_VD)
    parts = [_chunk_targets(head.logits(hidden_nD), count) for hidden_nD in hidden_ND.split(chunk)]
    if not parts:
        empty_NC = torch.zeros(0, count, device=hidden_ND.device)
        return Targets(empty_NC.long(), empty_NC, empty_NC[:, 0])
    ids, logp, tail = zip(*parts, strict=True)
    return Targets(torch.cat(ids), torch.cat(logp), torch.cat(tail))


def _chunk_targets(logits_nV: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    top_nC, ids_nC = logits_nV.topk(count, dim=1)
    tail_n = logits_nV.scatter_(1, ids_nC, float("-inf")).logsumexp(dim=1)
    bucket_nB = torch.cat([top_nC, tail_n[:, None]], dim=1).log_softmax(dim=1)
    return ids_nC, bucket_nB[:, :-1].float(), bucket_nB[:, -1].float()
