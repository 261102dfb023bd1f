"""`loha plan`: memory, time and levers of a training run, or memory and traffic of a server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acd.compute_plan import Lengths, Work, planned_work, typical_work
from acd.config import Config, load_config
from acd.planner import TrainingPlan, plan_training, training_setup
from loha.accounting import short_count
from loha.console import err, out
from loha.errors import LohaError
from loha.hardware import find_gpu
from loha.layout import Window, parse_k, parse_polling
from loha.model_shape import ModelShape, known_shape, read_config, read_shape
from loha.replay_model import AgentRun
from loha.serving_plan import ServingPlan, ServingSetup, plan_serving

GB = 1e9
DEFAULT_ENCODER = "qwen3-embedding-0.6b"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `loha plan`."""

    config: Path | None = None
    """Training configuration (YAML). Without it, say --serving."""

    gpu: str = "h100-80gb"
    """Accelerator of each rank; an unknown name lists the known ones."""

    world: int = 8
    """Data-parallel ranks of the training run."""

    utilisation: float = 0.40
    """Model operations per second over the peak (MFU) to count with. Public long-row runs reach 0.34 to 0.40."""

    base: str | None = None
    """The base: folder, config.json, or a known model name. From the student or the configuration by default."""

    encoder: str | None = None
    """The encoder, in the same ways."""

    rank: int | None = None
    """Of the reading patch. From the student by default, else 64."""

    plan: Path | None = None
    """Epoch plan (plan.jsonl, by `python -m acd.plan`) for exact lengths. The one in run.output_dir by default."""

    trajectories: int = Lengths.trajectories
    """How many train, where there is no epoch plan."""

    full_tokens: int = Lengths.full_tokens
    """Mean tokens of a full-text view, where there is no epoch plan."""

    latent_tokens: int = Lengths.latent_tokens
    """Mean tokens of a latent view, where there is no epoch plan."""

    assistant_tokens: int = Lengths.assistant_tokens
    """Mean supervised tokens of a view, where there is no epoch plan."""

    length_spread: float = Lengths.spread
    """E[s^2] / E[s]^2 of the lengths, where there is no epoch plan; real trajectories lie between 1.2 and 2."""

    serving: bool = False
    """Plan a server instead: memory of a rank, keys and values, latents, traffic for each K and P."""

    checkpoint: Path | None = None
    """Serving checkpoint (`loha export`) to read both shapes from."""

    tensor_parallel: int = 1
    """Ranks of one serving replica."""

    concurrency: int = 16
    """Agents at a time on one serving replica."""

    encoder_cache_latents: int = ServingSetup.encoder_cache_latents
    """Latents that the server keeps."""

    k: tuple[str, ...] = ("inf", "3", "8")
    """Values of K to compare."""

    polling: tuple[int, ...] = (1, 8)
    """Values of P to compare."""

    calls: int = AgentRun.calls
    """Model calls of an agent run."""

    prompt_tokens: int = AgentRun.prompt_tokens
    """System prompt and task."""

    action_tokens: int = AgentRun.action_tokens
    """Mean tokens of an assistant turn."""

    observation_tokens: int = AgentRun.observation_tokens
    """Mean tokens of an observation."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The models that a plan is about."""

    decoder: ModelShape
    encoder: ModelShape
    rank: int = 64
    ratio: int = 16
    window: int = 1024
    element_bytes: int = 2
    """Of frozen weights and activations in training."""


