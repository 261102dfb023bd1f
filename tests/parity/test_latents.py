"""Our latents against those of the LCLM authors' own code, and the student against its exported checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from loha.encode_command import Options, encode_text, main
from loha.encoder import LatentEncoder
from loha.lclm import Lclm, load_lclm
from tests.tolerances import REFERENCE_LATENTS


@pytest.fixture(scope="module")
def lclm(shared_data: Path) -> Lclm:
    return load_lclm(shared_data / "tiny" / "lclm")


@pytest.fixture(scope="module")
def reference(shared_data: Path) -> dict[str, torch.Tensor]:
    return load_file(shared_data / "tiny" / "reference_latents.safetensors")


def test_from_texts(lclm: Lclm, reference: dict[str, torch.Tensor], shared_data: Path) -> None:
    texts = json.loads((shared_data / "tiny" / "reference_texts.json").read_text())
    for name, entry in texts.items():
        latents = encode_text(lclm, entry["text"])
        torch.testing.assert_close(latents, reference[f"{name}.latents"], rtol=0, atol=REFERENCE_LATENTS)


def test_all_in_one_batch(lclm: Lclm, reference: dict[str, torch.Tensor]) -> None:
    names = sorted(name.removesuffix(".ids") for name in reference if name.endswith(".ids"))
    encoder = LatentEncoder(lclm.encoder, lclm.settings, tokens_per_batch=3000)
    pooled = encoder([reference[f"{name}.ids"] for name in names])
    for name, states in zip(names, pooled, strict=True):
        torch.testing.assert_close(lclm.adapter(states), reference[f"{name}.latents"], rtol=0, atol=REFERENCE_LATENTS)


def test_command(shared_data: Path, reference: dict[str, torch.Tensor], tmp_path: Path) -> None:
    text = json.loads((shared_data / "tiny" / "reference_texts.json").read_text())["obs2"]["text"]
    (tmp_path / "body.txt").write_text(text)
    main(Options(lclm=shared_data / "tiny" / "lclm", text=tmp_path / "body.txt", out=tmp_path / "out.safetensors"))
    latents = load_file(tmp_path / "out.safetensors")["latents"]
    torch.testing.assert_close(latents, reference["obs2.latents"], rtol=0, atol=REFERENCE_LATENTS)
