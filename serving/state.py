"""Where a server stands in its life, shared by the launcher and the API processes through marks in a folder.

vLLM's /health says yes as soon as the engine runs, and while it drains. These marks are about the whole service:
checked and open, or closing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

FOLDER_VARIABLE = "LOHA_SERVING_STATE"
"""Environment variable that names the folder; unset in servers that were not started by the launcher."""

CHECKPOINT_VARIABLE = "LOHA_SERVING_CHECKPOINT"
"""Environment variable with the hash of the served weights, by which clients tell two checkpoints apart."""

BODY_VARIABLE = "LOHA_SERVING_MAX_BODY_MIB"
"""Environment variable: largest request body: one of 10 MB can hold up all rendering for minutes."""

DEFAULT_BODY_MIB = 8

Mark = Literal["ready", "draining"]


def set_mark(folder: str | Path, mark: Mark) -> None:
    """Set a mark; setting it again changes nothing."""
    (Path(folder) / mark).touch()


def has_mark(mark: Mark) -> bool:
    """Tell whether this process' server carries a mark."""
    folder = os.environ.get(FOLDER_VARIABLE, "")
    return folder != "" and os.path.exists(os.path.join(folder, mark))
