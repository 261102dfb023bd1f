"""One packed row through the student: the sums of the three loss terms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from acd.config import LossConfig
from acd.loss import SumCount, Targets, kl_to
from acd.rows import Packed, Supervised, TrainingRow
from acd.teacher import candidates_for, top_candidates
from loha.student import Student


class AcdModel(nn.Module):
    """The student with its loss, so that one module's forward pass is all that a wrapper (DDP, FSDP) has to see.

    Args:
        student: to train.
        loss: directions and chunk.
        candidates: of a live teacher.
        live: whether rows come with what a live teacher reads.
    """

    def __init__(self, student: Student, loss: LossConfig, *, candidates: int, live: bool = False) -> None:
        super().__init__()
        self.student = student
        self.loss = loss
        self.candidates = candidates
        self.live = live
        # DDP shall copy and watch only what trains: the frozen weights are the same file on every rank.
        frozen = [name for name, p in self.named_parameters() if not p.requires_grad]
        self._ddp_params_and_buffers_to_ignore = frozen + [name for name, _ in self.named_buffers()]

    def forward(self, row: TrainingRow | None) -> Tensor:
        """Return [3], the summed losses in nats of distill, read-back and anchor, undivided.

        Args:
            row: to compute; None when this rank has no more row in the step. Then a single token runs, with zero
                gradients for every parameter: other ranks wait for them, and for this rank's part of sharded weights.
        """
        if row is None:
            return self._nothing().repeat(3)
        hidden_TD = self._hidden(row.packed)
        live = self._live_targets(row)
        return torch.stack(
            [
                self._term(hidden_TD, row.distill, live, self.loss.direction).sum,
                self._term(hidden_TD, row.read_back, None, "forward").sum,
                self._term(hidden_TD, row.anchor, live, self.loss.anchor_direction).sum,
            ]
        )

    def _nothing(self) -> Tensor:
        device = self.student.markers.device
        token = Packed(torch.zeros(1, dtype=torch.long, device=device), torch.zeros(1, 1, dtype=torch.long), (1,), ())
        hidden_TD = self._hidden(token)
        if self.live:
            with self.student.patch_disabled():
                self._hidden(token)
        return 0.0 * hidden_TD.sum().float()

    def _hidden(self, packed: Packed) -> Tensor:
        embeds_TD = self.student.input_embeds(packed.token_ids_T, packed.regions)
        if not packed.regions and torch.is_grad_enabled():
            # Without a latent the adapter would have no gradient, and DDP would wait for it. FSDP2 would reduce the
            # first layer, whose input asks for none, after the adapter, and other ranks before it.
            embeds_TD = embeds_TD + _touch(self.student.groups()["adapter"].values())
        return self.student.hidden(embeds_TD[None], packed.position_ids_1T, packed.lengths)[0]

    def _live_targets(self, row: TrainingRow) -> Targets | None:
        if row.teacher is None or row.teacher_states_N is None:
            return None
        with self.student.patch_disabled():
            hidden_TD = self._hidden(row.teacher)
            head_VD = self.student.lm_head_weight
            states_ND = hidden_TD[row.teacher_states_N.to(hidden_TD.device)]
            count = candidates_for(len(head_VD), self.candidates)
            return top_candidates(states_ND, head_VD, count, chunk=self.loss.chunk)

    def _term(self, hidden_TD: Tensor, part: Supervised, live: Targets | None, direction: str) -> SumCount:
        device = hidden_TD.device
        targets = part.targets.to(device) if part.targets is not None else None
        if targets is None:
            assert live is not None and part.live_N is not None, "a term without targets needs a live teacher"
            targets = live.select(part.live_N.to(device))
        states_ND = hidden_TD[part.states_N.to(device, non_blocking=True)]
        return kl_to(
            targets,
            states_ND,
            self.student.lm_head_weight,
            direction=direction,  # type: ignore[arg-type]
            chunk=self.loss.chunk,
        )


def _touch(parameters: object) -> Tensor:
    """Return a zero that depends on the parameters."""
    return sum((0.0 * p.sum() for p in parameters), start=torch.zeros(()))  # type: ignore[attr-defined]
