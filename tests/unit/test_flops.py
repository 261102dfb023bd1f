"""Operations and model shapes: by hand, by brute force, against torch's own counter, against the paper's figures."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from loha.errors import LohaError
from loha.flops import (
    adapter_flops,
    attention_flops,
    decoder_call_flops,
    encoder_flops,
    head_flops,
    linear_flops,
    patch_flops,
)
from loha.hardware import find_gpu
from loha.model_shape import KNOWN_SHAPES, ModelShape, read_shape

QWEN_4B = KNOWN_SHAPES["qwen3-4b"]
ENCODER = KNOWN_SHAPES["qwen3-embedding-0.6b"]

SMALL = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}
FAMILIES = {
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "qwen3 with biases": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": False},
    "llama": {"model_type": "llama", "tie_word_embeddings": False},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}


def test_a_tiny_shape_by_hand() -> None:
    shape = ModelShape(layers=2, width=4, mlp_width=6, heads=2, kv_heads=1, head_width=2, vocabulary=10)
    # q 4x4, k 2x4, v 2x4, o 4x4, gate and up 6x4, down 4x6
    assert shape.projection_parameters == 2 * (16 + 8 + 8 + 16 + 24 + 24 + 24)
    assert linear_flops(shape) == 2 * 240
    assert head_flops(shape) == 80
    # rank 1: out + in of each projection
    assert shape.patch_parameters(1) == 2 * (8 + 6 + 6 + 8 + 10 + 10 + 10)
    assert patch_flops(shape, 1) == 2 * shape.patch_parameters(1)
    # three tokens see 1, 2 and 3; 4 * 2 heads * 2 wide, in 2 layers
    assert attention_flops(shape, 0, 3) == 16 * 6 * 2
    # context 5 of which 3 cached, output 2: positions 3, 4 and the first generated one pass; they see 4, 5 and 6
    assert decoder_call_flops(shape, context=5, cached=3, output=2) == 3 * 480 + 16 * 15 * 2 + 2 * 80
    assert adapter_flops(3, 4, 5) == 2 * 5 * (12 + 16)
    assert shape.kv_bytes_per_token() == 2 * 2 * 2 * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_counts_the_parameters_of_the_real_model(family: str) -> None:
    config = AutoConfig.for_model(**SMALL, **FAMILIES[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config(config.to_dict())
    assert shape.parameters() == sum(p.numel() for p in model.parameters())
    assert shape.gain_parameters == sum(p.numel() for name, p in model.named_parameters() if "norm" in name)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_matrix_operations_equal_what_torch_counts(family: str) -> None:
    config = AutoConfig.for_model(**SMALL, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    shape, tokens = ModelShape.from_config(config.to_dict()), 13
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(tokens)[None], use_cache=False)
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    assert counts["aten.mm"] == tokens * (linear_flops(shape) + head_flops(shape))
    # Eager attention computes the full square; ours counts the causal pairs of it.
    assert counts["aten.bmm"] * (tokens + 1) == 2 * tokens * attention_flops(shape, 0, tokens)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 40), st.integers(0, 40), st.sampled_from([None, 1, 7, 100]))
def test_attention_pairs_equal_a_loop(start: int, extra: int, window: int | None) -> None:
    shape = ModelShape(
        layers=2, width=4, mlp_width=6, heads=2, kv_heads=1, head_width=2, vocabulary=10, windows=(None, window)
    )
    positions = range(start, start + extra)
    seen = sum(i + 1 for i in positions) + sum(min(i + 1, window or i + 1) for i in positions)
    assert attention_flops(shape, start, start + extra) == 16 * seen


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 50))
def test_a_cached_prefix_is_what_an_earlier_call_computed(context: int, more: int, output: int) -> None:
    """Two calls, the second on the first one's cache, cost one call plus what was sampled twice."""
    first = decoder_call_flops(QWEN_4B, context=context, cached=0, output=1) - head_flops(QWEN_4B)
    second = decoder_call_flops(QWEN_4B, context=context + more + 1, cached=context, output=output)
    assert first + second == decoder_call_flops(QWEN_4B, context=context + more + 1, cached=0, output=output)


def test_a_whole_prefix_in_the_cache_still_computes_the_last_position() -> None:
    assert decoder_call_flops(QWEN_4B, context=50, cached=50, output=1) == decoder_call_flops(
        QWEN_4B, context=50, cached=49, output=1
    )
    with pytest.raises(LohaError, match="51 cached tokens in a context of 50"):
        decoder_call_flops(QWEN_4B, context=50, cached=51, output=1)


def test_known_shapes_have_the_papers_sizes() -> None:
    assert QWEN_4B.layers * 7 == 252
    assert round(QWEN_4B.patch_parameters(64) / 1e6) == 132
    assert QWEN_4B.gain_parameters == 196_096
    assert round(QWEN_4B.projection_parameters / 1e9, 3) == 3.633
    assert QWEN_4B.kv_bytes_per_token() == 147_456


@pytest.mark.parametrize(("tokens", "printed"), [(1_860_000, 1.64), (2_450_000, 2.16)])
def test_encoder_column_of_the_paper(tokens: int, printed: float) -> None:
    """Tables 1 and 2: 1.86M tokens are 1.64 PF, 2.45M are 2.16 PF; so the paper counts no attention."""
    assert round(encoder_flops(ENCODER, tokens, attention=False) / 1e15, 2) == printed
    with_attention = encoder_flops(ENCODER, tokens) / 1e15
    assert 1.12 < with_attention / printed < 1.14


def test_encoder_windows_are_independent() -> None:
    assert encoder_flops(ENCODER, 2 * 1024 + 5) == 2 * encoder_flops(ENCODER, 1024) + encoder_flops(ENCODER, 5)


def test_shapes_are_read_from_folders_files_and_names(tmp_path) -> None:
    config = SMALL | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "loha", "text_config": config}))
    assert read_shape(tmp_path) == read_shape(tmp_path / "config.json") == ModelShape.from_config(config)
    assert read_shape("Qwen/Qwen3-4B-Instruct-2507") == QWEN_4B
    with pytest.raises(LohaError, match="and no known model name"):
        read_shape(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_experts": 128}, "only dense models"),
    ],
)
def test_configs_that_are_not_planned(change: dict, message: str) -> None:
    with pytest.raises(LohaError, match=message):
        ModelShape.from_config(SMALL | change)


def test_broken_config_files(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(LohaError, match="not valid JSON"):
        read_shape(path)
    path.write_text("[]")
    with pytest.raises(LohaError, match="expected a mapping"):
        read_shape(path)


def test_accelerators_by_name() -> None:
    assert find_gpu("H100-80GB").flops == 989.4e12
    with pytest.raises(LohaError, match="did you mean h100-80gb"):
        find_gpu("h100-80g")
