"""A tiny random base, LCLM and serving checkpoint, made through the real `loha init` and `loha export`.

The weights are random but not small, so that the next token depends on the whole context and its logit stands clear
of the second best; the head width is one that vLLM's CPU attention takes.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from loha.adapter import Adapter
from loha.export import export
from loha.init_student import Options as InitOptions
from loha.init_student import init_student

WIDTH, ENCODER_WIDTH, RATIO, WINDOW = 64, 48, 16, 64
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_response>", "</tool_response>", "<tool_call>", "</tool_call>", "<think>", "</think>")
MEMORY = ("<|memory_start|>", "<|memory_end|>", "<|memory|>")
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}\
{%- endif %}{{ '# Tools\\n<tools>' }}{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{%- endfor %}\
{{ '\\n</tools><|im_end|>\\n' }}{%- elif messages[0].role == 'system' %}\
{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class TinyCheckpoint:
    """Where the parts lie."""

    serving: Path
    decoder_only: Path


def build(folder: Path, *, seed: int = 0) -> TinyCheckpoint:
    """Make everything under `folder`."""
    torch.manual_seed(seed)
    base_tokenizer = _tokenizer(())
    lclm_tokenizer = _tokenizer(MEMORY)
    _base(folder / "base", base_tokenizer)
    _lclm(folder / "lclm", folder / "base", base_tokenizer, lclm_tokenizer)
    student = folder / "student"
    files, _ = init_student(InitOptions(base=folder / "base", lclm=folder / "lclm", out=student, rank=8))
    gains = {name: gain * (1 + 0.1 * torch.randn_like(gain)) for name, gain in files.gains.items()}
    dataclasses.replace(files, gains=gains).write(student)
    made = TinyCheckpoint(folder / "serving", folder / "decoder")
    export(student, made.serving, decoder_only=made.decoder_only, dtype=torch.float32, probe="")
    return made


def text(seed: int, words: int) -> str:
    """Return reproducible text of invented words, digits and punctuation."""
    generator = torch.Generator().manual_seed(seed)
    choice = torch.randint(0, len(_WORDS), (words,), generator=generator).tolist()
    return " ".join(_WORDS[i] + ("\n" if i % 11 == 0 else "") for i in choice)


_SYLLABLES = ("ka", "lo", "mi", "ne", "pu", "ra", "so", "ti", "vu", "ze")
_WORDS = [a + b + c for a in _SYLLABLES for b in _SYLLABLES for c in ("", "n", "s", "0", "7", "_")]


def _tokenizer(extra: tuple[str, ...]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator([text(seed, 200) for seed in range(20)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*CONTROL]})
    tokenizer.add_tokens(list(TAGS))
    tokenizer.add_tokens(list(extra), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _base(folder: Path, tokenizer: Any) -> None:
    config = Qwen3Config(
        vocab_size=640,
        hidden_size=WIDTH,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _lclm(folder: Path, base: Path, encoder_tokenizer: Any, decoder_tokenizer: Any) -> None:
    decoder = Qwen3ForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "proj" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    decoder.resize_token_embeddings(len(decoder_tokenizer))
    decoder.save_pretrained(folder / "decoder")
    decoder_tokenizer.save_pretrained(folder / "decoder")
    config = Qwen3Config(
        vocab_size=640,
        hidden_size=ENCODER_WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=32768,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    Qwen3Model(config).save_pretrained(folder / "encoder")
    encoder_tokenizer.save_pretrained(folder / "encoder")
    adapter = Adapter.fresh(ENCODER_WIDTH, WIDTH, output_rms=0.5, seed=1)
    (folder / "adapter").mkdir()
    tensors = {name: parameter.detach() for name, parameter in adapter.named_parameters()}
    save_file(tensors, folder / "adapter" / "adapter.safetensors")
    settings = {
        "compression_ratio": RATIO,
        "encoder_window_size": WINDOW,
        "pooling": "mean",
        "encoder_mask_type": "causal",
        "boundary_overlap": 0,
        "adapter_type": "mlp",
    }
    (folder / "model_config.json").write_text(json.dumps(settings))
