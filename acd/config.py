"""Training configuration: typed data, loaded strictly from YAML and overridden on the command line."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError

from acd.readback import Kind, ReadBackRule
from loha.command_line import parse_options
from loha.errors import LohaError

Direction = Literal["forward", "reverse"]
Dtype = Literal["float32", "bfloat16"]
_LEAST = {
    1: (
        "data.limit",
        "data.held_out_limit",
        "loss.chunk",
        "model.mlp_chunks",
        "packing.attention_tokens",
        "readback.max_answer_chars",
        "run.epochs",
        "run.keep_last",
        "run.max_steps",
        "teacher.candidates",
        "teacher.trajectories_per_shard",
    ),
    0: (
        "data.workers",
        "loss.anchor_weight",
        "model.encoder_cache_gb",
        "optimizer.lr_adapter",
        "optimizer.lr_gains",
        "optimizer.lr_patch",
        "optimizer.warmup_steps",
        "optimizer.weight_decay",
        "run.checkpoint_every",
        "run.evaluate_every",
        "run.probe_turns",
        "run.seed",
    ),
}
"""Smallest values."""
EXTENDS = "extends"
"""The key of a file that names the one it differs from."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which trajectories train."""

    trajectories: str
    """Canonical JSONL (`loha data import`, `loha data select`)."""

    limit: int | None = None
    """Use only the first so many; the paper's ablations use 3,514 of 35,140."""

    held_out: str | None = None
    """Canonical JSONL of trajectories for evaluation; never trained on."""

    held_out_limit: int | None = 32
    """Use only the first so many of these."""

    workers: int = 0
    """Processes that render ahead, per rank, and that measure lengths before the start; 0 renders in line."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The student to train, and how its frozen parts are held."""

    student: str
    """Folder made by `loha init`."""

    base: str | None = None
    """Where the base is, when it is not where the student says."""

    lclm: str | None = None
    """Where the LCLM is, when it is not where the student says."""

    dtype: Dtype | None = None
    """Of the frozen weights and the activations; the base's own when left out. Trained tensors are float32."""

    checkpointing: bool = True
    """Recompute each decoder layer in the backward pass."""

    offload: bool = False
    """Keep layer inputs in pinned host memory (37.7 GB per rank for Qwen3-4B rows of 204,800 tokens)."""

    mlp_chunks: int = 1
    """Token chunks of the MLP inside a layer; 8 save about 11 GB at 204,800 tokens for 8.5 % more compute."""

    shard: bool = False
    """Share decoder, adapter and moments out over the processes (FSDP2). Off, every process holds all of them."""

    encoder_cache_gb: float = 0.0
    """Host memory per rank for pooled encoder states, kept from step to step. Pays when epochs repeat."""


@dataclass(frozen=True, kw_only=True)
class ViewsConfig:
    """Which views of a trajectory train."""

    latent_k: tuple[int, ...] = (0,)
    """K of the latent view. Several values: one is drawn per trajectory and epoch."""

    latent_share: float = 1.0
    """Share of trajectories whose latent view trains."""

    full_share: float = 1.0
    """Share of trajectories whose full-text view trains."""


