"""Shard a student over ranks with torch's FSDP2: each rank keeps a part of every weight and moment.

accelerate launches the processes; sharding itself is done here, because accelerate shards on GPUs only and by layer
class, which would take the encoder in: its layers run as often as a row has observations, and ranks whose gathers do
not match wait for each other for ever. The encoder and the markers stay whole on every rank.

All ranks must run the decoder equally often in a step, so that a rank with fewer rows runs a single token instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from acd.step import AcdModel


def shard(model: AcdModel, device: torch.device) -> AcdModel:
    """Shard decoder and adapter in place over all ranks; the optimizer must be made afterwards.

    Args:
        model: on its device, the same on every rank.
        device: whose kind decides how the ranks talk.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    student = model.student
    for layer in student.decoder.model.layers:
        fully_shard(layer, mesh=mesh)
    kept_whole = {*student.latent_encoder.parameters(), student.markers}
    fully_shard(model, mesh=mesh, ignored_params=kept_whole)
    return model


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model was sharded."""
    return isinstance(model, FSDPModule)


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Within the block every rank holds all weights, as plain tensors; all ranks must enter. No gradients."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not model, recurse=False)
            part.reshard()


def no_sync(accelerator: Accelerator, model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which gradients stay on their rank."""
    return _keep_gradients(model) if isinstance(model, FSDPModule) else accelerator.no_sync(model)


@contextmanager
def _keep_gradients(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def whole_value(value: Tensor) -> float:
    """Return a number that all ranks may hold in parts."""
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)
