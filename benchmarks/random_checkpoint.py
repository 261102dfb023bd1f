"""Write a serving checkpoint with random weights of a chosen shape, to measure speed where no weights can be had.

    python benchmarks/random_checkpoint.py --tokenizer QWEN3_TOKENIZER_DIR --out runs/random
    loha serve runs/random/serving ...      # and runs/random/decoder for stock vLLM

A Qwen3 decoder of over 100M parameters by default, its own first layers as encoder, through the real `loha init`
(zero patch) and `loha export`. Replays fix the length of every reply, so speed does not depend on what weights say.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from loha.cli import run_main
from loha.console import out
from loha.export import export
from loha.init_student import Options as InitOptions
from loha.init_student import init_student
from loha.lclm import lclm_from_layers
from loha.tokenizer_dir import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the script."""

    tokenizer: Path
    """Folder with tokenizer and chat template."""

    out: Path
    """Folder for base, encoder, student, serving and decoder."""

    width: int = 512
    """Of the decoder."""

    layers: int = 12
    """Of the decoder."""

    heads: int = 8
    """Query heads, 64 wide."""

    kv_heads: int = 2
    """Key and value heads."""

    intermediate: int = 1536
    """Width of the MLP."""

    encoder_layers: int = 3
    """First layers of the decoder that become the encoder."""

    context: int = 16_384
    """Longest context."""

    seed: int = 0
    """Of the weights."""


def main(options: Options) -> None:
    """Write the checkpoints."""
    torch.manual_seed(options.seed)
    base, encoder, student = (options.out / name for name in ("base", "encoder", "student"))
    tokenizer = load_tokenizer(options.tokenizer)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 128) * 128,
        hidden_size=options.width,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=64,
        max_position_embeddings=options.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model.save_pretrained(base)
    for file in options.tokenizer.iterdir():
        shutil.copy(file, base / file.name)
    lclm_from_layers(base, layers=options.encoder_layers, ratio=16, window=1024, out_dir=encoder, seed=options.seed)
    files, _ = init_student(InitOptions(base=base, encoder=encoder, out=student, rank=8))
    files.write(student)
    export(student, options.out / "serving", decoder_only=options.out / "decoder", probe="")
    out(json.dumps({"command": "random_checkpoint", "out": str(options.out), "decoder_parameters": parameters}))


if __name__ == "__main__":
    import sys

    sys.exit(run_main(main, sys.argv[1:], prog="random_checkpoint.py"))
