"""The whole story on the miniature: `make demo`.

From recorded trajectories to a latent-observation endpoint with the project's own commands, and then what the paper
claims, measured: the base reads text and not latents; the SVD start reads some; ACD makes it read; without the anchor
the same training costs the plain-text skill; masking at the same K loses what was seen.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from story import Story

from loha.cli import run_main
from loha.console import out
from miniature import base_dir, lclm_dir

RUN = Path("runs/miniature")
CONFIG = "configs/miniature.yaml"
TRAIN_SEED, HELD_OUT_SEED = "101", "202"
KS = ("0", "1", "2", "3", "4", "8", "inf")
NO_ANCHOR = RUN / "acd-lambda0"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""The miniature's matrices are too small to share; two runs side by side use two cores better."""


@dataclass(frozen=True, kw_only=True)
class Options:
    base: Path | None = None
    """Base agent; the packaged miniature when left out (`scripts/build_miniature.py` makes others)."""

    lclm: Path | None = None
    """LCLM checkpoint of that base; the packaged one when left out."""

    rank: int = 64
    """Rank of the reading patch: the paper's, half of the miniature's width."""

    instances: int = 320
    """Training tasks; held-out ones are fewer and have a seed of their own."""

    held_out: int = 10
    """Held-out tasks, each of 12 to 16 observations."""


def main(options: Options) -> None:
    """Run the pipeline from recorded rows to the K sweep on the miniature, and print what it shows."""
    base, lclm = options.base or base_dir(), options.lclm or lclm_dir()
    story = Story("LOHA + ACD, the whole story on the miniature", variables=ONE_THREAD)
    shutil.rmtree(RUN, ignore_errors=True)
    data(story, base, options)
    start = ("loha", "init", "--base", base, "--lclm", lclm, "--rank", str(options.rank))
    story.step("initialise the student from the LCLM's weight delta", *start, "--out", RUN / "student")
    story.step("cache teacher log-probs", "python", "-m", "acd.cache_teacher", "--config", CONFIG)
    train = ("accelerate", "launch", "--config_file", "configs/accelerate/cpu.yaml", "acd/train.py", "--config", CONFIG)
    without = ("--loss.anchor-weight", "0", "--run.output-dir", NO_ANCHOR)
    story.together(
        {
            "train: Anchored Context Distillation": train,
            "beside it, the same without the anchor (lambda = 0)": (*train, *without),
        }
    )
    results = evaluate(story)
    story.step("export one serving checkpoint", "loha", "export", RUN / "acd/student", "--out", RUN / "serving")
    serve = ("loha", "serve", RUN / "serving", "--k", "3")
    with story.server("serve it with vLLM", *serve, log=RUN / "server.log") as url:
        sweep = ("loha", "sweep", RUN / "held_out.jsonl", "--base-url", url, "--k", *KS, "--view", "latent", "mask")
        story.step("sweep K through the endpoint", *sweep, "--max-tokens", "48", "--out", RUN / "sweep", quiet=True)
    swept = json.loads((RUN / "sweep/sweep.json").read_text())
    report(story, results, swept)
    story.finish()
    out(f"plot: {RUN / 'sweep/sweep.png'}   all numbers: {RUN / 'demo.json'}")


def data(story: Story, base: Path, options: Options) -> None:
    """Record trajectories for training and for evaluation."""
    for name, seed, instances in (
        ("train", TRAIN_SEED, options.instances),
        ("held_out", HELD_OUT_SEED, options.held_out),
    ):
        record(story, RUN, name, base, seed=seed, instances=instances, runs=2)


def record(story: Story, folder: Path, name: str, base: Path, *, seed: str, instances: int, runs: int) -> None:
    """Record trajectories, import them, keep the shortest successful one per instance in `<folder>/<name>.jsonl`."""
    raw, imported = folder / f"raw/{name}.jsonl", folder / f"imported/{name}.jsonl"
    world = ("python", "-m", "miniature.world", "--seed", seed, "--instances", str(instances), "--runs", str(runs))
    story.step(f"record {name} trajectories", *world, "--out", raw)
    story.step(f"import {name}", "loha", "data", "import", raw, "--out", imported)
    select = ("loha", "data", "select", imported, "--tokenizer", base)
    story.step(f"select {name}: the shortest success per instance", *select, "--out", folder / f"{name}.jsonl")


def evaluate(story: Story) -> dict[str, Any]:
    """Return the held-out scores of each student, teacher-forced with transformers, two at a time."""
    arms: dict[str, tuple[str | Path, ...]] = {
        "base": (RUN / "student", "--patch", "off"),
        "SVD start": (RUN / "student",),
        "ACD, lambda 1": (RUN / "acd/student",),
        "ACD, lambda 0": (NO_ANCHOR / "student",),
    }
    evaluator = ("python", "-m", "acd.evaluate", "--config", CONFIG, "--k", "0", "3", "inf", "--student")
    outputs: dict[str, str] = {}
    for first, second in (("base", "SVD start"), ("ACD, lambda 1", "ACD, lambda 0")):
        commands = {f"evaluate: {name}": (*evaluator, *arms[name]) for name in (first, second)}
        outputs |= story.together(commands, quiet=True)
    return {name: json.loads(outputs[f"evaluate: {name}"].strip().splitlines()[-1]) for name in arms}


def report(story: Story, results: dict[str, Any], swept: dict[str, Any]) -> None:
    """Print the two tables and keep the numbers."""
    table = Table(title="turns predicted exactly (teacher-forced), and drift from the base", title_justify="left")
    for column in ("student", "K=0", "K=3", "K=inf", "drift on full text, nats"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        exact = [f"{result['k'][k]['exact_turns']:.1%}" for k in ("0", "3", "inf")]
        table.add_row(name, *exact, f"{result['k']['inf']['kl']:.3f}")
    story.console.print(table)
    story.console.print((RUN / "sweep/sweep.md").read_text())
    (RUN / "demo.json").write_text(json.dumps({"evaluate": results, "sweep": swept}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:], prog="scripts/demo.py"))
