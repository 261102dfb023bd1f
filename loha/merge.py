"""Merge patch and gains into the base's weights: in float32, rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from loha.errors import LohaError
from loha.peft_file import Factors
from loha.student_files import StudentFiles
from loha.weight_files import WeightFiles


class MergedWeights(WeightFiles):
    """The base's tensors with a student merged in, read one at a time; tied embeddings stay tied.

    Args:
        base: folder of the base.
        files: the student.
        dtype: that every tensor is rounded to.

    Raises:
        LohaError: when a patched tensor or a gain of the student has no place in the base.
    """

    def __init__(self, base: str | Path, files: StudentFiles, *, dtype: torch.dtype) -> None:
        super().__init__(base)
        self._files, self._dtype = files, dtype
        shapes = {f"{name}.weight": (B.shape[0], A.shape[1]) for name, (A, B) in files.patch.items()}
        shapes |= {f"{name}.weight": tuple(gain.shape) for name, gain in files.gains.items()}
        for name, shape in shapes.items():
            if self.shape(name) != shape:
                raise LohaError(
                    f"the student was made for a {name} of shape {list(shape)}, {base} has {list(self.shape(name))}"
                )

    def tensor(self, name: str, *, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Read the tensor `name`, merged and rounded."""
        tensor = super().tensor(name, shape=shape)
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module in self._files.patch:
            return merge(tensor, self._files.patch[module]).to(self._dtype)
        if kind == "weight" and module in self._files.gains:
            return self._files.gains[module].to(self._dtype)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every (name, merged tensor), sorted by name."""
        return ((name, self.tensor(name)) for name in self.names())


def merge(weight: torch.Tensor, factors: Factors) -> torch.Tensor:
    """Return W0 + B A in float32."""
    A, B = factors
    return torch.addmm(weight.float(), B.float(), A.float())


def base_dtype(base: WeightFiles) -> torch.dtype:
    """Return the dtype of the base's projections."""
    return base.tensor(next(name for name in base.names() if name.endswith("_proj.weight"))).dtype
