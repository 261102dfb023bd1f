"""Two tensor-parallel ranks give the replies of the reference. Slow to start: run with LOHA_E2E_TENSOR_PARALLEL=1."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from live_server import Reference, options, running_server
from tiny_checkpoint import TinyCheckpoint

pytestmark = pytest.mark.skipif(
    os.environ.get("LOHA_E2E_TENSOR_PARALLEL", "") != "1", reason="set LOHA_E2E_TENSOR_PARALLEL=1 to run"
)


def test_two_ranks_reply_as_one(
    tiny: TinyCheckpoint, reference: Reference, full_text_histories: list[Any], tmp_path: Path
) -> None:
    # The CPU build binds one rank a NUMA node unless it is told the cores.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    vllm_args = ["--", "--tensor-parallel-size", "2"]
    with running_server(tiny.serving, tmp_path / "server.log", vllm_args, environment) as server:
        before = server.counter("encoded_observations")
        for history in full_text_histories:
            for k in (0, 3):
                assert server.reply(history, loha=options(k)) == reference.reply(history, k=k)
        assert server.counter("encoded_observations") - before == len(full_text_histories)
