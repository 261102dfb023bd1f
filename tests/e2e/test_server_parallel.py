"""Two tensor-parallel ranks, or two data-parallel replicas, give the replies of the reference.

Slow to start: run with LOHA_E2E_PARALLEL=1.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from histories import growing
from live_server import Reference, options, running_server
from tiny_checkpoint import TinyCheckpoint

pytestmark = pytest.mark.skipif(os.environ.get("LOHA_E2E_PARALLEL", "") != "1", reason="set LOHA_E2E_PARALLEL=1 to run")

TWO_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""The CPU build binds one rank a NUMA node unless it is told the cores."""


def test_two_ranks_reply_as_one(
    tiny: TinyCheckpoint, reference: Reference, full_text_histories: list[Any], tmp_path: Path
) -> None:
    vllm_args = ["--", "--tensor-parallel-size", "2"]
    with running_server(tiny.serving, tmp_path / "server.log", vllm_args, TWO_CORES) as server:
        before = server.counter("encoded_observations")
        for history in full_text_histories:
            for k in (0, 3):
                assert server.reply(history, loha=options(k)) == reference.reply(history, k=k)
        assert server.counter("encoded_observations") - before == len(full_text_histories)


def test_two_replicas_reply_as_one(tiny: TinyCheckpoint, reference: Reference, tmp_path: Path) -> None:
    """Eight agents at a time, each with observations of its own, land on both replicas."""
    vllm_args = ["--", "--data-parallel-size", "2"]
    runs = [growing(4, seed=7000 + 100 * agent) for agent in range(8)]
    expected = [[reference.reply(history, k=1) for history in run] for run in runs]
    with running_server(tiny.serving, tmp_path / "server.log", vllm_args, TWO_CORES) as server:
        before = server.counter("encoded_observations")

        def agent(run: list[Any]) -> list[Any]:
            return [server.reply(history, loha=options(1)) for history in run]

        with ThreadPoolExecutor(len(runs)) as pool:
            assert list(pool.map(agent, runs)) == expected
        metrics = server.client.get("/metrics/").text
        engines = {line.split('engine="')[1].split('"')[0] for line in metrics.splitlines() if 'engine="' in line}
        assert engines == {"0", "1"}
        # Old observations of a run are 0, 1, 2 and 3; each replica that meets one encodes it once.
        met = sum(len(run) - 1 for run in runs)
        assert met <= server.counter("encoded_observations") - before <= 2 * met
        assert server.counter("requests") == sum(map(len, runs)) + 2  # and the launcher's own checks
