"""`loha init`: make a student from a base and an LCLM checkpoint, reading both one tensor at a time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from loha.adapter import Adapter
from loha.atomic import check_replaceable
from loha.console import err, out
from loha.decoder import is_projection
from loha.encoder import EncoderSettings
from loha.errors import LohaError
from loha.init_report import JSON_NAME, PLOT_NAME, InitReport, ProjectionReport, VectorReport
from loha.lclm import (
    CONFIG_NAME,
    EMBEDDING,
    embedding_rms,
    find_lclm,
    load_adapter,
    load_config,
    read_markers,
    read_settings,
)
from loha.lowrank import fresh_factors
from loha.peft_file import Factors
from loha.progress import progress_bar
from loha.student import encoder_folder, make_fingerprint
from loha.student_files import CONFIG_NAME as STUDENT_CONFIG_NAME
from loha.student_files import StudentConfig, StudentFiles
from loha.svd import truncate
from loha.tokenizer_dir import load_tokenizer, require_same_tokens
from loha.weight_files import WeightFiles


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `loha init`."""

    base: Path
    """Folder of the base decoder (safetensors, tokenizer, chat template)."""

    out: Path
    """Student folder to write."""

    lclm: Path | None = None
    """LCLM checkpoint folder (or a parent of checkpoint_<n> folders); its decoder gives the patch and the markers."""

    encoder: Path | None = None
    """Instead of --lclm, for a zero patch: an LCLM folder without a decoder, or a bare Hugging Face encoder (which gets
    an untrained adapter)."""

    rank: int = 64
    """Rank of the reading patch; clipped to the smaller side of a projection."""

    patch: Literal["svd", "zero"] | None = None
    """Start: `svd` is the best approximation of LCLM decoder minus base, `zero` leaves the base as it is. By default
    svd where there is an LCLM decoder."""

    ratio: int = 16
    """Tokens per latent; only for a bare encoder, an LCLM has its own."""

    window: int = 1024
    """Encoder tokens per window; only for a bare encoder."""

    seed: int = 0
    """Of the random factors of a zero patch and of an untrained adapter."""


def main(options: Options) -> None:
    """Make a student: reading patch, gains, adapter and markers, with a report of what the patch holds."""
    check_replaceable(options.out, marker=STUDENT_CONFIG_NAME, kind="student")
    files, report = init_student(options)
    extra = {}
    if report:
        extra = {JSON_NAME: report.to_json(), PLOT_NAME: report.plot()}
        out(report.table())
        if warning := report.warning():
            err(warning)
    files.write(options.out, extra=extra)
    patch = sum(A.numel() + B.numel() for A, B in files.patch.values())
    gains = sum(gain.numel() for gain in files.gains.values())
    adapter = sum(tensor.numel() for tensor in files.adapter.values())
    out(f"{options.out}: {files.config.start} start, trainable {patch:,} patch + {gains:,} gains + {adapter:,} adapter")


def init_student(options: Options) -> tuple[StudentFiles, InitReport | None]:
    """Compute what `loha init` writes.

    Raises:
        LohaError: when a checkpoint is missing or malformed, or the LCLM belongs to another base.
    """
    if (options.lclm is None) == (options.encoder is None):
        raise LohaError("give either --lclm (an LCLM checkpoint) or --encoder (an encoder for a zero patch)")
    if options.rank < 1:
        raise LohaError(f"rank must be at least 1, got {options.rank}")
    base = WeightFiles(options.base)
    _check_config(base)
    source = _source(options, base)
    start = options.patch or ("svd" if source.decoder else "zero")
    config = StudentConfig(
        base=str(options.base.resolve()),
        encoder=str(source.encoder.resolve()),
        ratio=source.settings.ratio,
        window=source.settings.window,
        rank=options.rank,
        start=start,
    )
    config = dataclasses.replace(config, fingerprint=make_fingerprint(config))
    gains = {n.removesuffix(".weight"): base.tensor(n).float() for n in base.names() if is_gain(n, base.shape(n))}
    report = None
    if start == "svd":
        if source.decoder is None:
            raise LohaError(f"{source.folder} has no decoder/, which an svd start needs; use --patch zero")
        patch, report = svd_patch(base, WeightFiles(source.decoder), options.rank, seed=options.seed)
    else:
        patch = zero_patch(base, options.rank, seed=options.seed)
    adapter = {name: tensor.detach().float() for name, tensor in source.adapter.named_parameters()}
    return StudentFiles(config, patch, gains, adapter, source.markers), report


