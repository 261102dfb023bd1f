"""Training checkpoints: trained tensors, moments, random states and the plan cursor; never the frozen weights.

A checkpoint is a folder that appears under its name only when it is whole. Tensors are stored by parameter name, so
that nothing depends on an order. With the plan of the run, that is all it takes to go on bit for bit.
"""

from __future__ import annotations

import base64
import json
import random
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from loha.atomic import atomic_path
from loha.errors import LohaError
from loha.weight_files import read_header, read_json, save_tensors

FORMAT = 1
TENSORS_NAME = "trained.safetensors"
MOMENTS_NAME = "moments.safetensors"
STATE_NAME = "state.json"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """Where a run stands."""

    step: int
    """The next optimizer step."""

    plan_key: str
    best: float | None = None
    """Lowest held-out loss so far."""


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        folder: holds one `step-<n>` folder each.
        keep_last: older ones are removed.
    """

    def __init__(self, folder: Path, *, keep_last: int) -> None:
        self.folder = folder
        self.keep_last = max(1, keep_last)

    def newest(self) -> Path | None:
        """Return the newest whole checkpoint."""
        return max(self._all(), default=(0, None))[1]

    def steps(self) -> list[int]:
        """Return the steps of all whole checkpoints."""
        return sorted(step for step, _ in self._all())

    def holds(self, step: int) -> bool:
        """Return whether the checkpoint of a step is there."""
        return self.path(step).is_dir()

    def save(
        self,
        cursor: Cursor,
        trained: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        random_states: list[dict[str, Any]],
    ) -> Path:
        """Write a checkpoint and remove the ones that are too old.

        Args:
            cursor: where the run stands.
            trained: parameters by name.
            optimizer: AdamW over the same parameters.
            random_states: one per rank.

        Raises:
            LohaError: when it cannot be written, for instance on a full disk.
        """
        path = self.path(cursor.step)
        state = {
            "format": FORMAT,
            "step": cursor.step,
            "plan_key": cursor.plan_key,
            "best": cursor.best,
            "random_states": random_states,
        }
        with atomic_path(path) as temporary:
            temporary.mkdir()
            tensors, moments = whole_tensors(trained, optimizer)
            save_tensors(tensors, temporary / TENSORS_NAME)
            save_tensors(moments, temporary / MOMENTS_NAME)
            (temporary / STATE_NAME).write_text(json.dumps(state), encoding="utf-8")
        for _, old in sorted(self._all())[: -self.keep_last]:
            shutil.rmtree(old)
        return path

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step lies."""
        return self.folder / f"step-{step:08d}"

    def _all(self) -> list[tuple[int, Path]]:
        found = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in self.folder.glob("step-*"))
        return [(int(match[1]), path) for match, path in found if match]


def restore(
    path: Path, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, *, rank: int, plan_key: str
) -> Cursor:
    """Load a checkpoint into parameters, moments and random generators.

    Args:
        path: of the checkpoint.
        trained: parameters by name.
        optimizer: AdamW over the same parameters.
        rank: whose random states to take; a rank that did not exist keeps its own.
        plan_key: of the plan that the run is about to follow.

    Returns:
        Where the run stands.

    Raises:
        LohaError: when the checkpoint is damaged, or is of another student or plan.
    """
    state = check_checkpoint(path, plan_key)
    _load_trained(path, trained)
    _load_moments(path, trained, optimizer)
    if rank < len(state["random_states"]):
        set_random_state(state["random_states"][rank])
    return Cursor(step=state["step"], plan_key=state["plan_key"], best=state["best"])


def check_checkpoint(path: Path, plan_key: str) -> dict[str, Any]:
    """Return the state of a checkpoint that belongs to a plan.

    Raises:
        LohaError: when it is damaged, or belongs to another plan.
    """
    state = read_json(path / STATE_NAME)
    if state.get("format") != FORMAT:
        raise LohaError(f"{path}: checkpoint format {state.get('format')!r}, this version reads {FORMAT}")
    if missing := {"plan_key", "step", "best", "random_states"} - state.keys():
        raise LohaError(
            f"{path / STATE_NAME}: not a whole state ({', '.join(sorted(missing))} missing); delete {path} to go on "
            "from the checkpoint before it"
        )
    if state["plan_key"] != plan_key:
        raise LohaError(
            f"{path}: made with another epoch plan ({state['plan_key']}, now {plan_key}): data, views, packing, "
            "seed or renderer changed; restore the old configuration or choose another run.output_dir"
        )
    return state


def random_state() -> dict[str, Any]:
    """Return the state of every random generator of this process, as JSON data."""
    version, words, gauss = random.getstate()
    generator, keys, *rest = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [generator, _encode(np.asarray(keys).tobytes()), *rest],
        "torch": _encode(torch.get_rng_state().numpy().tobytes()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _encode(torch.cuda.get_rng_state().numpy().tobytes())
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set every random generator of this process."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    generator, keys, *rest = state["numpy"]
    np.random.set_state((generator, np.frombuffer(_decode(keys), dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def whole_tensors(
    trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return CPU copies of parameters and moments by name; all ranks must ask for sharded ones, each gives a part."""
    return {name: _plain(p) for name, p in trained.items()}, _moments(trained, optimizer)


def _moments(trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{moment}.{name}": _plain(optimizer.state[parameter][moment])
        for name, parameter in trained.items()
        for moment in _MOMENTS
        if parameter in optimizer.state
    }


@torch.no_grad()
def _load_trained(path: Path, trained: Mapping[str, Tensor]) -> None:
    tensors = _read(path / TENSORS_NAME)
    _same_names(path, tensors, trained)
    for name, parameter in trained.items():
        if tensors[name].shape != parameter.shape:
            got, expected = list(tensors[name].shape), list(parameter.shape)
            raise LohaError(f"{path}: {name} has shape {got}, the student has {expected}; was its rank changed?")
        parameter.copy_(_placed(tensors[name], parameter))


def _load_moments(path: Path, trained: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    tensors = _read(path / MOMENTS_NAME)
    if not tensors:
        return
    for name, parameter in trained.items():
        found = {moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS}
        # AdamW wants its step count beside fused moments on the device, and on the CPU otherwise.
        fused = any(group.get("fused") for group in optimizer.param_groups)
        optimizer.state[parameter] = {
            "exp_avg": _placed(found["exp_avg"], parameter),
            "exp_avg_sq": _placed(found["exp_avg_sq"], parameter),
            "step": found["step"].to(parameter.device) if fused else found["step"],
        }


def _placed(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return a whole tensor as the parameter lies: on its device, and this rank's part of it where it is sharded."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _read(path: Path) -> dict[str, Tensor]:
    read_header(path)
    return load_file(path)


def _same_names(path: Path, found: Iterable[str], expected: Iterable[str]) -> None:
    odd = sorted(set(found) ^ set(expected))
    if odd:
        raise LohaError(f"{path}: {odd[0]!r} is not in both the checkpoint and the student; is it another student's?")


def _plain(tensor: Tensor) -> Tensor:
    """Return a whole CPU copy of a (possibly sharded) tensor."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().contiguous()


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text)


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(_decode(text)), dtype=torch.uint8)