def main(options: Options) -> int | None:
    """Say whether a run fits, how long it takes, and what to change. The last line is one JSON object."""
    if not 0 < options.utilisation <= 1:
        raise LohaError(f"--utilisation must lie above 0 and at most at 1, got {options.utilisation}")
    for name in ("world", "tensor_parallel", "concurrency", "trajectories", "calls", "full_tokens"):
        if getattr(options, name) < 1:
            raise LohaError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if not 0 <= options.length_spread < math.inf:
        raise LohaError(f"--length-spread must be a finite number of at least 0, got {options.length_spread}")
    if options.rank is not None and options.rank < 1:
        raise LohaError(f"--rank must be at least 1, got {options.rank}")
    if options.latent_tokens > options.full_tokens:
        raise LohaError(
            f"--latent-tokens {options.latent_tokens:,} cannot be more than --full-tokens {options.full_tokens:,}"
        )
    if options.serving:
        server = plan_server(options)
        _print(serving_report(server), server.to_json())
        return None
    if options.config is None:
        raise LohaError("say what to plan: --config F for a training run, or --serving for a server")
    plan = plan_run(options, load_config(options.config))
    _print(training_report(plan), plan.to_json())
    return None


def plan_run(options: Options, config: Config) -> TrainingPlan:
    """Return the plan of a training run."""
    shapes = training_shapes(options, config)
    return plan_training(
        training_setup(
            config,
            run_work(options, config, shapes).limited(config.run.max_steps),
            decoder=shapes.decoder,
            encoder=shapes.encoder,
            rank=shapes.rank,
            window=shapes.window,
            gpu=find_gpu(options.gpu),
            world=options.world,
            utilisation=options.utilisation,
            element_bytes=shapes.element_bytes,
        )
    )


def plan_server(options: Options) -> ServingPlan:
    """Return the plan of a server."""
    shapes = serving_shapes(options)
    run = AgentRun(
        calls=options.calls,
        prompt_tokens=options.prompt_tokens,
        action_tokens=options.action_tokens,
        observation_tokens=options.observation_tokens,
        ratio=shapes.ratio,
        encoder_window=shapes.window,
    )
    setup = ServingSetup(
        decoder=shapes.decoder,
        encoder=shapes.encoder,
        gpu=find_gpu(options.gpu),
        run=run,
        tensor_parallel=options.tensor_parallel,
        concurrency=options.concurrency,
        encoder_cache_latents=options.encoder_cache_latents,
    )
    return plan_serving(setup, _windows(options))


def training_shapes(options: Options, config: Config) -> Shapes:
    """Return the shapes of a run: from the options, else the student's record, else the configuration.

    Raises:
        LohaError: when nothing says which base it is.
    """
    record = Path(config.model.student) / "student.json"
    student = read_config(record) if record.is_file() else {}
    base = options.base or config.model.base or student.get("base") or _named_base(config)
    if base is None:
        raise LohaError(
            f"{config.model.student} is no student yet and model.base is not set: say --base with a folder, "
            "a config.json or a model name"
        )
    encoder = options.encoder or config.model.lclm or student.get("encoder") or DEFAULT_ENCODER
    return Shapes(
        decoder=read_shape(base),
        encoder=_encoder_shape(encoder),
        rank=options.rank or student.get("rank", 64),
        ratio=student.get("ratio", 16),
        window=student.get("window", 1024),
        element_bytes=_element_bytes(config, Path(base) / "config.json"),
    )


def _element_bytes(config: Config, base: Path) -> int:
    """Return the bytes of a weight: as configured, else as the base is stored, else bfloat16's."""
    stored = read_config(base) if base.is_file() else {}
    dtype = config.model.dtype or stored.get("dtype") or stored.get("torch_dtype")
    return 4 if dtype == "float32" else 2


def serving_shapes(options: Options) -> Shapes:
    """Return the shapes of a server: from a serving checkpoint, else from the options."""
    if options.checkpoint is not None:
        path = options.checkpoint / "config.json" if options.checkpoint.is_dir() else options.checkpoint
        if not path.is_file():
            raise LohaError(
                f"{options.checkpoint}: no config.json there; --checkpoint is a folder made by `loha export`"
            )
        config = read_config(path)
        if "encoder_config" not in config or "text_config" not in config:
            raise LohaError(
                f"{path}: not a serving checkpoint (no text_config and encoder_config); make one with `loha export`"
            )
        return Shapes(
            decoder=ModelShape.from_config(config, source=str(path)),
            encoder=ModelShape.from_config(config["encoder_config"], source=f"{path}: encoder_config"),
            ratio=config.get("compression_ratio", 16),
            window=config.get("encoder_window", 1024),
        )
    if options.base is None:
        raise LohaError(
            "say which model to serve: --checkpoint DIR, or --base with a folder, a config.json or a model name"
        )
    return Shapes(decoder=read_shape(options.base), encoder=_encoder_shape(options.encoder or DEFAULT_ENCODER))


