"""`loha bench`: recorded runs replayed against endpoints as agents would call them, arm by arm."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from loha.accounting import Models, columns_table
from loha.atomic import atomic_path
from loha.console import out
from loha.errors import LohaError
from loha.model_shape import read_shape
from loha.progress import note
from loha.retail_cost import GPT_5_6_SOL, OPUS_4_5, PriceList
from loha.trajectory import Trajectory, read_trajectories
from serving.endpoint import Endpoint
from serving.load_arm import LoadArm, load_arms
from serving.load_plot import plot_load
from serving.load_run import LoadRun, Log
from serving.load_summary import load_table, ratio_table, ratios, summarize_arms, summarize_rounds
from serving.measurement import measures_the_same
from serving.reply_plan import PlannedRun, plan_runs, read_plan, write_plan

SETTINGS = "settings.json"
PLAN = "plan.json"
PRICES: dict[str, PriceList | None] = {"gpt-5.6-sol": GPT_5_6_SOL, "opus-4.5": OPUS_4_5, "none": None}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `loha bench`."""

    trajectories: Positional[Path]
    """Canonical JSONL of recorded trajectories (`loha data import`)."""

    out: Path
    """Folder for bench.json, bench.md, bench.png and the finished runs. A benchmark that was stopped goes on from
    there; one that was finished takes more --rounds or --arms."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """Of the server with the plugin (`loha serve`)."""

    arms: tuple[str, ...] = ("full", "k3p1", "k3p7")
    """What is compared: full, k3 (K=3, P=1), k3p7, mask:k3p7, ... Each arm has the server to itself while it runs."""

    stock_url: str | None = None
    """Of a vLLM server without the plugin that serves the merged decoder alone (`loha export --decoder-only`): one more
    arm, full text, against which K=inf shows what the plugin costs."""

    model: str = "auto"
    """Served model of --base-url; auto asks the server."""

    concurrency: int = 16
    """Agents at a time."""

    instances: int | None = None
    """Runs per arm and round; trajectories repeat when there are fewer. Left out: all trajectories once, but at least
    the concurrency."""

    rounds: int = 3
    """How often every arm is measured, in turn; the spread is over rounds."""

    limit: int | None = None
    """Use only the first N trajectories."""

    calls: int | None = None
    """Replay only the first N calls of each trajectory, in every arm."""

    tool_time: str = "none"
    """Wait between calls: none, recorded (where the trajectories say how long their tools took), or seconds."""

    max_model_len: int | None = None
    """Longest context with the reply; calls that do not fit as full text are left out of every arm. The smallest of
    what the servers say when left out."""

    decoder: str | None = None
    """Shape for the PFLOP columns: a known name (qwen3-4b), a folder, or a config.json."""

    encoder: str | None = None
    """The same for the encoder."""

    prices: Literal["gpt-5.6-sol", "opus-4.5", "none"] = "gpt-5.6-sol"
    """Price list of the estimated retail cost."""

    api_key: str = ""
    """Sent as bearer token; OPENAI_API_KEY when left out."""

    timeout_s: float = 3600.0
    """Longest silence of a server; a queue at high concurrency is silent for long."""


def main(options: Options) -> int:
    """Replay recorded trajectories as agents would and compare arms on throughput, latency and work."""
    arms = load_arms(options.arms, options.base_url, options.stock_url)
    models, trajectories = _check(options), _trajectories(options)
    log, planned = asyncio.run(_measure(options, arms, trajectories))
    names = [arm.name for arm in arms]
    rounds = summarize_rounds(log.runs, log.slices)
    figures = summarize_arms(names, log.runs, log.slices, models=models, prices=PRICES[options.prices])
    compared = ratios(rounds, "full" if "full" in names else names[0])
    tables = [load_table(figures), ratio_table(compared), columns_table([figure.columns for figure in figures])]
    result = {
        "command": "bench",
        "out": str(options.out),
        "trajectories": len(planned),
        "calls_per_round": sum(len(run.replies) for run in _instances(options, planned)),
        "concurrency": options.concurrency,
        "tool_time": options.tool_time,
        "arms": [asdict(figure) for figure in figures],
        "ratios": [asdict(ratio) for ratio in compared],
    }
    _write(options, tables, {**result, "rounds": [asdict(each) for each in rounds]})
    plot_load(figures, rounds, log.runs, options.out / "bench.png", title=_title(options))
    for table in tables:
        out(table + "\n")
    out(json.dumps(result))
    return 0


def _check(options: Options) -> Models | None:
    """Refuse impossible numbers and return the shapes for the PFLOP columns."""
    for name in ("concurrency", "rounds", "instances", "limit", "calls", "max_model_len"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise LohaError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if options.tool_time not in ("none", "recorded"):
        try:
            wait = float(options.tool_time)
        except ValueError:
            wait = -1.0
        if not 0 <= wait < 86_400:
            raise LohaError(f"--tool-time must be none, recorded or a number of seconds, got {options.tool_time!r}")
    if options.decoder is None:
        return None
    encoder = None if options.encoder is None else read_shape(options.encoder)
    return Models(decoder=read_shape(options.decoder), encoder=encoder)


def _trajectories(options: Options) -> list[Trajectory]:
    trajectories = list(islice(read_trajectories(options.trajectories), options.limit))
    if options.tool_time == "recorded":
        silent = [trajectory.id for trajectory in trajectories if trajectory.tool_seconds is None]
        if len(silent) == len(trajectories):
            raise LohaError(
                f"{options.trajectories}: no trajectory says how long its tools took (tool_seconds); "
                "give --tool-time none or seconds"
            )
        if silent:
            note(f"{len(silent)} trajectories have no tool_seconds and do not wait, the first is {silent[0]}")
    return trajectories


async def _measure(
    options: Options, arms: Sequence[LoadArm], trajectories: Sequence[Trajectory]
) -> tuple[Log, list[PlannedRun]]:
    key = options.api_key or os.environ.get("OPENAI_API_KEY", "")
    endpoints = {
        url: Endpoint(url, api_key=key, timeout_s=options.timeout_s, connections=options.concurrency)
        for url in dict.fromkeys([options.base_url, *(arm.base_url for arm in arms)])
    }
    served = {url: await endpoint.served_model() for url, endpoint in endpoints.items()}
    models = {url: model.name for url, model in served.items()}
    if options.model != "auto":
        models[options.base_url] = options.model
    stated = [model.max_model_len for model in served.values() if model.max_model_len is not None]
    limit = options.max_model_len or min(stated, default=None)
    versions = {url: await endpoint.version() for url, endpoint in endpoints.items()}
    _resume(options, models, limit, versions, served[options.base_url].checkpoint)
    planned = read_plan(options.out / PLAN, trajectories)
    if planned is None:
        planned = await plan_runs(
            endpoints[options.base_url],
            models[options.base_url],
            trajectories,
            max_model_len=limit,
            concurrency=options.concurrency,
        )
        write_plan(options.out / PLAN, planned)
    run = LoadRun(
        endpoints=endpoints,
        models=models,
        arms=arms,
        instances=_instances(options, planned),
        rounds=options.rounds,
        concurrency=options.concurrency,
        tool_time=options.tool_time,
        started=time.time(),
    )
    with Log(options.out) as log:
        await run.measure(log)
    return log, planned


def _instances(options: Options, planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs of one slice, trajectories repeated as often as needed."""
    count = options.instances or max(len(planned), options.concurrency)
    runs = [planned[number % len(planned)] for number in range(count)]
    if options.calls is None:
        return runs
    return [PlannedRun(trajectory=run.trajectory, replies=run.replies[: options.calls]) for run in runs]


