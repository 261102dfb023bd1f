"""Accelerators that a plan can be made for: memory, speed, links.

Source: vendors' data sheets; dense bf16 without sparsity. Memory is what the driver reports, where it was known.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from loha.errors import LohaError

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator."""

    name: str
    memory_bytes: int
    flops: float
    """Peak dense bf16 operations per second; a multiply-add is two."""

    memory_bandwidth: float
    """Bytes per second."""

    host_bandwidth: float
    """Bytes per second to pinned host memory, one direction, as measured in practice rather than the link's peak."""

    link_bandwidth: float
    """Bytes per second to a neighbour in the same machine, one direction."""


_PCIE4, _PCIE5 = 25e9, 50e9

_GPUS = (
    Gpu(
        name="h100-80gb",
        memory_bytes=81_559 * _MIB,
        flops=989.4e12,
        memory_bandwidth=3.35e12,
        host_bandwidth=_PCIE5,
        link_bandwidth=450e9,
    ),
    Gpu(
        name="h100-pcie-80gb",
        memory_bytes=81_559 * _MIB,
        flops=756e12,
        memory_bandwidth=2.0e12,
        host_bandwidth=_PCIE5,
        link_bandwidth=300e9,
    ),
    Gpu(
        name="h200-141gb",
        memory_bytes=143_771 * _MIB,
        flops=989.4e12,
        memory_bandwidth=4.8e12,
        host_bandwidth=_PCIE5,
        link_bandwidth=450e9,
    ),
    Gpu(
        name="b200-180gb",
        memory_bytes=180 * _GIB,
        flops=2250e12,
        memory_bandwidth=8.0e12,
        host_bandwidth=_PCIE5,
        link_bandwidth=900e9,
    ),
    Gpu(
        name="a100-80gb",
        memory_bytes=81_920 * _MIB,
        flops=312e12,
        memory_bandwidth=2.04e12,
        host_bandwidth=_PCIE4,
        link_bandwidth=300e9,
    ),
    Gpu(
        name="a100-40gb",
        memory_bytes=40_960 * _MIB,
        flops=312e12,
        memory_bandwidth=1.56e12,
        host_bandwidth=_PCIE4,
        link_bandwidth=300e9,
    ),
    Gpu(
        name="l40s-48gb",
        memory_bytes=46_068 * _MIB,
        flops=362e12,
        memory_bandwidth=0.864e12,
        host_bandwidth=_PCIE4,
        link_bandwidth=_PCIE4,
    ),
    Gpu(
        name="rtx4090-24gb",
        memory_bytes=24_564 * _MIB,
        flops=165e12,
        memory_bandwidth=1.01e12,
        host_bandwidth=_PCIE4,
        link_bandwidth=_PCIE4,
    ),
)
GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _GPUS}


def find_gpu(name: str) -> Gpu:
    """Return an accelerator by name.

    Raises:
        LohaError: for an unknown one; names those that are known.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        near = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? known: " if near else "known: "
        raise LohaError(f"unknown accelerator {name!r}; {hint}{', '.join(GPUS)}")
    return gpu
