"""Two runs are compared step by step, figure by figure, and tensor by tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from acd.checkpoint import CheckpointFolder, Cursor
from acd.compare import compare_runs
from loha.errors import LohaError

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_runs.py"


def write_run(folder: Path, lines: list[dict[str, Any]], *, b: float) -> Path:
    parameters = {"gains.a": torch.nn.Parameter(torch.ones(3)), "patch.b": torch.nn.Parameter(torch.full((2,), b))}
    optimizer = torch.optim.AdamW(parameters.values())
    CheckpointFolder(folder / "checkpoints", keep_last=2).save(
        Cursor(step=len(lines), plan_key="k"), parameters, optimizer, []
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def line(step: int, *, anchor: float = 1.0, norm: float = 2.0, seconds: float = 1.0) -> dict[str, Any]:
    return {"step": step, "loss": anchor, "anchor": {"sum": anchor, "count": 4}, "grad_norm": norm, "seconds": seconds}


def test_the_first_step_and_term(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [line(0), line(1), line(2)], b=1.0)
    b = write_run(tmp_path / "b", [line(0, seconds=9), line(1, anchor=1.001, norm=2.1), line(2, anchor=3)], b=1.5)
    found = compare_runs(a, b)
    assert found["first"] == {"step": 1, "key": "anchor/sum", "values": [1.0, 1.001]}, "before what follows from it"
    assert found["tensors"] == {
        "step": 3,
        "compared": 2,
        "different": 1,
        "first": {"name": "patch.b", "difference": 0.5},
    }
    assert compare_runs(a, b, tolerance=0.01)["first"]["key"] == "grad_norm"
    same = compare_runs(a, write_run(tmp_path / "c", [line(0), line(1)], b=1.0))
    assert same["first"] is None and same["tensors"] is None and same["steps_only_in"][str(a)] == [2]
    with pytest.raises(LohaError, match=r"holds no metrics\.jsonl"):
        compare_runs(a, tmp_path)


def test_the_script_ends_with_json(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [line(0)], b=1.0)
    b = write_run(tmp_path / "b", [line(0, anchor=2.0)], b=1.0)
    words = [sys.executable, str(SCRIPT), str(a), str(b)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("they part at step 0: anchor/sum is 1.0 and 2.0\n")
    assert json.loads(done.stdout.splitlines()[-1])["same"] is False
