"""Read the tensors of a safetensors checkpoint folder one at a time, whatever its sharding."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from loha.errors import LohaError

INDEX_NAME = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

_HEADER_LIMIT = 100 << 20  # the format's own limit


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies."""

    file: Path
    dtype: str
    """The safetensors word, such as BF16."""
    shape: tuple[int, ...]
    start: int
    """First byte of the data in the file."""
    end: int


class WeightFiles:
    """The tensors of a checkpoint folder, read lazily.

    Args:
        folder: holds one or more `*.safetensors` files, with or without an index.

    Raises:
        LohaError: when the folder is missing, holds no safetensors, or a file is cut short or malformed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise LohaError(f"{self.folder} is not a folder; expected a checkpoint with safetensors weights")
        self.files = _weight_files(self.folder)
        self._entries: dict[str, TensorEntry] = {}
        for file in self.files:
            self._entries.update(read_header(file))

    def names(self) -> list[str]:
        """Return every tensor name, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> TensorEntry:
        """Return where the tensor `name` lies.

        Raises:
            LohaError: when there is no such tensor.
        """
        if name not in self._entries:
            raise LohaError(
                f"{self.folder} has no tensor {name!r} among its {len(self._entries)}; "
                "is it a checkpoint of another architecture?"
            )
        return self._entries[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor `name`."""
        return self.entry(name).shape

    def tensor(self, name: str, *, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Read the tensor `name`.

        Args:
            name: its name in the checkpoint.
            shape: what it must be, when known.

        Raises:
            LohaError: when it is missing or has another shape.
        """
        entry = self.entry(name)
        if shape is not None and entry.shape != tuple(shape):
            raise LohaError(f"{self.folder}: tensor {name!r} has shape {list(entry.shape)}, expected {list(shape)}")
        return _read(entry, entry.start, entry.shape)

    def rows(self, name: str, indices: list[int]) -> torch.Tensor:
        """Read some rows of a matrix without the rest of it."""
        entry = self.entry(name)
        if any(not 0 <= i < entry.shape[0] for i in indices):
            raise LohaError(f"{self.folder}: tensor {name!r} has {entry.shape[0]} rows, asked for rows {indices}")
        width = (entry.end - entry.start) // entry.shape[0]
        return torch.cat([_read(entry, entry.start + i * width, (1, *entry.shape[1:])) for i in indices])

    def blocks(self, name: str, *, rows: int, limit: int) -> Iterator[torch.Tensor]:
        """Yield the first `limit` rows of a tensor, at most `rows` at a time."""
        entry = self.entry(name)
        width = (entry.end - entry.start) // max(1, entry.shape[0])
        for start in range(0, limit, rows):
            count = min(rows, limit - start)
            yield _read(entry, entry.start + start * width, (count, *entry.shape[1:]))

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every (name, tensor), sorted by name, one tensor in memory at a time."""
        for name in self.names():
            yield name, self.tensor(name)


def read_header(file: str | Path) -> dict[str, TensorEntry]:
    """Read which tensors a safetensors file holds, without their data.

    Raises:
        LohaError: when the file is no complete safetensors file.
    """
    path = Path(file)
    try:
        with safe_open(path, framework="pt"):  # checks the header against the size of the file
            pass
        with path.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(size, _HEADER_LIMIT)))
    except (SafetensorError, struct.error, ValueError) as error:
        raise LohaError(f"{path} is not a complete safetensors file ({error}); copy or download it again") from error
    begin = 8 + size
    return {
        name: TensorEntry(
            file=path,
            dtype=value["dtype"],
            shape=tuple(value["shape"]),
            start=begin + value["data_offsets"][0],
            end=begin + value["data_offsets"][1],
        )
        for name, value in header.items()
        if name != "__metadata__"
    }


def float_dtype(name: str | None) -> torch.dtype | None:
    """Return a model's number format by the name that options and configurations use; None stays None."""
    formats = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return None if name is None else formats[name]


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, *, about: tuple[str, str] = ("format", "pt")) -> None:
    """Write a safetensors file that whoever may read its folder may read; safetensors itself makes it private.

    Args:
        tensors: by name.
        path: of the file.
        about: key and text for its header; one, since safetensors writes several in an order that changes by the run.

    Raises:
        LohaError: when it cannot be written, for instance on a full disk.
    """
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(whole, path, metadata=dict([about]))
    except SafetensorError as error:
        raise LohaError(f"{path} cannot be written: {error}; is there space and permission?") from error
    path.chmod(path.parent.stat().st_mode & 0o666)


def read_json(path: str | Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        LohaError: when the file is missing or holds something else.
    """
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise LohaError(f"{path} is missing") from error
    except ValueError as error:
        raise LohaError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise LohaError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


def _read(entry: TensorEntry, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Read part of a file into memory of our own: mapped pages of a whole checkpoint would count as ours."""
    if entry.dtype not in DTYPES:
        raise LohaError(f"{entry.file} holds {entry.dtype} weights; expected one of {', '.join(DTYPES)}")
    dtype = DTYPES[entry.dtype]
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        target = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        with entry.file.open("rb") as stream:
            stream.seek(start)
            if stream.readinto(target) != len(target):
                raise LohaError(f"{entry.file} ends before its tensors do; copy or download it again")
    return tensor


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise LohaError(f"{folder} lacks {missing[0]!r}, which its {INDEX_NAME} names; copy or download it again")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise LohaError(f"{folder} holds no *.safetensors file; convert the weights to safetensors first")
    return files