def run_work(options: Options, config: Config, shapes: Shapes) -> Work:
    """Return the tokens of a run: of its epoch plan where there is one, else of typical trajectories."""
    path = options.plan or Path(config.run.output_dir) / "plan.jsonl"
    if options.plan is not None or path.is_file():
        from acd.plan import Plan  # with torch, which a plan from shapes alone does not need

        plan = Plan.load(path)
        longest = max((sum(piece.tokens for piece in row) for step in plan.steps for row in step), default=0)
        if longest > config.packing.tokens_per_row:
            raise LohaError(
                f"{path} has a row of {longest:,} tokens, packing.tokens_per_row is {config.packing.tokens_per_row:,}: "
                "it was made with other settings; delete it, or name another with --plan"
            )
        return planned_work(plan.pieces(), len(plan.steps), ratio=shapes.ratio)
    lengths = Lengths(
        trajectories=min(options.trajectories, config.data.limit or options.trajectories),
        full_tokens=options.full_tokens,
        latent_tokens=options.latent_tokens,
        assistant_tokens=options.assistant_tokens,
        spread=options.length_spread,
    )
    return typical_work(
        lengths,
        tokens_per_step=config.packing.tokens_per_step,
        ratio=shapes.ratio,
        full_share=config.views.full_share,
        latent_share=config.views.latent_share,
        readback_share=config.readback.share,
        epochs=config.run.epochs,
    )


def training_report(plan: TrainingPlan) -> list[str]:
    """Return the lines for people."""
    setup, compute, memory = plan.setup, plan.compute, plan.memory
    gpu, peak = setup.gpu, memory.peak_phase
    lines = [f"{gpu.name} x {setup.compute.world}, rows of {setup.memory.tokens_per_row:,} tokens", ""]
    lines.append(f"memory of one rank at its peak ({peak}), GB")
    shown = [c for c in memory.components if peak in c.phases and not c.host]
    lines += _rows((c.name, f"{c.bytes / GB:.2f}") for c in shown)
    lines += _rows([("peak", f"{memory.peak_bytes / GB:.2f}"), (f"of {gpu.name}", f"{gpu.memory_bytes / GB:.2f}")])
    if memory.host_bytes:
        lines += _rows([("pinned host memory per rank", f"{memory.host_bytes / GB:.2f}")])
    lines += ["", "work"]
    lines += _rows(
        [
            ("tokens in the run", short_count(compute.tokens)),
            ("optimizer steps", f"{compute.steps:,}"),
            ("tokens per optimizer step", short_count(compute.tokens_per_step)),
            ("model PFLOP per step", f"{compute.model_flops / compute.steps / 1e15:,.1f}"),
            ("executed PFLOP per step", f"{compute.executed_flops / compute.steps / 1e15:,.1f}"),
            ("seconds per step", f"{compute.seconds_per_step:.1f}"),
            ("of it copies to the host", f"{compute.offload_seconds_per_step:.2f}"),
            ("of it exchange between ranks", f"{compute.exchange_seconds_per_step:.3f}"),
            ("tokens/s per GPU", f"{compute.tokens_per_second_per_gpu:,.0f}"),
            ("hours", f"{compute.hours:.1f}"),
            ("GPU hours", f"{compute.gpu_hours:.1f}"),
        ]
    )
    lines[-1] += f"   (MFU {setup.compute.utilisation:.0%}, stated, not measured)"
    if plan.levers:
        lines += ["", "levers                                                    peak GB   hours"]
        for lever in plan.levers:
            mark = "fits" if lever.fits else "    "
            lines.append(
                f"  {lever.change:<54} {lever.peak_bytes / GB:>8.1f} {lever.hours:>7.1f}  {mark}  {lever.note}"
            )
    return [*lines, "", plan.advice]


