"""Run training commands in real processes that can be killed, forked from a server that has already imported torch."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["acd.train", "acd.cache_teacher", "tests.acd_world"])
TIMEOUT_S = 300.0


def start_train(config: Path, *overrides: str, world: int = 1) -> list[BaseProcess]:
    """Start `acd/train.py` on `world` processes."""
    return start(_train, str(config), *overrides, world=world)


def start_cache(config: Path, *overrides: str, world: int = 1) -> list[BaseProcess]:
    """Start `acd.cache_teacher` on `world` processes."""
    return start(_cache, str(config), *overrides, world=world)


def start(function: Callable[[list[str], int, int, int], None], *words: str, world: int) -> list[BaseProcess]:
    """Start a function of (words, rank, world, port) in `world` processes; it calls `prepare` first."""
    port = free_port()
    processes: list[BaseProcess] = [
        _FORKSERVER.Process(target=function, args=(list(words), rank, world, port)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    return processes


def finish(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Wait for processes to end and return their exit codes."""
    for process in processes:
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def wait_for(condition: Callable[[], bool], process: BaseProcess) -> None:
    """Wait until a condition holds, while the process lives."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.is_alive(), f"the process ended with {process.exitcode} before the condition held"
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.01)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _train(words: list[str], rank: int, world: int, port: int) -> None:
    from acd.train import main
    from loha.command_line import run_reporting

    prepare(rank, world, port)
    sys.exit(run_reporting(lambda: main(["--config", *words])))


def _cache(words: list[str], rank: int, world: int, port: int) -> None:
    from acd.cache_teacher import main
    from loha.command_line import run_reporting

    prepare(rank, world, port)
    sys.exit(run_reporting(lambda: main(["--config", *words])))


def prepare(rank: int, world: int, port: int) -> None:
    """Set what a launcher sets, one thread each."""
    import torch

    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
