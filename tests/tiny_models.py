"""Tiny random checkpoints in the real file formats: decoders of three architectures, LCLMs, a byte tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MARKERS = ("<|memory_start|>", "<|memory_end|>", "<|memory|>")
ROWS = 272  # more than the tokenizer has, as in real bases
ARCHITECTURES: dict[str, tuple[Any, Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, Qwen3Model),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, Qwen2Model),
    "llama": (LlamaConfig, LlamaForCausalLM, LlamaModel),
}
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'tool' %}{{ '<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + call.function.name + ' ' + call.function.arguments | tojson + '\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(folder: Path, *, extra: tuple[str, ...] = (), template: str = TEMPLATE) -> None:
    """Write a byte-level tokenizer whose first 256 ids are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN_ADDED])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in extra])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )
    fast.save_pretrained(str(folder))


def config(kind: str, *, width: int = 32, layers: int = 2, rows: int = ROWS, tied: bool = True, **more: Any) -> Any:
    """Return a tiny config with grouped key heads and odd sizes."""
    extra = {} if kind == "qwen2" else {"head_dim": 8}
    return ARCHITECTURES[kind][0](
        hidden_size=width,
        intermediate_size=width * 3 - 9,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=rows,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
        eos_token_id=258,
        pad_token_id=256,
        bos_token_id=None,
        **extra,
        **more,
    )


def write_decoder(
    folder: Path,
    *,
    kind: str = "qwen3",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    extra: tuple[str, ...] = (),
    **sizes: Any,
) -> Path:
    """Write a random decoder with gains that are not one; returns the folder."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[kind][1](config(kind, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
            else:
                parameter.normal_(0, 0.15)
    model.to(dtype).save_pretrained(str(folder))
    write_tokenizer(folder, extra=extra)
    return folder


def write_lclm(
    folder: Path,
    base: Path,
    *,
    kind: str = "qwen3",
    ratio: int = 4,
    window: int = 32,
    width: int = 24,
    seed: int = 1,
    decoder: bool = True,
    change: float = 0.02,
) -> Path:
    """Write an LCLM whose decoder is the base plus noise, with an embedding cut to the tokenizer's length."""
    torch.manual_seed(seed)
    encoder = ARCHITECTURES[kind][2](config(kind, width=width))
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            parameter.uniform_(0.5, 1.5) if name.endswith("norm.weight") else parameter.normal_(0, 0.2)
    encoder.save_pretrained(str(folder / "encoder"))
    write_tokenizer(folder / "encoder")
    decoder_width = json.loads((base / "config.json").read_text())["hidden_size"]
    (folder / "adapter").mkdir(parents=True)
    tensors = {
        "norm.weight": torch.rand(width) + 0.5,
        "fc1.weight": torch.randn(decoder_width, width) * 0.3,
        "fc1.bias": torch.randn(decoder_width) * 0.1,
        "fc2.weight": torch.randn(decoder_width, decoder_width) * 0.2,
        "fc2.bias": torch.randn(decoder_width) * 0.1,
    }
    save_file(tensors, folder / "adapter" / "adapter.safetensors")
    write_settings(folder, compression_ratio=ratio, encoder_window_size=window)
    if decoder:
        _write_lclm_decoder(folder / "decoder", base, change)
    return folder


def write_settings(folder: Path, **settings: Any) -> None:
    """Write `model_config.json` with the released defaults for what is not given."""
    defaults = {
        "compression_ratio": 16,
        "encoder_window_size": 1024,
        "pooling": "mean",
        "encoder_mask_type": "causal",
        "boundary_overlap": 0,
        "adapter_type": "mlp",
    }
    (folder / "model_config.json").write_text(json.dumps(defaults | settings))


def _write_lclm_decoder(folder: Path, base: Path, change: float) -> None:
    folder.mkdir()
    write_tokenizer(folder, extra=MARKERS)
    rows = len(PreTrainedTokenizerFast.from_pretrained(str(folder)))
    tensors = {name: tensor.float() for name, tensor in load_file(base / "model.safetensors").items()}
    tensors = {name: tensor + torch.randn_like(tensor) * change for name, tensor in tensors.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = tensors[name][:rows].contiguous()
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((base / "config.json").read_text()) | {"vocab_size": rows, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(values))


def history(observations: int, *, characters: int = 150) -> list[dict[str, Any]]:
    """Return a chat history with distinct tool results of growing length."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You fix bugs."},
        {"role": "user", "content": "The test fails."},
    ]
    for i in range(observations):
        call = {
            "id": f"c{i}",
            "type": "function",
            "function": {"name": "bash", "arguments": json.dumps({"cmd": f"cat {i}"})},
        }
        body = f"{i} " + "".join(chr(97 + (i * 7 + j * (i + 3)) % 26) for j in range(characters + 13 * i))
        messages.append({"role": "assistant", "content": f"Look {i}.", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": body})
    return messages
