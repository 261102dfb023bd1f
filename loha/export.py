"""`loha export`: merge a student into one serving checkpoint, in float32 with a single rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import transformers
import tyro

from loha import __version__
from loha.atomic import atomic_path, check_replaceable
from loha.console import out
from loha.errors import LohaError
from loha.hf_config import ARCHITECTURE, MODEL_TYPE
from loha.merge import MergedWeights, base_dtype
from loha.rounding_drift import DEFAULT_PROBE, RoundingDrift, measure_drift
from loha.serving_checkpoint import ENCODER_TOKENIZER, copy_side_files, write_json, write_shards
from loha.student import build_renderer, encoder_folder, verify_parts
from loha.student_files import StudentConfig, StudentFiles
from loha.weight_files import WeightFiles, float_dtype, read_json

Dtype = Literal["float32", "bfloat16", "float16"]
DRIFT_NAME = "rounding_drift.json"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `loha export`."""

    student: Annotated[Path, tyro.conf.Positional]
    """Folder of the student."""

    out: Path
    """Serving checkpoint to write, read by `loha serve` and the reference."""

    decoder_only: Path | None = None
    """Also write the merged decoder alone, as a stock checkpoint for stock servers."""

    dtype: Dtype | None = None
    """Of the written weights; the base's own when left out."""

    base: Path | None = None
    """Where the base is now, when it has moved."""

    lclm: Path | None = None
    """Where the LCLM (or the encoder) is now, when it has moved."""

    probe: str = DEFAULT_PROBE
    """Text on which the drift from rounding the merged weights is measured; empty to skip it (it holds the decoder in
    float32)."""


def main(options: Options) -> None:
    """Merge patch and gains into the base's weights and write a serving checkpoint."""
    exported = export(
        options.student,
        options.out,
        decoder_only=options.decoder_only,
        dtype=float_dtype(options.dtype),
        base=options.base,
        lclm=options.lclm,
        probe=options.probe,
    )
    out(f"{options.out}: serving checkpoint, {exported.tensors} tensors in {exported.dtype}")
    if options.decoder_only:
        out(f"{options.decoder_only}: merged decoder alone")
    if exported.drift:
        out(exported.drift.sentence())


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export wrote."""

    tensors: int
    dtype: str
    drift: RoundingDrift | None


def export(
    student: str | Path,
    folder: str | Path,
    *,
    decoder_only: str | Path | None = None,
    dtype: torch.dtype | None = None,
    base: str | Path | None = None,
    lclm: str | Path | None = None,
    probe: str = DEFAULT_PROBE,
) -> Exported:
    """Write the serving checkpoint of a student, tensor by tensor.

    Args:
        student: folder of the student.
        folder: to write.
        decoder_only: also write the merged decoder alone here.
        dtype: of the weights; the base's own by default.
        base: where the base is now.
        lclm: where the LCLM or encoder is now.
        probe: text for the drift measurement; empty skips it.

    Raises:
        LohaError: when a part is missing or is not what the student was made with, or when an output would replace
            something else than an older export.
    """
    files = StudentFiles.read(student)
    config = dataclasses.replace(
        files.config,
        base=str(base or files.config.base),
        encoder=str(encoder_folder(lclm) if lclm else files.config.encoder),
    )
    _check_outputs(folder, decoder_only, [Path(student), Path(config.base), Path(config.encoder)])
    verify_parts(config, student=str(student))
    target = dtype or base_dtype(WeightFiles(config.base))
    merged = MergedWeights(config.base, files, dtype=target)
    drift = measure_drift(config.base, files, dtype=target, text=probe) if probe else None
    text_config = read_json(Path(config.base) / "config.json") | {"dtype": _name(target)}
    tensors = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal tensors
        for item in _all_tensors(merged, files, config, target):
            tensors += 1
            yield item

    with atomic_path(folder) as temporary:
        copy_side_files(Path(config.base), temporary)
        copy_side_files(Path(config.encoder), temporary / ENCODER_TOKENIZER)
        write_shards(temporary, counted())
        write_json(temporary / "config.json", _serving_config(config, text_config, target))
        if drift:
            write_json(temporary / DRIFT_NAME, dataclasses.asdict(drift))
    if decoder_only:
        with atomic_path(decoder_only) as temporary:
            copy_side_files(Path(config.base), temporary)
            write_shards(temporary, merged.items())
            write_json(temporary / "config.json", text_config)
    return Exported(tensors=tensors, dtype=_name(target), drift=drift)


def _check_outputs(folder: str | Path, decoder_only: str | Path | None, inputs: list[Path]) -> None:
    """Refuse to write over what is being read, over a folder that is no older export, or twice into one folder."""
    if decoder_only and Path(decoder_only).resolve() == Path(folder).resolve():
        raise LohaError(f"--out and --decoder-only both name {folder}; give the decoder a folder of its own")
    for output in [Path(folder), *([Path(decoder_only)] if decoder_only else [])]:
        used = [path for path in inputs if path.resolve().is_relative_to(output.resolve())]
        if used:
            raise LohaError(
                f"{output} cannot be written: {used[0]} in it is part of the student; choose another folder"
            )
        check_replaceable(output, marker="config.json", kind="exported checkpoint")


def _all_tensors(
    merged: MergedWeights, files: StudentFiles, config: StudentConfig, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in merged.items():
        yield f"decoder.{name}", tensor
    for name, tensor in WeightFiles(config.encoder).items():
        yield f"encoder.{name}", tensor.to(dtype)
    for name, tensor in files.adapter.items():
        yield f"adapter.{name}", tensor.to(dtype)
    yield "markers", files.markers.to(dtype)


def _serving_config(config: StudentConfig, text_config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    encoder_config = read_json(Path(config.encoder) / "config.json") | {"dtype": _name(dtype)}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": _name(dtype),
        "text_config": text_config,
        "encoder_config": encoder_config,
        "compression_ratio": config.ratio,
        "encoder_window": config.window,
        "placeholder_token_id": build_renderer(config).placeholder_id,
        "tie_word_embeddings": bool(text_config.get("tie_word_embeddings", False)),
        "loha_version": __version__,
        # Without it transformers 5 warns of a Mistral tokenizer's fault when it loads any large tokenizer from here.
        "transformers_version": transformers.__version__,
        "fingerprint": config.fingerprint,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
