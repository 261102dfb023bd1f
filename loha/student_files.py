"""A student on disk: `patch/` (PEFT), `reading.safetensors` (adapter, markers, gains) and `student.json`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from loha import __version__
from loha.atomic import atomic_path, check_replaceable
from loha.errors import LohaError
from loha.fingerprint import Fingerprint
from loha.peft_file import Factors, load_patch, save_patch
from loha.weight_files import read_header, read_json, save_tensors

CONFIG_NAME = "student.json"
READING_NAME = "reading.safetensors"
PATCH_NAME = "patch"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class StudentConfig:
    """What `student.json` records."""

    base: str
    """Folder of the base."""

    encoder: str
    """Folder of the encoder and its tokenizer."""

    ratio: int
    """Encoder tokens per latent."""

    window: int
    """Encoder tokens per window."""

    rank: int
    """Rank asked for; projections with a smaller side have less."""

    start: str
    """How the patch began: svd or zero."""

    fingerprint: Fingerprint = field(default_factory=dict)
    """Of the base, the encoder, the tokenizers, the template and the layout."""

    format: int = FORMAT
    loha_version: str = __version__


@dataclass(frozen=True)
class StudentFiles:
    """Everything that a student adds to its base, on the CPU in float32."""

    config: StudentConfig
    patch: dict[str, Factors]
    """A and B by projection name."""
    gains: dict[str, torch.Tensor]
    """Gain vectors by norm name."""
    adapter: dict[str, torch.Tensor]
    markers: torch.Tensor
    """`[2, D]`: start, end."""

    def write(self, folder: str | Path, *, extra: dict[str, bytes] | None = None) -> None:
        """Write the folder, whole or not at all.

        Args:
            folder: to create or replace.
            extra: further files by name, such as a report.

        Raises:
            LohaError: when the folder holds something else than a student.
        """
        check_replaceable(folder, marker=CONFIG_NAME, kind="student")
        with atomic_path(folder) as temporary:
            temporary.mkdir()
            save_patch(temporary / PATCH_NAME, self.patch, rank=self.config.rank, base=self.config.base)
            save_tensors(self._reading(), temporary / READING_NAME)
            text = json.dumps(dataclasses.asdict(self.config), indent=2)
            (temporary / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")
            for name, content in (extra or {}).items():
                (temporary / name).write_bytes(content)

    @classmethod
    def read(cls, folder: str | Path) -> StudentFiles:
        """Read a folder that `write` made.

        Raises:
            LohaError: when a part is missing, cut short, or of a format this version does not know.
        """
        folder = Path(folder)
        config = read_student_config(folder)
        if not (folder / READING_NAME).is_file():
            raise LohaError(f"{folder} lacks {READING_NAME}; was the student written completely?")
        read_header(folder / READING_NAME)
        tensors = load_file(folder / READING_NAME)
        if "markers" not in tensors:
            raise LohaError(f"{folder / READING_NAME} lacks the tensor 'markers'")
        return cls(
            config=config,
            patch=load_patch(folder / PATCH_NAME),
            gains=_group(tensors, "gains."),
            adapter=_group(tensors, "adapter."),
            markers=tensors["markers"],
        )

    def _reading(self) -> dict[str, torch.Tensor]:
        tensors = {"markers": self.markers}
        tensors |= {f"adapter.{name}": tensor for name, tensor in self.adapter.items()}
        tensors |= {f"gains.{name}": tensor for name, tensor in self.gains.items()}
        return {name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}


def read_student_config(folder: str | Path) -> StudentConfig:
    """Read `student.json`.

    Raises:
        LohaError: when the folder is no student of a format this version knows.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise LohaError(f"{folder} is not a folder; expected a student made by `loha init` or training")
    if not (folder / CONFIG_NAME).is_file():
        raise LohaError(f"{folder} is no student: {CONFIG_NAME} is missing; make one with `loha init`")
    values = read_json(folder / CONFIG_NAME)
    if values.get("format") != FORMAT:
        raise LohaError(f"{folder / CONFIG_NAME} has format {values.get('format')!r}, this version reads {FORMAT}")
    known = {item.name for item in dataclasses.fields(StudentConfig)}
    try:
        return StudentConfig(**_only(values, known))
    except TypeError as error:
        raise LohaError(f"{folder / CONFIG_NAME} is not complete: {error}") from error


def _only(values: dict[str, Any], known: set[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in known}


def _group(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
