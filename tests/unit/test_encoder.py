"""The latent encoder against a naive one: a loop over windows and groups through the stock model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from loha.encoder import EncoderSettings, LatentEncoder, pool
from loha.errors import LohaError
from loha.lclm import load_encoder
from tests.tiny_models import write_decoder, write_lclm
from tests.tolerances import PACKED_FP32

LENGTHS = (1, 3, 47, 123, 250, 64, 5)


def naive(encoder: torch.nn.Module, ids: torch.Tensor, ratio: int, window: int) -> torch.Tensor:
    """Encode window by window with the stock attention, average group by group."""
    rows = []
    for start in range(0, len(ids), window):
        part = ids[start : start + window]
        with torch.no_grad():
            states = encoder(input_ids=part.unsqueeze(0), use_cache=False).last_hidden_state[0]
        rows += [states[i : i + ratio].mean(0) for i in range(0, len(part), ratio)]
    return torch.stack(rows)


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def encoder_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    base = write_decoder(root / "base")
    return write_lclm(root / "lclm", base, kind=request.param, decoder=False) / "encoder"


@pytest.mark.parametrize(("ratio", "window"), [(4, 32), (16, 100), (8, 64), (1, 7), (16, 5)])
def test_equals_naive_whatever_else_is_in_the_batch(encoder_folder: Path, ratio: int, window: int) -> None:
    settings = EncoderSettings(ratio=ratio, window=window)
    latent_encoder = LatentEncoder(load_encoder(encoder_folder, dtype=torch.float32), settings)
    stock = AutoModel.from_pretrained(encoder_folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    torch.manual_seed(ratio)
    bodies = [torch.randint(0, 256, (n,)) for n in LENGTHS]
    together = latent_encoder(bodies)
    for body, pooled in zip(bodies, together, strict=True):
        expected = naive(stock, body, ratio, window)
        (alone,) = latent_encoder([body])
        assert pooled.shape == expected.shape == (settings.count(len(body)), 24)
        torch.testing.assert_close(pooled, expected, rtol=0, atol=PACKED_FP32)
        torch.testing.assert_close(alone, pooled, rtol=0, atol=PACKED_FP32)


def test_small_batches_give_the_same(encoder_folder: Path) -> None:
    encoder = load_encoder(encoder_folder, dtype=torch.float32)
    settings = EncoderSettings(ratio=4, window=16)
    bodies = [torch.arange(n) % 256 for n in LENGTHS]
    few = LatentEncoder(encoder, settings, tokens_per_batch=20)(bodies)
    many = LatentEncoder(encoder, settings, tokens_per_batch=100_000)(bodies)
    for a, b in zip(few, many, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=PACKED_FP32)


def test_batches_are_bounded(encoder_folder: Path) -> None:
    latent_encoder = LatentEncoder(
        load_encoder(encoder_folder, dtype=torch.float32), EncoderSettings(ratio=4, window=32), tokens_per_batch=128
    )
    rows: list[int] = []
    latent_encoder.encoder.get_input_embeddings().register_forward_hook(
        lambda _, args, __: rows.append(args[0].shape[1])
    )
    latent_encoder([torch.zeros(5000, dtype=torch.long)])
    assert sum(rows) == 5000
    assert max(rows) <= 128


def test_pooling_averages_what_a_group_has() -> None:
    states = torch.tensor([[[0.0], [2.0], [4.0], [6.0], [10.0]]])
    assert pool(states, 2).flatten().tolist() == [1.0, 5.0, 10.0]
    assert pool(states[:, :1], 2).flatten().tolist() == [0.0]


def test_training_mode_does_not_reach_the_frozen_encoder(encoder_folder: Path) -> None:
    latent_encoder = LatentEncoder(
        load_encoder(encoder_folder, dtype=torch.float32), EncoderSettings(ratio=4, window=32)
    )
    latent_encoder.train()
    assert not any(module.training for module in latent_encoder.modules())
    assert not any(parameter.requires_grad for parameter in latent_encoder.parameters())


def test_an_empty_body_is_an_error(encoder_folder: Path) -> None:
    latent_encoder = LatentEncoder(
        load_encoder(encoder_folder, dtype=torch.float32), EncoderSettings(ratio=4, window=32)
    )
    with pytest.raises(LohaError, match="observation 1 of 2 has no encoder tokens"):
        latent_encoder([torch.zeros(3, dtype=torch.long), torch.zeros(0, dtype=torch.long)])


@pytest.mark.parametrize(
    ("field", "value"), [("pooling", "max"), ("mask", "bidirectional"), ("overlap", 8), ("adapter_type", "linear")]
)
def test_what_is_not_built_is_named(field: str, value: object) -> None:
    with pytest.raises(LohaError, match=f"{field} is {value!r}"):
        EncoderSettings(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("ratio", 0), ("window", "1024"), ("ratio", True)])
def test_sizes_must_be_whole_numbers(field: str, value: object) -> None:
    with pytest.raises(LohaError, match=f"{field} is {value!r}"):
        EncoderSettings(**{field: value})  # type: ignore[arg-type]
