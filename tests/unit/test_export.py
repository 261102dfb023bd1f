"""Merging and the serving checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from loha.errors import LohaError
from loha.export import Options, export, main
from loha.hf_config import LohaConfig
from loha.init_student import Options as InitOptions
from loha.init_student import init_student
from loha.reference import ReferenceModel
from loha.serving_checkpoint import ServingCheckpoint
from loha.student import Student
from tests.tiny_models import write_decoder, write_lclm


@pytest.fixture(scope="module", params=["tied", "untied"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    base = write_decoder(root / "base", dtype=torch.bfloat16, tied=request.param == "tied")
    write_lclm(root / "lclm", base)
    files, _ = init_student(InitOptions(base=base, lclm=root / "lclm", rank=6, out=root / "student"))
    for gain in files.gains.values():
        gain += torch.linspace(-0.2, 0.2, len(gain))
    files.write(root / "student")
    main(Options(student=root / "student", out=root / "serving", decoder_only=root / "decoder"))
    return root


def test_merged_once_from_float32(root: Path) -> None:
    merged = load_file(root / "serving" / "model.safetensors")
    base = load_file(root / "base" / "model.safetensors")
    student = Student.load(root / "student").files()
    for name, tensor in base.items():
        module = name.removesuffix(".weight")
        if module in student.patch:
            A, B = student.patch[module]
            expected = (tensor.double() + B.double() @ A.double()).bfloat16()
            assert (merged[f"decoder.{name}"] != expected).float().mean() < 0.01  # a tie may round the other way
            torch.testing.assert_close(merged[f"decoder.{name}"], expected, rtol=2**-7, atol=0)
        elif module in student.gains:
            assert torch.equal(merged[f"decoder.{name}"], student.gains[module].bfloat16())
        else:
            assert torch.equal(merged[f"decoder.{name}"], tensor)


def test_tensors(root: Path) -> None:
    names = set(load_file(root / "serving" / "model.safetensors"))
    assert ("decoder.lm_head.weight" in names) == root.name.startswith("untied")
    assert {"markers", "adapter.norm.weight", "adapter.fc1.weight", "encoder.embed_tokens.weight"} <= names
    assert {name.partition(".")[0] for name in names} == {"decoder", "encoder", "adapter", "markers"}


def test_config(root: Path) -> None:
    values = json.loads((root / "serving" / "config.json").read_text())
    assert values["architectures"] == ["LohaForCausalLM"]
    assert values["compression_ratio"] == 4
    assert values["encoder_window"] == 32
    assert values["placeholder_token_id"] == 256
    assert values["fingerprint"]["ratio"] == 4
    assert int(values["transformers_version"].split(".")[0]) >= 5  # else a large tokenizer passes for a faulty one
    config = AutoConfig.from_pretrained(root / "serving")
    assert isinstance(config, LohaConfig)
    assert config.get_text_config().model_type == "qwen3"
    assert config.get_text_config().architectures == ["Qwen3ForCausalLM"]
    assert config.encoder_config.hidden_size == 24
    again = LohaConfig(**json.loads(config.to_json_string()))
    assert again.text_config.to_dict() == config.text_config.to_dict()


def test_side_files(root: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (root / "serving" / name).read_bytes() == (root / "base" / name).read_bytes()
        assert (root / "decoder" / name).is_file()
    assert (root / "serving" / "encoder_tokenizer" / "tokenizer.json").is_file()
    drift = json.loads((root / "serving" / "rounding_drift.json").read_text())
    assert drift["dtype"] == "bfloat16"
    assert 0 < drift["mean_abs_logit"] < drift["max_abs_logit"]
    assert 0 <= drift["kl_nats"] < 0.1


def test_the_decoder_alone_is_a_stock_checkpoint(root: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(root / "decoder", dtype="auto")
    assert model.dtype == torch.bfloat16
    merged = load_file(root / "serving" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            assert torch.equal(tensor, merged[f"decoder.{name}"]), name


def test_float32_has_no_rounding_drift(root: Path, tmp_path: Path) -> None:
    exported = export(root / "student", tmp_path / "wide", dtype=torch.float32)
    assert exported.drift is not None
    assert exported.drift.max_abs_logit == 0.0
    assert exported.drift.top1_agreement == 1.0
    assert ServingCheckpoint.open(tmp_path / "wide").weights.tensor("markers").dtype == torch.float32


def test_another_base_is_refused(root: Path, tmp_path: Path) -> None:
    other = write_decoder(tmp_path / "other", seed=3, dtype=torch.bfloat16)
    with pytest.raises(LohaError, match="base weights differs"):
        main(Options(student=root / "student", out=tmp_path / "out", base=other))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["base", "student", "nowhere"])
def test_what_is_no_serving_checkpoint(root: Path, name: str) -> None:
    with pytest.raises(LohaError, match="make one with `loha export"):
        ReferenceModel.from_checkpoint(root / name)


def test_two_outputs_in_one_folder_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(LohaError, match="--out and --decoder-only both name"):
        main(Options(student=root / "student", out=tmp_path / "out", decoder_only=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
