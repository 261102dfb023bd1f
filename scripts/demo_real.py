"""The same pipeline on real trajectories with real weights: `make demo-real`.

SmolLM2-135M-Instruct is the base, its own first layers are the encoder, the patch starts at zero. A few steps on a
CPU make no good reader of latents: this shows that the code carries real text, real tool calls and a real language
model of another architecture from the recorded rows to the K sweep, and that the distillation term falls.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from story import Story

from loha.cli import run_main
from loha.errors import LohaError

RUN = Path("runs/demo-real")
CONFIG = "configs/real-smollm2.yaml"
RATIO = "8"


@dataclass(frozen=True, kw_only=True)
class Options:
    data: Path
    """Folder of real test data that holds swe_master/."""


def main(options: Options) -> None:
    """Run import, init, teacher cache, training, export, server and K sweep on real data."""
    if not (options.data / "swe_master").is_dir():
        raise LohaError(f"{options.data}/swe_master: no such folder; make demo-real SHARED_DATA=FOLDER names another")
    story = Story("LOHA + ACD on real trajectories with SmolLM2-135M")
    shutil.rmtree(RUN, ignore_errors=True)
    prepare(story, options.data)
    evaluate = ("python", "-m", "acd.evaluate", "--config", CONFIG, "--k", "0", "inf", "--turns", "2", "--student")
    before = last_json(story.step("evaluate the start on held-out trajectories", *evaluate, RUN / "start", quiet=True))
    story.step(
        "train",
        "accelerate",
        "launch",
        "--config_file",
        "configs/accelerate/cpu.yaml",
        "acd/train.py",
        "--config",
        CONFIG,
    )
    after = last_json(story.step("evaluate the trained student", *evaluate, RUN / "acd/student", quiet=True))
    story.step("export", "loha", "export", RUN / "acd/student", "--out", RUN / "serving")
    serve = ("loha", "serve", RUN / "serving", "--max-model-len", "4096", "--tool-call-parser", "none")
    with story.server("serve with vLLM", *serve, log=RUN / "server.log") as url:
        sweep = ("loha", "sweep", RUN / "held_out.jsonl", "--base-url", url, "--out", RUN / "sweep")
        grid = ("--k", "0", "1", "3", "inf", "--turns", "every:2", "--max-tokens", "24", "--concurrency", "4")
        story.step("sweep K through the endpoint", *sweep, *grid)
    report(story, before, after)
    story.finish()


def prepare(story: Story, data: Path) -> None:
    """Import and shorten the trajectories, write the models, fill the teacher cache."""
    imported = RUN / "trajectories.jsonl"
    story.step("import recorded runs", "loha", "data", "import", data / "swe_master", "--out", imported)
    shorten = ("python", "scripts/shorten_trajectories.py", "--trajectories", imported, "--max-turns", "4")
    story.step("cut them to short rows", *shorten, "--out", RUN / "train.jsonl", "--offset", "1", "--every", "2")
    story.step("and hold others out", *shorten, "--out", RUN / "held_out.jsonl", "--every", "4")
    weights = ("python", "scripts/smollm2_checkpoint.py", "--out", RUN / "base", "--encoder-out", RUN / "encoder")
    story.step("write SmolLM2 and its first layers as encoder", *weights, "--encoder-layers", "4", "--ratio", RATIO)
    start = ("loha", "init", "--base", RUN / "base", "--encoder", RUN / "encoder", "--patch", "zero", "--rank", "16")
    story.step("initialise the student", *start, "--out", RUN / "start")
    story.step("cache the teacher", "python", "-m", "acd.cache_teacher", "--config", CONFIG)


def report(story: Story, before: dict, after: dict) -> None:
    """Print held-out KL before and after, and the training curve's ends."""
    table = Table(title="held-out KL(teacher||student), nats per assistant token", title_justify="left")
    for column in ("", "K=0", "K=inf"):
        table.add_column(column, justify="right")
    for name, result in (("start: zero patch, untrained adapter", before), ("after ACD", after)):
        table.add_row(name, *(f"{result['k'][k]['kl']:.3f}" for k in ("0", "inf")))
    story.console.print(table)
    steps = [json.loads(line) for line in (RUN / "acd/metrics.jsonl").open()]
    first, last = (epoch_mean(part) for part in (steps[: len(steps) // 2], steps[-(len(steps) // 2) :]))
    story.console.print(f"training distill KL, first epoch {first:.3f}, last epoch {last:.3f} nats per token")
    if not last < first or not after["k"]["0"]["kl"] < before["k"]["0"]["kl"]:
        raise LohaError("the distillation KL did not fall")


def epoch_mean(steps: list[dict]) -> float:
    """Return the mean distill KL over all positions of some steps."""
    return sum(s["distill"]["sum"] for s in steps) / sum(s["distill"]["count"] for s in steps)


def last_json(output: str) -> dict:
    """Return the object on the last line of a command's output."""
    return json.loads(output.strip().splitlines()[-1])


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:], prog="scripts/demo_real.py"))
