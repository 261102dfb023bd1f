"""Build the miniature base agent and its LCLMs from a seed, and measure both on held-out trajectories.

    python scripts/build_miniature.py --out build/miniature --seed 0

makes `base/`, `lclm-4x/` (and one folder per further --ratios) in about half an hour on one core. `--quick` only
checks, in seconds, that the whole path runs; its models know nothing.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from loha.atomic import atomic_path
from loha.console import out
from loha.errors import LohaError
from miniature import evaluate, recipe
from miniature.models import TinyLclm, new_base, new_encoder, save_lclm
from miniature.tokenizer import build_tokenizer
from miniature.training import Log
from miniature.views import Views
from miniature.world import Episode


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of scripts/build_miniature.py."""

    out: Path = Path("build/miniature")
    """Folder for base/, lclm-<ratio>x/ and evaluation.json; must not hold a base yet."""
    seed: int = 0
    """Seeds weights, training tasks and views; held-out tasks have seeds of their own."""
    ratios: tuple[int, ...] = (4,)
    """Compression ratios, one LCLM each."""
    quick: bool = False
    """A few steps of everything: a check that the path runs."""
    threads: int = 1
    """CPU threads."""
    base: Path | None = None
    """Use this base instead of training one."""


def main(options: Options) -> int:
    """Build the miniature models and print what they can do."""
    if (options.out / "base").exists() and options.base is None:
        raise LohaError(f"{options.out / 'base'} exists: give another --out, or --base to reuse it")
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    plan = recipe.QUICK if options.quick else recipe.FULL
    results: dict[str, Any] = {"seed": options.seed, "quick": options.quick}
    folder = options.base or options.out / "base"
    if options.base is None:
        _train_base(folder, options.seed, plan)
    base, tokenizer = recipe.load_base(folder)
    groups = list(evaluate.held_out(options.seed, groups=plan.eval_groups, rows=plan.eval_rows))
    views = Views(tokenizer)
    reader = evaluate.TextReader(base)
    results["base"] = _report("base", lambda k: evaluate.score(reader, views, groups, k=k), (None,))
    results["base, masked"] = _report(
        "base, masked", lambda k: evaluate.score(reader, views, groups, k=k, view="mask"), (0, 3)
    )
    for ratio in options.ratios:
        results.update(_build_lclm(options, plan, folder, ratio, groups, base))
    with atomic_path(options.out / "evaluation.json") as temporary:
        temporary.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _train_base(folder: Path, seed: int, plan: recipe.Plan) -> None:
    with atomic_path(folder) as temporary:
        build_tokenizer(temporary)
        tokenizer = recipe.load_tokenizer(temporary)
        decoder = new_base(tokenizer)
        recipe.train_base_phases(decoder, tokenizer, plan, random.Random(f"base-{seed}"), _bar)
        decoder.save_pretrained(temporary)


def _build_lclm(
    options: Options, plan: recipe.Plan, folder: Path, ratio: int, groups: list[list[Episode]], base: Any
) -> dict[str, Any]:
    """Train and write the LCLM of one ratio; return its scores and the base's on its latents."""
    torch.manual_seed(options.seed)
    decoder, tokenizer = recipe.load_base(folder)
    views = Views(tokenizer, ratio=ratio)
    lclm = TinyLclm(decoder, new_encoder(tokenizer), ratio, first_marker=len(tokenizer))
    recipe.train_lclm_phases(lclm, views, plan, random.Random(f"lclm-{options.seed}-{ratio}"), _bar)
    with atomic_path(options.out / f"lclm-{ratio}x") as temporary:
        save_lclm(lclm, tokenizer, temporary)
    name = f"lclm {ratio}x"
    return {
        name: _report(name, lambda k: evaluate.score(lclm, views, groups, k=k), evaluate.K_GRID),
        f"base on {name}": _report(
            f"base on {name}", lambda k: evaluate.score(lclm, views, groups, k=k, decoder=base), (0, 3)
        ),
    }


def _bar(name: str) -> Log:
    """Return a log that draws a progress bar with the remaining time."""
    bar: tqdm | None = None

    def log(step: int, steps: int, metrics: dict[str, float]) -> None:
        nonlocal bar
        if bar is None or step == 1:
            bar = tqdm(total=steps, desc=name, unit="step", file=sys.stderr, mininterval=1.0)
        bar.total = steps  # shrinks when a phase reaches its target early
        bar.update()
        if step % 10 == 0 or step == steps:
            bar.set_postfix({key: f"{value:.3f}" for key, value in metrics.items()}, refresh=False)
        if step == steps:
            bar.close()

    return log


def _report(
    name: str, score_at: Callable[[int | None], evaluate.Score], grid: tuple[int | None, ...]
) -> dict[str, Any]:
    """Score each K of the grid, print a line for it, and return the numbers."""
    table: dict[str, Any] = {}
    for k in grid:
        score = score_at(k)
        label = "inf" if k is None else str(k)
        table[label] = score.to_json()
        ages = " ".join(f"{age}:{right / seen:.0%}" for age, (right, seen) in sorted(score.by_age.items()))
        out(
            f"{name:24} K={label:<4} values right {score.quoted / score.turns:6.1%}  "
            f"whole turn right {score.whole / score.turns:6.1%}  ({score.turns} turns)  by age {ages}"
        )
    return table


if __name__ == "__main__":
    from loha.cli import run_main

    sys.exit(run_main(main, sys.argv[1:], prog="scripts/build_miniature.py"))
