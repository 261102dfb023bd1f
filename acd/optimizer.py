"""AdamW over named groups, and learning rates as a function of the step."""

from __future__ import annotations

import math

import torch

from acd.config import OptimizerConfig
from loha.student import Student


def make_optimizer(student: Student, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over patch, gains and adapter.

    Groups are in a fixed order with parameters sorted by name, and carry the names: the optimizer's own state is
    positional, and another order would resume with swapped moments without an error.
    """
    rates = base_rates(config)
    groups = [
        {
            "name": name,
            "params": list(named.items()),
            "lr": rates[name],
            "weight_decay": 0.0 if name == "gains" else config.weight_decay,
        }
        for name, named in student.groups().items()
        if named
    ]
    on_gpu = any(p.is_cuda for p in student.trainable().values())
    return torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=on_gpu)


def base_rates(config: OptimizerConfig) -> dict[str, float]:
    """Return the learning rate of each group before the schedule."""
    return {"patch": config.lr_patch, "gains": config.lr_gains, "adapter": config.lr_adapter}


def schedule_factor(config: OptimizerConfig, step: int, total: int) -> float:
    """Return what multiplies the learning rates in one optimizer step.

    A function of the step alone: it has no state to save, and does not depend on the number of processes.

    Args:
        config: warm-up and schedule.
        step: 0-based.
        total: steps of the whole run.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    return 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


def set_rates(optimizer: torch.optim.Optimizer, config: OptimizerConfig, step: int, total: int) -> dict[str, float]:
    """Set the learning rates of a step and return them by group."""
    factor = schedule_factor(config, step, total)
    rates = {name: rate * factor for name, rate in base_rates(config).items()}
    for group in optimizer.param_groups:
        group["lr"] = rates[group["name"]]
    return rates
