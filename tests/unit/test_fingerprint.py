"""Fingerprints: equal for equal contents, and a mismatch names both sides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loha.errors import LohaError
from loha.fingerprint import require_match, weights_hash
from loha.serving_checkpoint import write_shards
from loha.weight_files import WeightFiles

TENSORS = {f"t{i}": torch.arange(i * 100, i * 100 + 60).reshape(6, 10).float() for i in range(5)}


def test_hash_does_not_depend_on_sharding(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    save_file(TENSORS, tmp_path / "one" / "model.safetensors")
    write_shards(tmp_path / "many", TENSORS.items(), shard_bytes=500)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 3
    assert weights_hash(tmp_path / "one") == weights_hash(tmp_path / "many")
    assert torch.equal(WeightFiles(tmp_path / "many").tensor("t3"), TENSORS["t3"])


@pytest.mark.parametrize("change", ["value", "name", "shape", "dtype"])
def test_hash_sees_every_change(tmp_path: Path, change: str) -> None:
    tensors = dict(TENSORS)
    if change == "value":
        tensors["t2"] = tensors["t2"] + torch.eye(6, 10) * 1e-3
    elif change == "name":
        tensors["t9"] = tensors.pop("t4")
    elif change == "shape":
        tensors["t2"] = tensors["t2"].reshape(10, 6)
    else:
        tensors["t2"] = tensors["t2"].view(torch.int32)
    for name, content in (("a", TENSORS), ("b", tensors)):
        (tmp_path / name).mkdir()
        save_file(content, tmp_path / name / "model.safetensors")
    assert weights_hash(tmp_path / "a") != weights_hash(tmp_path / "b")


def test_hash_follows_a_rewritten_file(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    before = weights_hash(tmp_path)
    save_file(TENSORS | {"t0": torch.zeros(6, 11)}, tmp_path / "model.safetensors")
    assert weights_hash(tmp_path) != before


def test_mismatch_names_both_sides() -> None:
    with pytest.raises(LohaError) as raised:
        require_match(
            {"ratio": 16, "tokenizer": "a" * 64},
            {"ratio": 16, "tokenizer": "b" * 64},
            found_in="base models/b",
            expected_by="student runs/s",
        )
    message = str(raised.value)
    assert "tokenizer differs" in message
    assert "base models/b has aaaaaaaaaaaa," in message
    assert "student runs/s was made with bbbbbbbbbbbb;" in message


def test_a_part_that_was_not_recorded_is_a_mismatch() -> None:
    with pytest.raises(LohaError, match=r"^student runs/s does not record its compression ratio.* base models/b"):
        require_match({"ratio": 16}, {"window": 64}, found_in="base models/b", expected_by="student runs/s")


def test_more_may_be_recorded_than_is_compared() -> None:
    require_match({"ratio": 16}, {"ratio": 16, "base_weights": "b"}, found_in="base", expected_by="checkpoint")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, TENSORS.items(), shard_bytes=500)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(LohaError, match=r"lacks 'model-00002-of-00003\.safetensors'"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_are_read_as_safetensors_reads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": torch.arange(35).reshape(5, 7).to(dtype),
        "b": torch.ones(3, dtype=dtype),
        "empty": torch.ones(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    weights = WeightFiles(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(weights.tensor(name), tensor)
        assert weights.tensor(name).dtype == tensor.dtype
    assert torch.equal(weights.rows("a", [4, 0]), tensors["a"][[4, 0]])
    with pytest.raises(LohaError, match="has 5 rows, asked for rows"):
        weights.rows("a", [5])
    with pytest.raises(LohaError, match="has no tensor 'c'"):
        weights.tensor("c")
