"""Name the first step where two training runs part: `python scripts/compare_runs.py runs/a runs/b`.

Compares metrics.jsonl step by step (times left out) and the newest checkpoints that both have. Exit status 1 when they
differ; steps that only one run has are told and are no difference. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from acd.compare import compare_runs
from loha.cli import run_main
from loha.console import out
from loha.errors import LohaError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the script."""

    one: Positional[Path]
    """run.output_dir of a run."""

    other: Positional[Path]
    """run.output_dir of another."""

    tolerance: float = 0.0
    """Relative difference that counts as none; runs with other devices or processes differ in the last bits."""


def main(options: Options) -> int:
    """Name the first step and figure, and the first tensor, in which two runs differ."""
    found = compare_runs(options.one, options.other, tolerance=options.tolerance)
    first, tensors = found["first"], found["tensors"]
    if not found["steps"] and tensors is None:
        raise LohaError(f"{options.one} and {options.other} have no step and no checkpoint in common")
    if first:
        a, b = first["values"]
        out(f"they part at step {first['step']}: {first['key']} is {a} and {b}")
    else:
        out(f"the same in all {found['steps']} common steps")
    for folder, steps in found["steps_only_in"].items():
        if steps:
            out(f"only in {folder}: {len(steps)} steps, from {steps[0]} to {steps[-1]}")
    if tensors is None:
        out("no checkpoint of one step in both")
    elif tensors["first"]:
        name, difference = tensors["first"]["name"], tensors["first"]["difference"]
        out(
            f"checkpoints of step {tensors['step']}: {tensors['different']} of {tensors['compared']} tensors differ, "
            f"first {name} ({difference})"
        )
    else:
        out(f"checkpoints of step {tensors['step']}: all {tensors['compared']} tensors are the same")
    differ = first is not None or bool(tensors and tensors["different"])
    out(json.dumps({"same": not differ, **found}))
    return int(differ)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:], prog="scripts/compare_runs.py"))