@dataclass(frozen=True, kw_only=True)
class ReadBackConfig:
    """Questions about observations, appended to latent views."""

    share: float = 0.03
    """Of all supervised positions; 0 asks none."""

    kinds: tuple[Kind, ...] = ("line", "path", "value")
    """What is asked for: a whole line, a path, or the value behind a name."""

    templates: Mapping[str, str] = field(default_factory=lambda: dict(ReadBackRule().templates))
    """The wording for each kind; {cue} stands for the text that identifies the answer."""

    max_answer_chars: int = 160
    """Longer spans are not asked for."""

    def rule(self) -> ReadBackRule:
        """Return the settings of the question maker."""
        return ReadBackRule(
            share=self.share,
            kinds=self.kinds,
            templates={**ReadBackRule().templates, **self.templates},
            max_answer_chars=self.max_answer_chars,
        )


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """Where the targets come from."""

    mode: Literal["cache", "live"] = "cache"
    """cache: read what `acd.cache_teacher` wrote. live: a second forward pass with the patch off, nothing on disk."""

    cache: str | None = None
    """Folder of the distillation targets."""

    model: str | None = None
    """Teacher of these targets, when it is not the base; it must share the base's tokenizer."""

    anchor_cache: str | None = None
    """Folder of the anchor's targets (always the base's), when the distillation teacher is another model."""

    candidates: int = 64
    """Log-probabilities kept per position; one id is always left for the tail."""

    trajectories_per_shard: int = 256
    """About 0.7 GB of cache at 10,000 positions a trajectory."""


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The three terms."""

    anchor_weight: float = 1.0
    """lambda. With 0 the anchor is still measured where full-text views train; `views.full_share` 0 saves its cost."""

    direction: Direction = "forward"
    """Of the distillation term: forward is KL(teacher||student)."""

    anchor_direction: Direction = "forward"
    """Of the anchor."""

    chunk: int = 1024
    """Positions whose logits exist at one time: 0.6 GB for each 1,024 at V 151,936."""


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """How pieces fill rows and steps. Nothing here depends on the number of devices."""

    tokens_per_row: int = 204_800
    """Capacity of a packed row: what one device holds at one time."""

    tokens_per_step: int = 1_638_400
    """Capacity of one optimizer step over all ranks, a whole number of rows."""

    attention_tokens: int = 25_000
    """Length at which attention costs a token as much as the rest of the model does; balances rows. Qwen3-4B: 24.6K."""

    def __post_init__(self) -> None:
        if self.tokens_per_row < 1 or self.tokens_per_step % self.tokens_per_row or self.tokens_per_step < 1:
            raise LohaError(
                f"packing.tokens_per_step must be a multiple of packing.tokens_per_row, got {self.tokens_per_step} and "
                f"{self.tokens_per_row}"
            )

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step, over all ranks."""
        return self.tokens_per_step // self.tokens_per_row


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a learning rate per group."""

    lr_patch: float = 1e-4
    """Reading patch."""

    lr_gains: float = 1e-4
    """RMSNorm gains."""

    lr_adapter: float = 5e-5
    """Adapter."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    weight_decay: float = 0.0
    """Of patch and adapter; gains never decay."""

    warmup_steps: int = 0
    """Steps over which the learning rates rise linearly."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Of the learning rates after the warm-up, down to 0 at the last step."""

    max_grad_norm: float | None = 1.0
    """Clip the global gradient norm; null does not."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes and how long it goes on."""

    output_dir: str
    """Plan, metrics, checkpoints and the final student."""

    epochs: int = 1

    max_steps: int | None = None
    """End earlier, after so many optimizer steps."""

    seed: int = 0

    checkpoint_every: int = 50
    """Optimizer steps between checkpoints; 0 writes one only at the end."""

    keep_last: int = 2
    """Checkpoints kept."""

    evaluate_every: int = 0
    """Optimizer steps between evaluations on `data.held_out`; 0 evaluates never. The best student is kept."""

    probe_turns: int = 0
    """Turns of each held-out trajectory at which an evaluation lets the student reply, and checks its tool call."""

    resume: bool = True
    """Go on from the newest checkpoint in output_dir when there is one."""

    trackers: tuple[str, ...] = ("tensorboard",)
    """Experiment trackers that accelerate knows."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that defines a training run."""

    data: DataConfig
    model: ModelConfig
    run: RunConfig
    views: ViewsConfig = field(default_factory=ViewsConfig)
    readback: ReadBackConfig = field(default_factory=ReadBackConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        if self.teacher.mode == "cache" and not self.teacher.cache:
            raise LohaError("teacher.cache is missing: name the folder for `acd.cache_teacher`, or set mode: live")
        if self.teacher.mode == "live" and (self.teacher.model or self.teacher.anchor_cache):
            raise LohaError("teacher.mode live uses the base as teacher: another teacher.model needs mode: cache")
        if self.teacher.model and not self.teacher.anchor_cache:
            raise LohaError("teacher.model is not the base, so teacher.anchor_cache must name a cache of the base")
        for least, names in _LEAST.items():
            for name in names:
                self._check_number(name, least)
        for name in ("optimizer.epsilon", "optimizer.max_grad_norm"):
            if self._check_number(name, 0) == 0:
                raise LohaError(f"{name} must be above 0, got 0" + ("; null does not clip" if "norm" in name else ""))
        for name in ("optimizer.beta1", "optimizer.beta2"):
            if (self._check_number(name, 0) or 0) >= 1:
                raise LohaError(f"{name} must be below 1, got {self._number(name)}")
        if self.run.seed >= 2**32:
            raise LohaError(f"run.seed must be below 2**32, got {self.run.seed}")
        if self.run.evaluate_every and not self.data.held_out:
            raise LohaError("run.evaluate_every needs data.held_out: name a file of trajectories not trained on")
        if not self.views.latent_k or min(self.views.latent_k) < 0:
            raise LohaError(f"views.latent_k must hold whole numbers of at least 0, got {list(self.views.latent_k)}")
        for name in ("latent_share", "full_share"):
            if not 0 <= getattr(self.views, name) <= 1:
                raise LohaError(f"views.{name} must lie between 0 and 1, got {getattr(self.views, name)}")
        if not 0 <= self.readback.share < 1:
            raise LohaError(f"readback.share must be at least 0 and below 1, got {self.readback.share}")
        for kind, text in self.readback.templates.items():
            if "{cue}" not in text or kind not in ReadBackRule().templates:
                raise LohaError(f"readback.templates: {kind!r} must be line, path or value and hold {{cue}}: {text!r}")

    def _number(self, name: str) -> float | None:
        section, _, key = name.partition(".")
        return getattr(getattr(self, section), key)

    def _check_number(self, name: str, least: int) -> float | None:
        value = self._number(name)
        if value is not None and not least <= value < math.inf:  # refuses NaN too
            raise LohaError(f"{name} must be a finite number of at least {least}, got {value}")
        return value


def load_config(path: str | Path, overrides: Sequence[str] = (), *, prog: str = "acd") -> Config:
    """Read a YAML file and apply command-line overrides.

    A file may begin with `extends: other.yaml`, relative to itself: then it holds only what differs from that one.

    Args:
        path: the file; all other relative paths inside it are relative to the working directory.
        overrides: words such as `--optimizer.lr-patch 5e-5`.
        prog: the command, for `--help`.

    Raises:
        LohaError: for a missing file, an unknown key (names the nearest known one), or a value of the wrong type.
    """
    config = parse_config(_read_yaml(Path(path)), source=str(path))
    return parse_options(Config, overrides, prog=prog, default=config) if overrides else config


def parse_config(values: Any, *, source: str) -> Config:
    """Return the configuration that plain data describes.

    Args:
        values: nested mappings, as YAML gives them.
        source: names them in errors.
    """
    _check_keys(values, Config, source, "")
    try:
        return TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, LohaError):
            raise LohaError(f"{source}: {cause}") from error
        raise LohaError(f"{source}: {where}: {first['msg']}, got {first.get('input')!r}") from error


