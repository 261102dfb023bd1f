"""Recorded runs through a real engine: encoder tokens against distinct observations, prefill at one P against P=1.

    python benchmarks/random_checkpoint.py --tokenizer QWEN3_DIR --out runs/small --width 64 --layers 2 --heads 1 \\
        --kv-heads 1 --intermediate 128 --encoder-layers 1 --context 65536
    python benchmarks/engine_replay.py runs.jsonl --checkpoint runs/small/serving --polling 7

Every call of every run is asked for one token, in this process, without a server. Counts depend on tokenizer, template,
layout and caches, not on weights, so the smallest decoder will do. Encoder tokens are the engine's own counter;
`distinct` are the encoder tokens of all different observations that become latent in some call; prefilled are context
positions that the engine did not find in its prefix cache. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from loha.cli import run_main
from loha.console import out
from loha.layout import Window
from loha.serving_checkpoint import ServingCheckpoint
from loha.trajectory import Trajectory, read_trajectories
from serving.reply_plan import call_indices


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the script."""

    trajectories: Positional[Path]
    """Canonical JSONL of recorded trajectories (`loha data import`)."""

    checkpoint: Path
    """Serving checkpoint."""

    k: int = 3
    """Newest observations that stay text."""

    polling: int = 7
    """P, compared with 1."""

    limit: int | None = None
    """Use only the first N trajectories."""

    cache_gib: int = 2
    """Memory for keys and values."""


def main(options: Options) -> None:
    """Replay and count."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(options.cache_gib)
    trajectories = list(islice(read_trajectories(options.trajectories), options.limit))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        engine = _engine(options.checkpoint)
        rows = {p: _replay(engine, options, trajectories, p) for p in (options.polling, 1)}
    chosen, first = rows[options.polling], rows[1]
    result = {
        "command": "engine_replay",
        "k": options.k,
        "trajectories": len(trajectories),
        "calls": chosen["calls"],
        **{f"p{p}": row for p, row in rows.items()},
        "encoder_over_distinct": {f"p{p}": row["encoder_tokens"] / row["distinct"] for p, row in rows.items()},
        "prefilled_over_p1": chosen["prefilled"] / first["prefilled"],
        "context_over_p1": chosen["context"] / first["context"],
    }
    out(json.dumps(result))


def _engine(checkpoint: Path) -> Any:
    from vllm import LLM

    return LLM(
        str(checkpoint),
        tokenizer_mode="loha",
        enforce_eager=True,
        block_size=32,
        skip_mm_profiling=True,
        limit_mm_per_prompt={"observation": 100_000},
        mm_processor_cache_gb=0,
        enable_prefix_caching=True,
    )


def _replay(engine: Any, options: Options, trajectories: list[Trajectory], polling: int) -> dict[str, int]:
    """Return the counts of one P; the engine's caches start empty."""
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    engine.llm_engine.reset_encoder_cache()
    renderer = ServingCheckpoint.open(options.checkpoint).renderer()
    one = SamplingParams(temperature=0.0, max_tokens=1)
    distinct: set[tuple[int, ...]] = set()
    row = {"calls": 0, "context": 0, "prefilled": 0}
    before = _encoder_tokens()
    kwargs = {"loha": {"k": options.k, "polling": polling, "view": "latent"}}
    for trajectory in trajectories:
        for index in call_indices(trajectory):
            history = trajectory.messages[:index]
            more = {"tools": trajectory.tools} if trajectory.tools else {}
            (answer,) = engine.chat(history, one, use_tqdm=False, chat_template_kwargs=kwargs, **more)
            window = Window(k=options.k, polling=polling)
            latents = renderer.render(history, trajectory.tools, window=window, add_generation_prompt=True).latents
            distinct |= {latent.encoder_ids for latent in latents}
            row["calls"] += 1
            row["context"] += len(answer.prompt_token_ids)
            row["prefilled"] += len(answer.prompt_token_ids) - answer.num_cached_tokens
    encoded = _encoder_tokens() - before
    row |= {"encoder_tokens": encoded, "distinct": sum(map(len, distinct))}
    out(f"P={polling}: {row}")
    return row


def _encoder_tokens() -> int:
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return int(registry.get_sample_value("loha_encoder_source_tokens_total") or 0)


if __name__ == "__main__":
    import sys

    sys.exit(run_main(main, sys.argv[1:], prog="engine_replay.py"))
