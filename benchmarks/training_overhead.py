"""What an ACD step costs above the bare passes that it cannot do without.

    python scripts/demo_real.py ...                        # or its first steps: trajectories, student, teacher cache
    python benchmarks/training_overhead.py --config configs/real-smollm2.yaml

ACD step: render the row, read its targets, encode, forward, fused loss, backward, clip, AdamW. Bare: the stock frozen
decoder over the same packed row of both views with ordinary cross-entropy at the same positions (forward, and backward
to its inputs), and the encoder's forward pass. Both take turns; CPU seconds of this process are compared, best of each.
Goal: at most 1.15. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from acd.config import LossConfig, load_config
from acd.corpus import Corpus
from acd.optimizer import make_optimizer
from acd.packing import Piece
from acd.parts import load_student
from acd.plan import view_rule
from acd.rows import RowBuilder, TrainingRow
from acd.step import AcdModel
from acd.targets import open_targets
from acd.views import ViewBuilder
from loha.attention import Pieces
from loha.cli import run_main
from loha.console import err, out
from loha.decoder import load_decoder
from loha.encoder import use_packed_attention


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    config: Path = Path("configs/real-smollm2.yaml")
    """Student, trajectories and teacher cache must exist."""

    tokens: int = 900
    """Capacity of the row: the shortest trajectories, both views of each, up to so many."""

    turns: int = 3
    """Of each variant."""

    seed: int = 0


def main(options: Options) -> None:
    """Compare an ACD step with the bare passes."""
    torch.manual_seed(options.seed)
    config = load_config(options.config)
    student = load_student(config, torch.device("cpu"))
    corpus = Corpus(config.data.trajectories, limit=config.data.limit)
    views = ViewBuilder(student.renderer(), view_rule(config))
    rows = RowBuilder(corpus, views, open_targets(config, student.config, student.renderer()))
    pieces = shortest(corpus, views, options.tokens)
    row = rows.build(pieces)
    model = AcdModel(student, LossConfig(chunk=config.loss.chunk), candidates=config.teacher.candidates).train()
    optimizer = make_optimizer(student, config.optimizer)
    trained = list(student.trainable().values())

    def acd_step() -> None:
        built = rows.build(pieces)
        (model(built).sum() / sum(built.counts())).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    decoder = load_decoder(student.config.base, dtype=torch.float32)
    use_packed_attention(decoder.requires_grad_(False))
    parts = {
        "acd_step": acd_step,
        "bare_passes": lambda: bare(decoder, row),
        "encoder": lambda: encode(student, row),
        "render_and_targets": lambda: rows.build(pieces) and None,
        "optimizer": lambda: optimize(optimizer, trained),
    }
    best: dict[str, float] = {}
    for turn in range(options.turns + 1):
        for name, run in parts.items():
            seconds = cpu_seconds(run)
            if turn:  # the first warms up
                best[name] = min(seconds, best.get(name, seconds))
            err(f"turn {turn}: {name} {seconds:.2f} s of CPU")
    floor = best["bare_passes"] + best["encoder"]
    result = {
        "benchmark": "training_overhead",
        "ratio": round(best["acd_step"] / floor, 3),
        "cpu_s": {name: round(seconds, 3) for name, seconds in best.items()},
        "tokens": row.tokens,
        "pieces": [(piece.view, piece.tokens) for piece in pieces],
        "positions": row.counts(),
        "latents": sum(len(ids) for _, ids in row.packed.regions),
        "rank": student.config.rank,
        "threads": torch.get_num_threads(),
    }
    out(json.dumps(result))


def shortest(corpus: Corpus, views: ViewBuilder, capacity: int) -> tuple[Piece, ...]:
    """Return both views of the shortest trajectories that fit, of one at least."""
    groups = sorted((views.pieces(corpus[e.id], 0) for e in corpus.entries()), key=lambda g: sum(p.tokens for p in g))
    taken = list(groups[0])
    for group in groups[1:]:
        if sum(piece.tokens for piece in [*taken, *group]) > capacity:
            break
        taken += group
    return tuple(taken)


def bare(decoder: torch.nn.Module, row: TrainingRow) -> None:
    """Run the stock decoder forward and backward to its inputs, with cross-entropy at the loss positions."""
    embeds_TD = decoder.get_input_embeddings()(row.packed.token_ids_T).requires_grad_(True)  # type: ignore[operator]
    pieces = Pieces.of(row.packed.lengths)
    hidden_TD = decoder.model(  # type: ignore[operator,union-attr]
        inputs_embeds=embeds_TD[None],
        position_ids=row.packed.position_ids_1T,
        attention_mask=None,
        use_cache=False,
        pieces=pieces,
    ).last_hidden_state[0]
    states_N = torch.cat([row.distill.states_N, row.read_back.states_N, row.anchor.states_N])
    logits_NV = decoder.lm_head(hidden_TD[states_N])  # type: ignore[operator]
    F.cross_entropy(logits_NV, row.packed.token_ids_T[states_N + 1]).backward()


@torch.no_grad()
def encode(student: torch.nn.Module, row: TrainingRow) -> None:
    """Run the frozen encoder over the row's observations."""
    if row.packed.regions:
        student.latent_encoder([ids for _, ids in row.packed.regions])  # type: ignore[operator]


def optimize(optimizer: torch.optim.Optimizer, trained: list[torch.nn.Parameter]) -> None:
    """Clip and step on zero gradients."""
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()


def cpu_seconds(run: Callable[[], None]) -> float:
    """Return the CPU seconds of one call."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:], prog="training_overhead.py"))