def svd_patch(base: WeightFiles, lclm: WeightFiles, rank: int, *, seed: int) -> tuple[dict[str, Factors], InitReport]:
    """Return the best rank-R approximation of W_LCLM - W_0 for each projection, and the report.

    The difference is taken in float32 or better. Directions without energy (rank-deficient deltas) get the random A and
    zero B of a zero patch, so that they can train.

    Args:
        base: W_0.
        lclm: W_LCLM; its embedding may have fewer rows than the base's.
        rank: R.
        seed: of the directions without energy.

    Raises:
        LohaError: when the two decoders do not have the same projections.
    """
    _require_same_decoder(base, lclm)
    patch, reports = {}, []
    generator = torch.Generator().manual_seed(seed)
    names = _projections(base)
    bar = progress_bar("svd", total=len(names), unit="matrix")
    for name in names:
        weight, other = base.tensor(f"{name}.weight"), lclm.tensor(f"{name}.weight")
        delta = truncate(other.float() - weight.float(), rank)
        reports.append(ProjectionReport.of(name, weight, other, delta))
        fresh, _ = fresh_factors((weight.shape[0], weight.shape[1]), rank, generator=generator)
        empty = (delta.A == 0).all(1, keepdim=True)
        patch[name] = (torch.where(empty, fresh, delta.A), delta.B)
        bar.update()
    bar.close()
    gains = [n for n in base.names() if is_gain(n, base.shape(n))]
    return patch, InitReport(
        projections=reports,
        gains=[VectorReport.of(name, base, lclm) for name in gains],
        embedding=VectorReport.of(EMBEDDING, base, lclm),
    )


def zero_patch(base: WeightFiles, rank: int, *, seed: int) -> dict[str, Factors]:
    """Return a patch that leaves the base as it is: A random, B zero."""
    generator = torch.Generator().manual_seed(seed)
    return {n: fresh_factors(base.shape(f"{n}.weight"), rank, generator=generator) for n in _projections(base)}


def is_gain(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of a decoder checkpoint is the gain of an RMSNorm."""
    return len(shape) == 1 and name.endswith("norm.weight")


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where the encoder side of a student comes from."""

    folder: Path
    settings: EncoderSettings
    encoder: Path
    adapter: Adapter
    markers: torch.Tensor
    decoder: Path | None


def _source(options: Options, base: WeightFiles) -> _Source:
    folder = options.lclm or options.encoder
    assert folder is not None
    width = base.shape(EMBEDDING)[1]
    if options.encoder is not None and (folder / "config.json").is_file() and not (folder / CONFIG_NAME).is_file():
        settings = EncoderSettings(ratio=options.ratio, window=options.window)
        adapter = Adapter.fresh(
            load_config(folder).hidden_size, width, output_rms=embedding_rms(base), seed=options.seed
        )
        markers = mean_markers(base)
        return _Source(folder=folder, settings=settings, encoder=folder, adapter=adapter, markers=markers, decoder=None)
    root = find_lclm(folder)
    decoder = root / "decoder" if (root / "decoder").is_dir() else None
    if decoder:
        _require_same_tokenizer(options.base, decoder)
    adapter = load_adapter(root)
    if adapter.fc2.weight.shape[0] != width:
        raise LohaError(
            f"{root}: the adapter writes width {adapter.fc2.weight.shape[0]}, the base {base.folder} reads {width}; "
            "the LCLM was made for another base"
        )
    return _Source(
        folder=root,
        settings=read_settings(root),
        encoder=encoder_folder(root),
        adapter=adapter,
        markers=read_markers(decoder) if decoder else mean_markers(base),
        decoder=decoder,
    )


def _check_config(base: WeightFiles) -> None:
    """Refuse a base whose weights are not those of its config: it could never be loaded."""
    config = load_config(base.folder)
    layers = {int(name.partition(".layers.")[2].partition(".")[0]) for name in _projections(base)}
    got, expected = (len(layers), base.shape(EMBEDDING)[1]), (config.num_hidden_layers, config.hidden_size)
    if got != expected:
        raise LohaError(
            f"{base.folder}: the weights have {got[0]} layers of width {got[1]}, config.json names {expected[0]} of "
            f"width {expected[1]}; the files are of different models"
        )


def _require_same_tokenizer(base: Path, decoder: Path) -> None:
    """Refuse an LCLM of another base, also where all its shapes fit."""
    require_same_tokens(
        load_tokenizer(base), load_tokenizer(decoder), name=f"the base {base}", other_name=f"the LCLM decoder {decoder}"
    )


def mean_markers(base: WeightFiles) -> torch.Tensor:
    """Return markers for a base without an LCLM decoder: both are the mean embedding row, a vector that names no token.

    Returns:
        float32 `[2, D]`.
    """
    return base.tensor(EMBEDDING).mean(0, keepdim=True, dtype=torch.float32).repeat(2, 1)


def _projections(base: WeightFiles) -> list[str]:
    names = [name.removesuffix(".weight") for name in base.names() if name.endswith(".weight")]
    found = [name for name in names if is_projection(name)]
    if not found:
        raise LohaError(f"{base.folder} has no q/k/v/o/gate/up/down projections; this architecture is not supported")
    return sorted(found, key=_layer_order)


def _layer_order(name: str) -> tuple[int, str]:
    return int(name.partition(".layers.")[2].partition(".")[0]), name


def _require_same_decoder(base: WeightFiles, lclm: WeightFiles) -> None:
    for name in _projections(base):
        name += ".weight"
        if name not in lclm or lclm.shape(name) != base.shape(name):
            got = f"shape {list(lclm.shape(name))}" if name in lclm else "no such tensor"
            raise LohaError(
                f"the LCLM decoder {lclm.folder} was not made from the base {base.folder}: {name} has {got}, "
                f"the base has shape {list(base.shape(name))}"
            )
    extra = [name for name in lclm.names() if name not in base and name != "lm_head.weight"]
    if extra:
        raise LohaError(
            f"the LCLM decoder {lclm.folder} was not made from the base {base.folder}: it also has {extra[0]}"
        )