def config_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as plain data that YAML and JSON can hold."""
    return TypeAdapter(Config).dump_python(config, mode="json")


def config_yaml(config: Config) -> str:
    """Return the resolved configuration as YAML that `load_config` reads back."""
    return yaml.safe_dump(config_dict(config), sort_keys=False)


def _read_yaml(path: Path, seen: tuple[Path, ...] = ()) -> Any:
    """Return the plain data of a file, laid over that of the file that it extends."""
    if path.resolve() in seen:
        raise LohaError(f"{path}: extends itself")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise LohaError(f"{path}: no such configuration file; examples are in configs/") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LohaError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or EXTENDS not in values:
        return values
    parent = values.pop(EXTENDS)
    if not isinstance(parent, str):
        raise LohaError(f"{path}: {EXTENDS} must name a file, got {parent!r}")
    return _laid_over(_read_yaml(path.parent / parent, (*seen, path.resolve())), values)


def _laid_over(below: Any, above: Any) -> Any:
    """Return nested mappings merged key by key; anything else above replaces what is below."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {key: _laid_over(below.get(key), value) for key, value in above.items()}


def _check_keys(values: Any, kind: Any, source: str, prefix: str) -> None:
    """Refuse unknown and missing keys, before any value is looked at."""
    if not isinstance(values, Mapping):
        raise LohaError(f"{source}: {prefix.rstrip('.') or 'the file'} must be a mapping, got {type(values).__name__}")
    hints = typing.get_type_hints(kind)
    known = {item.name: item for item in dataclasses.fields(kind)}
    for key, value in values.items():
        if key not in known:
            raise LohaError(f"{source}: unknown key {prefix}{key}{_nearest(str(key), list(known), prefix)}")
        if dataclasses.is_dataclass(hints[key]):
            _check_keys(value, hints[key], source, f"{prefix}{key}.")
    for name, item in known.items():
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise LohaError(f"{source}: {prefix}{name} is missing")


def _nearest(key: str, known: list[str], prefix: str) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    return f"; did you mean {prefix}{near[0]}?" if near else f"; known keys: {', '.join(known)}"
