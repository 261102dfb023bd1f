"""Loading LCLM checkpoints, and one clear line for every foreign one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loha.encode_command import Options, encode_text, main
from loha.encoder import LatentEncoder
from loha.errors import LohaError
from loha.lclm import lclm_from_layers, load_lclm
from tests.tiny_models import write_decoder, write_lclm, write_settings


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_decoder(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def lclm(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lclm(tmp_path_factory.mktemp("lclm") / "lclm", base)


def test_loads(lclm: Path) -> None:
    loaded = load_lclm(lclm)
    assert (loaded.settings.ratio, loaded.settings.window) == (4, 32)
    assert loaded.decoder_folder == lclm / "decoder"
    rows = load_file(lclm / "decoder" / "model.safetensors")["model.embed_tokens.weight"]
    start = loaded.encoder_tokenizer.vocab_size  # 256 bytes; added tokens follow
    assert start == 256
    assert loaded.markers is not None
    assert torch.equal(loaded.markers, rows[[263, 264]])


def test_half_precision(lclm: Path) -> None:
    loaded = load_lclm(lclm, dtype=torch.bfloat16)
    assert loaded.encoder.dtype == torch.bfloat16
    assert loaded.adapter.fc1.weight.dtype == torch.bfloat16


def test_newest_checkpoint_of_a_parent(lclm: Path, tmp_path: Path) -> None:
    for number in (9, 100, 20):
        shutil.copytree(lclm, tmp_path / f"checkpoint_{number}")
    write_settings(tmp_path / "checkpoint_100", compression_ratio=8, encoder_window_size=64)
    assert load_lclm(tmp_path).settings.ratio == 8


def _remove(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def _settings(**settings: object) -> Callable[[Path], None]:
    return lambda folder: write_settings(folder, **settings)


def _adapter(name: str, tensor: torch.Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter" / "adapter.safetensors"
        tensors = load_file(path) | {name: tensor}
        save_file({key: value for key, value in tensors.items() if value is not None}, path)

    return change


def _truncate(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:-100])

    return change


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text)  # type: ignore[return-value]


def _drop_encoder_tensor(folder: Path) -> None:
    path = folder / "encoder" / "model.safetensors"
    tensors = load_file(path)
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)


def _narrow_encoder_tensor(folder: Path) -> None:
    path = folder / "encoder" / "model.safetensors"
    tensors = load_file(path)
    tensors["norm.weight"] = tensors["norm.weight"][:-1].clone()
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_remove("model_config.json"), "neither model_config.json nor checkpoint_"),
        (_write("model_config.json", "{"), "model_config.json is not valid JSON"),
        (_write("model_config.json", "[1]"), "holds a JSON list, expected an object"),
        (_write("model_config.json", '{"encoder_window_size": 4}'), "lacks 'compression_ratio'"),
        (_settings(pooling="attention"), "pooling is 'attention'"),
        (_settings(encoder_mask_type="full"), "mask is 'full'"),
        (_settings(boundary_overlap=4), "overlap is 4"),
        (_settings(adapter_type="qformer"), "adapter_type is 'qformer'"),
        (_settings(compression_ratio="16"), "ratio is '16'"),
        (_remove("encoder"), "encoder is not a folder"),
        (_remove("encoder/config.json"), "config.json is missing"),
        (_write("encoder/config.json", '{"model_type": "nonsense"}'), "not a model config that transformers knows"),
        (_remove("encoder/model.safetensors"), "holds no .*safetensors file"),
        (_truncate("encoder/model.safetensors"), "is not a complete safetensors file"),
        (_drop_encoder_tensor, "has no tensor 'layers.1.mlp.up_proj.weight'"),
        (_narrow_encoder_tensor, r"'norm.weight' has shape \[23\], expected \[24\]"),
        (_remove("encoder/tokenizer.json"), "holds no tokenizer.json"),
        (_remove("adapter"), "adapter is not a folder"),
        (_truncate("adapter/adapter.safetensors"), "is not a complete safetensors file"),
        (_adapter("fc2.bias", None), "lacks 'fc2.bias'"),
        (_adapter("fc1.bias", torch.zeros(3)), r"'fc1.bias' has shape \[3\], expected \[32\]"),
        (_remove("decoder/tokenizer.json"), "decoder: holds no tokenizer.json"),
    ],
)
def test_foreign_checkpoints(lclm: Path, tmp_path: Path, change: Callable[[Path], None], message: str) -> None:
    shutil.copytree(lclm, tmp_path / "lclm")
    change(tmp_path / "lclm")
    with pytest.raises(LohaError, match=message) as raised:
        load_lclm(tmp_path / "lclm")
    assert "\n" not in str(raised.value)


def test_a_decoder_that_does_not_know_the_markers(lclm: Path, tmp_path: Path) -> None:
    shutil.copytree(lclm, tmp_path / "lclm")
    shutil.copy(lclm / "encoder" / "tokenizer.json", tmp_path / "lclm" / "decoder" / "tokenizer.json")
    with pytest.raises(LohaError, match=r"no token '<\|memory_start\|>'"):
        load_lclm(tmp_path / "lclm")


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(LohaError, match="not a folder; expected an LCLM checkpoint"):
        load_lclm(tmp_path / "nowhere")


def test_encode_command(lclm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "x" * 45 + "<|im_end|><tool_response>\udc80"
    (tmp_path / "body.txt").write_bytes(text.encode(errors="surrogatepass"))
    main(Options(lclm=lclm, text=tmp_path / "body.txt", out=tmp_path / "latents.safetensors"))
    latents = load_file(tmp_path / "latents.safetensors")["latents"]
    characters = 45 + len("<|im_end|><tool_response>") + 9  # each of the 3 surrogate bytes becomes U+FFFD, 3 bytes long
    assert latents.shape == (8 + 8 + -(-(characters - 64) // 4), 32)
    assert latents.dtype == torch.float32
    assert f"{len(latents)} latents of width 32" in capsys.readouterr().out


def test_encode_refuses_an_empty_text(lclm: Path, tmp_path: Path) -> None:
    (tmp_path / "body.txt").write_text("")
    with pytest.raises(LohaError, match=r"body.txt is empty"):
        main(Options(lclm=lclm, text=tmp_path / "body.txt", out=tmp_path / "latents.safetensors"))
    assert not (tmp_path / "latents.safetensors").exists()


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_encoder_from_the_first_layers(kind: str, tmp_path: Path) -> None:
    base = write_decoder(tmp_path / "base", kind=kind, layers=3)
    lclm_from_layers(base, layers=2, ratio=8, window=48, out_dir=tmp_path / "made", seed=0)
    made = load_lclm(tmp_path / "made")
    assert made.markers is None
    assert made.decoder_folder is None
    assert (made.settings.ratio, made.settings.window) == (8, 48)
    assert json.loads((tmp_path / "made/encoder/config.json").read_text())["num_hidden_layers"] == 2
    assert encode_text(made, "y" * 50).shape == (7, 32)
    weights = load_file(base / "model.safetensors")
    assert torch.equal(made.encoder.layers[1].mlp.up_proj.weight, weights["model.layers.1.mlp.up_proj.weight"])
    assert isinstance(LatentEncoder(made.encoder, made.settings).width, int)


def test_encoder_with_more_layers_than_the_base(base: Path, tmp_path: Path) -> None:
    with pytest.raises(LohaError, match="has 2 layers, asked for the first 5"):
        lclm_from_layers(base, layers=5, ratio=8, window=48, out_dir=tmp_path / "made", seed=0)
