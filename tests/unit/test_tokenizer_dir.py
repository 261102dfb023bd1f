"""One tokenizer has one fingerprint, wherever in the pipeline its files lie; other tokenizers are told apart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from loha.errors import LohaError
from loha.export import export
from loha.init_student import Options, init_student
from loha.lclm import lclm_from_layers, load_lclm
from loha.plain_text import tokenizer_hash
from loha.serving_checkpoint import ServingCheckpoint, copy_side_files
from loha.tokenizer_dir import load_tokenizer, require_same_tokens
from miniature import base_dir, lclm_dir
from tests.tiny_models import MARKERS, write_decoder, write_tokenizer


def test_base_lclm_and_export_have_one_fingerprint(tmp_path: Path) -> None:
    options = Options(base=base_dir(), lclm=lclm_dir(), out=tmp_path / "student", rank=2, patch="zero")
    files, _ = init_student(options)
    files.write(tmp_path / "student")
    export(tmp_path / "student", tmp_path / "serving", decoder_only=tmp_path / "decoder", probe="")
    renderer = ServingCheckpoint.open(tmp_path / "serving").renderer()
    tokenizers = [load_tokenizer(base_dir()), load_tokenizer(tmp_path / "decoder"), renderer.tokenizer]
    tokenizers += [renderer.encoder_tokenizer, load_lclm(lclm_dir()).encoder_tokenizer]
    assert len({tokenizer_hash(tokenizer) for tokenizer in tokenizers}) == 1
    assert renderer.fingerprint.items() <= files.config.fingerprint.items()


def test_the_qwen_tokenizer_keeps_its_fingerprint_in_an_lclm_and_an_export(tmp_path: Path, shared_data: Path) -> None:
    base = write_decoder(tmp_path / "base", width=8, layers=1)
    for file in (shared_data / "qwen3").iterdir():
        shutil.copy(file, base / file.name)
    lclm_from_layers(base, layers=1, ratio=16, window=64, out_dir=tmp_path / "lclm", seed=0)
    copy_side_files(base, tmp_path / "serving")
    folders = (base, tmp_path / "lclm/encoder", tmp_path / "serving")
    assert len({tokenizer_hash(load_tokenizer(folder)) for folder in folders}) == 1


def test_an_lclm_decoder_with_markers_has_the_base_s_tokens(shared_data: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "base")
    write_tokenizer(tmp_path / "lclm", extra=MARKERS)
    for base, lclm in (
        (tmp_path / "base", tmp_path / "lclm"),
        (base_dir(), lclm_dir() / "decoder"),
        (shared_data / "tiny/base", shared_data / "tiny/lclm/decoder"),
    ):
        tokenizers = load_tokenizer(base), load_tokenizer(lclm)
        assert tokenizer_hash(tokenizers[0]) != tokenizer_hash(tokenizers[1])
        require_same_tokens(*tokenizers, name="base", other_name="LCLM")


@pytest.mark.parametrize("change", ["vocabulary", "merges", "added"])
def test_other_tokenizers_are_refused(tmp_path: Path, change: str) -> None:
    for name in ("base", "lclm"):
        write_tokenizer(tmp_path / name)
    path = tmp_path / "lclm/tokenizer.json"
    parts = json.loads(path.read_text())
    if change == "vocabulary":
        vocabulary = parts["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    elif change == "merges":
        parts["model"]["vocab"] |= {"ab": 256}
        parts["model"]["merges"] = [["a", "b"]]
    else:
        for token, other in ((parts["added_tokens"][0], parts["added_tokens"][1]),):
            token["content"], other["content"] = other["content"], token["content"]
    path.write_text(json.dumps(parts))
    with pytest.raises(LohaError, match=r"^base and LCLM have different tokenizers"):
        require_same_tokens(
            load_tokenizer(tmp_path / "base"), load_tokenizer(tmp_path / "lclm"), name="base", other_name="LCLM"
        )
