"""Fused loss against naive log_softmax + gather: extra peak memory, time, gradient error.

    python benchmarks/loss.py                       # N 4096, V 151936, d 256: about 10 GB and two minutes
    python benchmarks/loss.py --positions 512       # smaller

Each variant runs in a fresh process with the kernel's peak-memory counter reset just before the call, since buffers of
the set-up would hide the peak. Goals: memory <= 1/15 and time <= 0.6 of naive, growth < 10 % for four times the
positions. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from acd.loss import Targets, kl_to
from loha.console import err, out


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure."""

    positions: int = 4096
    """N."""
    vocabulary: int = 151_936
    """V."""
    width: int = 256
    """D."""
    candidates: int = 64
    """C."""
    chunk: int = 512
    """Positions per chunk of the fused loss."""
    threads: int = 0
    """0: torch's default."""
    repeats: int = 3
    """Variants take turns so many times; the fastest counts, which takes out what else the machine does."""


def naive(hidden_ND: Tensor, head_VD: Tensor, targets: Targets) -> Tensor:
    """All logits, log_softmax, gather; the tail as an accurate logsumexp would need still more memory."""
    logq_NV = torch.log_softmax(hidden_ND @ head_VD.T, dim=1)
    logq_NC = logq_NV.gather(1, targets.ids_NC)
    p_NC = targets.logp_NC.exp()
    tail_q_N = (1 - logq_NC.exp().sum(1)).clamp_min(1e-9)
    tail_p_N = targets.tail_N.exp()
    return (p_NC * (targets.logp_NC - logq_NC)).sum() + (tail_p_N * (targets.tail_N - tail_q_N.log())).sum()


def fused(chunk: int) -> Callable[[Tensor, Tensor, Targets], Tensor]:
    """Return the loss under test."""
    return lambda hidden_ND, head_VD, targets: kl_to(targets, hidden_ND, head_VD, chunk=chunk).sum


def problem(options: Options, positions: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Targets]:
    """Random states, head and teacher buckets that sum to one."""
    g = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(positions, options.width, generator=g)
    head_VD = torch.randn(options.vocabulary, options.width, generator=g) * 3 / options.width**0.5
    step = options.vocabulary // options.candidates
    ids_NC = torch.arange(options.candidates) * step + torch.randint(
        0, step, (positions, options.candidates), generator=g
    )
    logp_NB = (3 * torch.randn(positions, options.candidates + 1, generator=g)).log_softmax(1)
    return hidden_ND.to(dtype), head_VD.to(dtype), Targets(ids_NC, logp_NB[:, :-1].to(dtype), logp_NB[:, -1].to(dtype))


def measure(options: Options, variant: str, positions: int) -> dict[str, float]:
    """Time one variant and measure its extra peak memory, in this process."""
    if options.threads:
        torch.set_num_threads(options.threads)
    function = naive if variant == "naive" else fused(options.chunk)
    hidden_ND, head_VD, targets = problem(options, positions)
    leaf = hidden_ND.clone().requires_grad_()
    before = reset_peak()
    start, start_cpu = time.perf_counter(), time.process_time()
    function(leaf, head_VD, targets).backward()
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - start_cpu,
        "extra_gb": memory("VmHWM") - before,
    }


def gradient_error(options: Options, positions: int = 64) -> dict[str, float]:
    """Largest gradient difference between the fused loss in float32 and float64 on the same inputs."""
    grads = []
    for dtype in (torch.float32, torch.float64):
        hidden_ND, head_VD, targets = problem(options, positions, torch.float32)
        leaf = hidden_ND.to(dtype).requires_grad_()
        loss = fused(options.chunk) if dtype == torch.float32 else naive
        loss(
            leaf, head_VD.to(dtype), Targets(targets.ids_NC, targets.logp_NC.to(dtype), targets.tail_N.to(dtype))
        ).backward()
        assert leaf.grad is not None
        grads.append(leaf.grad.double())
    return {"gradient_error": float((grads[0] - grads[1]).abs().max()), "gradient_scale": float(grads[1].abs().max())}


def memory(field: str) -> float:
    """Return a memory field of this process in GB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024 / 1e9
    raise RuntimeError(f"no {field} in /proc/self/status: this benchmark needs Linux")


def reset_peak() -> float:
    """Reset the peak-memory counter and return the memory in use now, in GB."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def in_child(function: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
    """Call a function in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def main(options: Options) -> None:
    """Run the comparison and print the ratios."""
    results: dict[str, Any] = {"options": asdict(options)}
    runs: dict[str, list[dict[str, float]]] = {"naive": [], "fused": []}
    for _ in range(options.repeats):
        for name in runs:
            runs[name].append(in_child(measure, options, name, options.positions))
    runs["fused_4x"] = [in_child(measure, options, "fused", 4 * options.positions)]
    for name, found in runs.items():
        results[name] = best = {key: min(run[key] for run in found) for key in found[0]}
        err(f"{name:9s} {best['seconds']:.2f} s ({best['cpu_seconds']:.2f} s of CPU), extra {best['extra_gb']:.3f} GB")
    results |= in_child(gradient_error, options)
    results["memory_ratio"] = results["naive"]["extra_gb"] / results["fused"]["extra_gb"]
    results["time_ratio"] = results["fused"]["seconds"] / results["naive"]["seconds"]
    results["cpu_time_ratio"] = results["fused"]["cpu_seconds"] / results["naive"]["cpu_seconds"]
    results["growth"] = results["fused_4x"]["extra_gb"] / results["fused"]["extra_gb"] - 1
    results["versions"] = {"torch": torch.__version__, "python": platform.python_version()}
    out(
        f"memory 1/{results['memory_ratio']:.1f} of naive, time {results['time_ratio']:.2f}x, "
        f"growth {results['growth']:+.1%}"
    )
    out(json.dumps(results))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
