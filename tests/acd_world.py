"""A tiny world for training tests: random base, LCLM and student, generated trajectories, one configuration."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acd.config import Config, config_yaml, parse_config
from loha.init_student import Options, init_student
from loha.trajectory import Trajectory, write_trajectories
from tests.tiny_models import write_decoder, write_lclm

WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty")


@dataclass(frozen=True)
class World:
    """Where the parts of a tiny world lie."""

    root: Path
    base: Path
    lclm: Path
    student: Path
    trajectories: Path

    def config(self, name: str = "run", **sections: dict[str, Any]) -> Config:
        """Return a configuration that writes into `root/name`; sections override single keys."""
        values: dict[str, dict[str, Any]] = {
            "data": {"trajectories": str(self.trajectories)},
            "model": {"student": str(self.student), "dtype": "float32"},
            "teacher": {"cache": str(self.root / "cache"), "trajectories_per_shard": 3},
            "packing": {"tokens_per_row": 2600, "tokens_per_step": 7800},
            "loss": {"chunk": 64},
            "optimizer": {"lr_patch": 1e-3, "lr_gains": 1e-3, "lr_adapter": 5e-4},
            "run": {"output_dir": str(self.root / name), "checkpoint_every": 2, "trackers": []},
        }
        for section, changes in sections.items():
            values[section] = values.get(section, {}) | changes
        return parse_config(values, source="test")

    def write_config(self, name: str = "run", **sections: dict[str, Any]) -> Path:
        """Write such a configuration as YAML and return the file."""
        path = self.root / f"{name}.yaml"
        path.write_text(config_yaml(self.config(name, **sections)))
        return path


def make_world(root: Path, *, trajectories: int = 11) -> World:
    """Write a tiny world under `root`."""
    base = write_decoder(root / "base")
    lclm = write_lclm(root / "lclm", base)
    files, _ = init_student(Options(base=base, lclm=lclm, rank=4, out=root / "student"))
    files.write(root / "student")
    write_trajectories(root / "trajectories.jsonl", (make_trajectory(i) for i in range(trajectories)))
    return World(root, base, lclm, root / "student", root / "trajectories.jsonl")


def make_trajectory(number: int) -> Trajectory:
    """Return a generated agent run with 2 to 5 observations, one of them too short to become latent."""
    rng = random.Random(number)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You fix bugs."},
        {"role": "user", "content": f"Fix bug {number}."},
    ]
    for step in range(rng.randint(2, 5)):
        call = {
            "id": f"call{step}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"cmd": f"cat {rng.choice(WORDS)}.py"})},
        }
        messages.append({"role": "assistant", "content": f"Look at {rng.choice(WORDS)}.", "tool_calls": [call]})
        body = "ok" if step == 1 else make_body(rng, step)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": body})
    messages.append({"role": "assistant", "content": f"Done: {rng.choice(WORDS)}."})
    return Trajectory(id=f"t{number:03d}", instance_id=f"i{number}", resolved=True, messages=messages)


def make_body(rng: random.Random, step: int) -> str:
    """Return an observation with values, a path and prose, 160 to 400 characters."""
    lines = [f"src/{rng.choice(WORDS)}/{rng.choice(WORDS)}{step}.py: 3 matches"]
    lines += [f"{word}_{rng.randint(10, 99)} = {rng.randint(1000, 9999)}" for word in rng.sample(WORDS, 4)]
    lines += [" ".join(rng.choices(WORDS, k=5)) for _ in range(rng.randint(1, 6))]
    return "\n".join(lines)


@contextmanager
def full_disk(after: int) -> Iterator[None]:
    """Within the block no file of this process may grow beyond `after` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