def serving_report(plan: ServingPlan) -> list[str]:
    """Return the lines for people."""
    setup, run = plan.setup, plan.setup.run
    lines = [f"{setup.gpu.name} x {setup.tensor_parallel} (tensor parallel), one replica", "", "memory of one rank, GB"]
    lines += _rows((name, f"{size / GB:.2f}") for name, size in plan.components.items())
    share = setup.gpu.memory_bytes * setup.memory_share
    lines += _rows(
        [
            (f"left for keys and values, of {share / GB:.1f}", f"{plan.kv_tokens * plan.kv_bytes_per_token / GB:.2f}"),
            ("bytes per token of keys and values", f"{plan.kv_bytes_per_token:,}"),
            ("tokens that fit", f"{plan.kv_tokens:,}"),
        ]
    )
    lines += ["", f"one observation of {run.observation_tokens} tokens"]
    lines += _rows(
        [
            ("latents", f"{plan.latents_per_observation}"),
            ("bytes of its latents (encoder worker, store)", f"{plan.latent_bytes_per_observation:,}"),
            ("keys and values as text, bytes", f"{plan.text_kv_bytes_per_observation:,}"),
            ("keys and values as latents, bytes", f"{plan.latent_kv_bytes_per_observation:,}"),
            ("TFLOP to encode it", f"{plan.encode_flops_per_observation / 1e12:.2f}"),
        ]
    )
    if setup.tensor_parallel > 1:
        lines += _rows([("bytes each rank sends per token", f"{plan.allreduce_bytes_per_token:,}")])
    lines += [
        "",
        f"one agent run: {run.calls} calls, {run.prompt_tokens} prompt, {run.action_tokens} a turn (replay model)",
    ]
    lines.append("     K   P  context/call  prefilled  cached  dec PF  enc PF  KV GB  runs held  KV moved GB  cold")
    lines += [
        f"  {arm.k:>4} {arm.polling:>3} {short_count(arm.mean_context):>13} {short_count(arm.prefilled_tokens):>10} "
        f"{arm.cached_share:>7.1%} {arm.decoder_pflops:>7.2f} {arm.encoder_pflops:>7.3f} {arm.kv_bytes / GB:>6.2f} "
        f"{arm.runs_resident:>10} {arm.kv_moved_bytes / GB:>12.1f} {arm.kv_moved_cold_bytes / GB:>5.0f}"
        for arm in plan.arms
    ]
    verdict = (
        "fits"
        if plan.fits
        else "does not fit: raise --tensor-parallel, lower --encoder-cache-latents, or use another GPU"
    )
    return [*lines, "", verdict]


def _encoder_shape(where: str) -> ModelShape:
    """Return the shape of an encoder: its folder, an LCLM folder that holds it, or a known name."""
    folder = Path(where)
    checkpoints = sorted(folder.glob("checkpoint_*")) if folder.is_dir() else []
    for place in (folder, *checkpoints):
        if (place / "encoder" / "config.json").is_file():
            return read_shape(place / "encoder")
    return read_shape(where)


def _named_base(config: Config) -> str | None:
    """Return a known model that the student's path names, so that a recipe can be planned before anything is there."""
    name = next((part for part in Path(config.model.student).parts if known_shape(part)), None)
    if name is not None:
        err(f"note: {config.model.student} is no student yet; taking {name} from its path as the base (--base sets it)")
    return name


def _windows(options: Options) -> Sequence[Window]:
    found = []
    for k in options.k:
        number = parse_k(k)
        # K=inf never moves, so P does not matter.
        for polling in options.polling if number is not None else options.polling[:1]:
            found.append(Window(k=number, polling=parse_polling(polling) if number is not None else 1))
    return found


def _rows(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {name:<46} {value:>14}" for name, value in pairs]


def _print(lines: Sequence[str], report: dict[str, Any]) -> None:
    for line in lines:
        out(line)
    out(json.dumps(report))
