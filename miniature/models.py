"""Sizes of the miniature's models, and a tiny LCLM assembled for training."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from miniature.tokenizer import MEMORY

WIDTH = 128
ENCODER_WIDTH = 96
HEAD_WIDTH = 32
MAX_POSITION = 4096
ENCODER_WINDOW = 1024
INITIALIZER_RANGE = 0.08  # about 1/sqrt(width); with Qwen's 0.02 a model this narrow hardly starts to learn


def decoder_config(vocab_size: int, *, eos: int, pad: int, layers: int = 3) -> Any:
    """Return the base's Qwen3Config: about 0.75M parameters, servable by vLLM's CPU build (head width 32)."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=WIDTH // HEAD_WIDTH,
        num_key_value_heads=WIDTH // HEAD_WIDTH,
        head_dim=HEAD_WIDTH,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )


def encoder_config(vocab_size: int, *, pad: int) -> Any:
    """Return the encoder's Qwen3Config: two layers of width 96."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=ENCODER_WIDTH,
        intermediate_size=2 * ENCODER_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=ENCODER_WIDTH // HEAD_WIDTH,
        num_key_value_heads=ENCODER_WIDTH // HEAD_WIDTH,
        head_dim=HEAD_WIDTH,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=pad,
    )


class TinyAdapter(nn.Module):
    """RMSNorm -> Linear -> exact GELU -> Linear, with the tensor names of `adapter.safetensors`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(ENCODER_WIDTH, eps=1e-6)
        self.fc1 = nn.Linear(ENCODER_WIDTH, WIDTH)
        self.fc2 = nn.Linear(WIDTH, WIDTH)

    def forward(self, pooled_LE: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(self.norm(pooled_LE))))


class TinyLclm(nn.Module):
    """Decoder, encoder and adapter of one LCLM under training; bodies are shorter than one encoder window."""

    def __init__(self, decoder: Any, encoder: Any, ratio: int, first_marker: int) -> None:
        super().__init__()
        self.decoder, self.encoder, self.ratio, self.first_marker = decoder, encoder, ratio, first_marker
        self.adapter = TinyAdapter()

    def markers(self) -> torch.Tensor:
        """Return the `[2, D]` start and end marker: the decoder's rows just after its base's tokenizer."""
        return self.decoder.model.embed_tokens.weight[self.first_marker : self.first_marker + 2]

    def latents(self, bodies_BO: torch.Tensor) -> torch.Tensor:
        """Return `[B, ceil(O / ratio), D]` latents of equally long bodies; the last group averages what it has."""
        hidden_BOE = self.encoder(input_ids=bodies_BO, use_cache=False).last_hidden_state
        groups = [part.mean(dim=1) for part in hidden_BOE.split(self.ratio, dim=1)]
        return self.adapter(torch.stack(groups, dim=1))


def new_base(tokenizer: Any) -> Any:
    """Return a randomly initialised base for a tokenizer; its vocabulary is padded to a multiple of 64 rows."""
    from transformers import Qwen3ForCausalLM

    rows = -(-len(tokenizer) // 64) * 64
    return Qwen3ForCausalLM(decoder_config(rows, eos=tokenizer.eos_token_id, pad=tokenizer.pad_token_id))


def new_encoder(tokenizer: Any) -> Any:
    """Return a randomly initialised encoder for a tokenizer."""
    from transformers import Qwen3Model

    return Qwen3Model(encoder_config(len(tokenizer), pad=tokenizer.pad_token_id))


def save_lclm(lclm: TinyLclm, tokenizer: Any, folder: Path) -> None:
    """Write an LCLM in the released layout, with the tokenizer of its base.

    The decoder's embedding is cut to its tokenizer's length, as in the released checkpoints.
    """
    from safetensors.torch import save_file
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(folder / "encoder")
    longer = AutoTokenizer.from_pretrained(folder / "encoder")  # a copy that shares nothing
    longer.add_tokens([AddedToken(text, special=True, normalized=False) for text in MEMORY], special_tokens=True)
    longer.save_pretrained(folder / "decoder")
    decoder = copy.deepcopy(lclm.decoder)
    decoder.resize_token_embeddings(len(longer))
    decoder.save_pretrained(folder / "decoder")
    lclm.encoder.save_pretrained(folder / "encoder")
    (folder / "adapter").mkdir()
    tensors = {name: tensor.detach().contiguous() for name, tensor in lclm.adapter.state_dict().items()}
    save_file(tensors, folder / "adapter" / "adapter.safetensors")
    settings = {
        "compression_ratio": lclm.ratio,
        "encoder_window_size": ENCODER_WINDOW,
        "pooling": "mean",
        "encoder_mask_type": "causal",
        "boundary_overlap": 0,
        "adapter_type": "mlp",
    }
    (folder / "model_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def load_lclm(folder: Path) -> TinyLclm:
    """Return a saved LCLM in fp32, for evaluation."""
    from safetensors.torch import load_file
    from transformers import AutoModel, AutoModelForCausalLM

    settings = json.loads((folder / "model_config.json").read_text())
    decoder = AutoModelForCausalLM.from_pretrained(folder / "decoder", dtype=torch.float32)
    encoder = AutoModel.from_pretrained(folder / "encoder", dtype=torch.float32)
    lclm = TinyLclm(decoder, encoder, settings["compression_ratio"], _tokenizer_rows(folder / "encoder"))
    lclm.adapter.load_state_dict(load_file(folder / "adapter" / "adapter.safetensors"))
    return lclm


def _tokenizer_rows(folder: Path) -> int:
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(folder))
