"""Where do two training runs part: the first step and figure of their metrics, the first tensor of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from acd.checkpoint import MOMENTS_NAME, TENSORS_NAME, CheckpointFolder
from acd.metrics import METRICS_NAME, TIMES, leaves, read_lines
from loha.errors import LohaError
from loha.weight_files import read_header


def compare_runs(one: Path, other: Path, *, tolerance: float = 0.0) -> dict[str, Any]:
    """Return where two runs part.

    Args:
        one: `run.output_dir` of a run.
        other: of another.
        tolerance: relative difference of two numbers that counts as none.

    Returns:
        `steps` compared, `first` (step, key and both values of the first difference, or None), `steps_only_in`, and
        `tensors` (checkpoint step, how many differ, name and largest difference of the first; None without
        checkpoints of one step).

    Raises:
        LohaError: when a folder holds no run.
    """
    first, steps = None, 0
    runs = [_metrics(folder) for folder in (one, other)]
    for step in sorted(runs[0].keys() & runs[1].keys()):
        steps += 1
        first = _difference(runs[0][step], runs[1][step], tolerance)
        if first is not None:
            break
    return {
        "steps": steps,
        "first": first,
        "steps_only_in": {
            str(folder): sorted(mine.keys() - theirs.keys())
            for folder, mine, theirs in ((one, runs[0], runs[1]), (other, runs[1], runs[0]))
        },
        "tensors": _tensors(one, other, tolerance),
    }


def _metrics(folder: Path) -> dict[int, dict[str, Any]]:
    lines = read_lines(folder / METRICS_NAME)
    if not lines:
        raise LohaError(f"{folder}: holds no {METRICS_NAME} with steps; name the run.output_dir of a run")
    return {line["step"]: line for line in lines}


def _difference(one: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> dict[str, Any] | None:
    """Return the first figure that differs, in the order in which a step computes them; times are not compared."""
    a, b = (dict(leaves(line, separator="/")) for line in (one, other))
    order = ("tokens", "distill", "read_back", "anchor", "loss", "grad_norm", "lr")
    keys = sorted(a.keys() | b.keys(), key=lambda key: (_rank(key, order), key))
    for key in keys:
        if key.partition("/")[0] not in TIMES and not _close(a.get(key), b.get(key), tolerance):
            return {"step": one["step"], "key": key, "values": [a.get(key), b.get(key)]}
    return None


def _rank(key: str, order: tuple[str, ...]) -> int:
    term = key.partition("/")[0]
    return order.index(term) if term in order else len(order)


def _close(a: Any, b: Any, tolerance: float) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b))
    return a == b


def _tensors(one: Path, other: Path, tolerance: float) -> dict[str, Any] | None:
    """Compare the newest checkpoints that both runs have."""
    folders = [CheckpointFolder(folder / "checkpoints", keep_last=1) for folder in (one, other)]
    common = set(folders[0].steps()) & set(folders[1].steps())
    if not common:
        return None
    step = max(common)
    found: dict[str, Any] = {"step": step, "compared": 0, "different": 0, "first": None}
    for name in (TENSORS_NAME, MOMENTS_NAME):
        paths = [folder.path(step) / name for folder in folders]
        for path in paths:
            read_header(path)
        with safe_open(paths[0], framework="pt") as a, safe_open(paths[1], framework="pt") as b:
            for key in sorted({*a.keys(), *b.keys()}):
                found["compared"] += 1
                difference = _tensor_difference(a, b, key, tolerance)
                if difference is not None:
                    found["different"] += 1
                    found["first"] = found["first"] or {"name": key, "difference": difference}
    return found


def _tensor_difference(a: Any, b: Any, key: str, tolerance: float) -> float | str | None:
    if key not in a.keys() or key not in b.keys():  # noqa: SIM118 - a safetensors file is no mapping
        return "only in one"
    left, right = a.get_tensor(key), b.get_tensor(key)
    if left.shape != right.shape:
        return f"shapes {list(left.shape)} and {list(right.shape)}"
    largest = float((left.double() - right.double()).abs().max()) if left.numel() else 0.0
    scale = float(left.double().abs().max()) if left.numel() else 0.0
    same = left.equal(right) or (tolerance > 0 and largest <= tolerance * scale)
    return None if same else largest
