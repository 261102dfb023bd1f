"""The folder of one run: resolved configuration, versions, plan, metrics, checkpoints, and the final student."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from acd.checkpoint import CheckpointFolder
from acd.config import Config, config_dict, config_yaml
from acd.metrics import leaves
from acd.plan import PLAN_NAME
from loha.atomic import atomic_path, check_writable, recover
from loha.errors import LohaError
from loha.progress import note

CONFIG_NAME = "config.yaml"
VERSIONS_NAME = "versions.json"
_PACKAGES = ("loha-agents", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "numpy")
_FREE = ("run.", "data.workers")
"""What may change between the parts of one run without a word."""
_TOLD = ("run.max_steps", "run.epochs")
"""What of it may not: a schedule runs to the last step."""


class RunFolder:
    """Where a run writes.

    Args:
        config: of the run.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.root = Path(config.run.output_dir)
        self.checkpoints = CheckpointFolder(self.root / "checkpoints", keep_last=config.run.keep_last)

    @property
    def plan(self) -> Path:
        """The epoch plan."""
        return self.root / PLAN_NAME

    @property
    def student(self) -> Path:
        """The student at the end of training, for `loha export`."""
        return self.root / "student"

    @property
    def best_student(self) -> Path:
        """The student with the lowest held-out loss."""
        return self.root / "best"

    def open(self) -> None:
        """Make the folder ready to go on, and say which settings changed; called by the main process alone.

        Raises:
            LohaError: when it holds a run that is not to be resumed.
        """
        check_writable(self.root / CONFIG_NAME)
        for folder in (self.root, self.checkpoints.folder):
            recover(folder)
        if self.checkpoints.newest() is not None and not self.config.run.resume:
            raise LohaError(
                f"{self.root}: holds checkpoints of an earlier run; choose another run.output_dir or set run.resume "
                "(--run.resume)"
            )
        self._note_changes()

    def record(self) -> None:
        """Write configuration and versions, when nothing stands against the run any more; by the main process alone."""
        with atomic_path(self.root / CONFIG_NAME) as temporary:
            temporary.write_text(config_yaml(self.config), encoding="utf-8")
        with atomic_path(self.root / VERSIONS_NAME) as temporary:
            temporary.write_text(json.dumps(versions(), indent=1) + "\n", encoding="utf-8")

    def _note_changes(self) -> None:
        """Say which settings differ from the part of the run that was done before."""
        before = self.root / CONFIG_NAME
        if self.checkpoints.newest() is None or not before.is_file():
            return
        try:
            values = yaml.safe_load(before.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            values = None
        if not isinstance(values, dict):
            note(f"{before} is damaged: whether settings changed cannot be told")
            return
        old = dict(leaves(values, separator="."))
        new = dict(leaves(config_dict(self.config), separator="."))
        for key in sorted(old.keys() | new.keys()):
            if old.get(key) != new.get(key) and (key in _TOLD or not key.startswith(_FREE)):
                note(f"resuming with another {key}: {new.get(key)!r} (was {old.get(key)!r})")


def versions() -> dict[str, Any]:
    """Return what made a run: packages, Python, machine, commit and command."""
    return {
        "packages": {name: _package_version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": _commit(),
        "command": sys.argv,
    }


def _package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the working tree that this file lies in, marked when it has changes."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