def _resume(
    options: Options,
    models: dict[str, str],
    limit: int | None,
    versions: dict[str, str | None],
    checkpoint: str | None,
) -> None:
    """Note what this benchmark measures, or check that the folder holds the same.

    Raises:
        LohaError: when the folder holds another benchmark.
    """
    settings = {
        "model": models[options.base_url],
        "checkpoint": checkpoint,
        "trajectories_sha256": hashlib.sha256(options.trajectories.read_bytes()).hexdigest(),
        "limit": options.limit,
        "calls": options.calls,
        "concurrency": options.concurrency,
        "instances": options.instances,
        "tool_time": options.tool_time,
        "max_model_len": limit,
    }
    path = options.out / SETTINGS
    if measures_the_same(path, settings, kind="benchmark"):
        return
    about = {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}
    with atomic_path(path) as temporary:
        text = json.dumps({**settings, "servers": versions, "client": about, "loha": version("loha-agents")}, indent=1)
        temporary.write_text(text + "\n", encoding="utf-8")


def _write(options: Options, tables: Sequence[str], result: dict[str, Any]) -> None:
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
    settings.pop("api_key")
    about = json.loads((options.out / SETTINGS).read_text(encoding="utf-8"))
    with atomic_path(options.out / "bench.json") as temporary:
        document = {"options": settings, "settings": about, **result}
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    with atomic_path(options.out / "bench.md") as temporary:
        temporary.write_text("\n\n".join(tables) + "\n", encoding="utf-8")


def _title(options: Options) -> str:
    return f"{options.trajectories.stem}, {options.concurrency} agents at a time, {options.rounds} rounds"
