"""How the miniature is trained: phases, sizes, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miniature.models import TinyLclm
from miniature.training import Log, Phase, train_agent, train_lclm, train_reading, train_recall, train_reconstruction
from miniature.views import Views

Bar = Callable[[str], Log]
"""Makes the log of a phase from its name."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Phases of both models and the size of the evaluation.

    `recall` holds (most facts, tokens per sequence, share of plans, phase).
    """

    recall: tuple[tuple[int, int, float, Phase], ...]
    agent: tuple[Phase, ...]
    reconstruction: Phase
    reading: tuple[Phase, ...]
    lclm: tuple[Phase, ...]
    full_share: float = 0.2
    mixed_share: float = 0.3
    eval_groups: int = 4
    eval_rows: int = 8


FULL = Plan(
    recall=(
        (8, 96, 0.0, Phase(steps=600, batch=16, lr=3e-3, target=0.92, rounds=3)),
        (8, 96, 0.75, Phase(steps=300, batch=16, lr=5e-3, target=0.96, rounds=6)),
        (32, 192, 0.4, Phase(steps=300, batch=10, lr=3e-3, target=0.97)),
    ),
    agent=(
        Phase(steps=300, batch=8, pages=(3, 6), lr=2e-3, target=0.995, rounds=2),
        Phase(steps=300, batch=5, pages=(3, 16), lr=1.5e-3),
    ),
    reconstruction=Phase(steps=320, batch=48, lr=4e-3, target=0.999, rounds=3),
    reading=(
        Phase(steps=300, batch=32, pages=(1, 2), lr=3e-3, target=0.9, rounds=4),
        Phase(steps=300, batch=24, pages=(1, 4), lr=3e-3, target=0.95, rounds=3),
        Phase(steps=200, batch=8, pages=(2, 16), lr=2e-3, target=0.98, rounds=2),
    ),
    lclm=(Phase(steps=600, batch=5, pages=(3, 16), lr=1.5e-3),),
)
QUICK = Plan(
    recall=((4, 24, 0.5, Phase(steps=2, batch=2)),),
    agent=(Phase(steps=2, batch=2, pages=(3, 4)),),
    reconstruction=Phase(steps=2, batch=4),
    reading=(Phase(steps=2, batch=2, pages=(1, 2)),),
    lclm=(Phase(steps=3, batch=2, pages=(3, 4)),),
    eval_groups=1,
    eval_rows=1,
)


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def load_base(folder: Path) -> tuple[Any, Any]:
    """Return the decoder (fp32) and tokenizer of a base folder."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load_tokenizer(folder)


def train_base_phases(decoder: Any, tokenizer: Any, plan: Plan, rng: random.Random, bar: Bar) -> None:
    """Train a new base: recall first, then short trajectories, then long ones."""
    views = Views(tokenizer)
    for facts, length, plans, phase in plan.recall:
        log = bar(f"recall {facts} facts")
        train_recall(decoder, tokenizer, phase, rng, log, facts=facts, length=length, plans=plans)
    for phase in plan.agent:
        train_agent(decoder, views, phase, rng, bar(f"agent {phase.pages[0]}-{phase.pages[1]} pages"))


def train_lclm_phases(lclm: TinyLclm, views: Views, plan: Plan, rng: random.Random, bar: Bar) -> None:
    """Train an LCLM from the base: encoder and adapter learn to hold a page, then all learn to read it.

    The decoder learns to read on bare pages first (many look-ups per position), then on trajectories.
    """
    train_reconstruction(lclm, views, plan.reconstruction, rng, bar(f"latents {lclm.ratio}x"))
    for phase in plan.reading:
        train_reading(lclm, views, phase, rng, bar(f"reading {lclm.ratio}x {phase.pages[0]}-{phase.pages[1]} pages"))
    for phase in plan.lclm:
        train_lclm(
            lclm,
            views,
            phase,
            rng,
            bar(f"lclm {lclm.ratio}x {phase.pages[0]}-{phase.pages[1]} pages"),
            full_share=plan.full_share,
            mixed_share=plan.mixed_share,
        )
