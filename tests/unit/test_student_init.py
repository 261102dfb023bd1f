"""`loha init`: the SVD start is optimal, the zero start is the base, and foreign checkpoints are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loha.errors import LohaError
from loha.init_student import Options, init_student, main
from loha.lclm import lclm_from_layers
from loha.student import Student
from tests.tiny_models import write_decoder, write_lclm
from tests.tolerances import SVD_EXCESS

RANK = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("init")
    write_decoder(root / "base", dtype=torch.bfloat16)
    write_lclm(root / "lclm", root / "base")
    main(Options(base=root / "base", lclm=root / "lclm", rank=RANK, out=root / "student"))
    return root


def test_the_patch_is_the_best_of_its_rank(root: Path) -> None:
    files, _ = init_student(Options(base=root / "base", lclm=root / "lclm", rank=RANK, out=root / "unused"))
    base = load_file(root / "base" / "model.safetensors")
    lclm = load_file(root / "lclm" / "decoder" / "model.safetensors")
    assert len(files.patch) == 14
    for name, (A, B) in files.patch.items():
        delta = lclm[f"{name}.weight"].double() - base[f"{name}.weight"].double()
        optimal = torch.linalg.svdvals(delta)[RANK:].norm()
        assert (delta - B.double() @ A.double()).norm() / optimal - 1 < SVD_EXCESS, name


def test_gains_start_from_the_base_and_markers_from_the_lclm(root: Path) -> None:
    student = Student.load(root / "student")
    base = load_file(root / "base" / "model.safetensors")
    for name, gain in student.groups()["gains"].items():
        assert torch.equal(gain.detach(), base[f"{name.removeprefix('gains.')}.weight"].float())
    rows = load_file(root / "lclm" / "decoder" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(student.markers, rows[[263, 264]])
    assert len(rows) < len(base["model.embed_tokens.weight"])


def test_report(root: Path) -> None:
    report = json.loads((root / "student" / "init_report.json").read_text())
    assert (root / "student" / "init_report.png").read_bytes().startswith(b"\x89PNG")
    base = load_file(root / "base" / "model.safetensors")
    lclm = load_file(root / "lclm" / "decoder" / "model.safetensors")
    row = next(r for r in report["projections"] if r["name"] == "model.layers.1.mlp.down_proj")
    delta = lclm["model.layers.1.mlp.down_proj.weight"].double() - base["model.layers.1.mlp.down_proj.weight"].double()
    sigma = torch.linalg.svdvals(delta)
    assert row["shape"] == [32, 87]
    assert row["delta_norm"] == pytest.approx(delta.norm().item())
    assert row["sigma_1"] == pytest.approx(sigma[0].item())
    assert row["sigma_r"] == pytest.approx(sigma[RANK - 1].item())
    assert row["energy"]["8"] == pytest.approx((sigma[:8].square().sum() / sigma.square().sum()).item())
    assert list(row["energy"]) == ["8", "16", "32"]
    gain = next(r for r in report["gains"] if r["name"] == "model.norm")
    change = lclm["model.norm.weight"].double() - base["model.norm.weight"].double()
    assert gain["max_abs_change"] == pytest.approx(change.abs().max().item())


def test_without_a_decoder_the_patch_is_zero(root: Path, tmp_path: Path) -> None:
    lclm_from_layers(root / "base", layers=1, ratio=4, window=32, out_dir=tmp_path / "made", seed=0)
    main(Options(base=root / "base", encoder=tmp_path / "made", rank=4, out=tmp_path / "student"))
    student = Student.load(tmp_path / "student")
    assert student.config.start == "zero"
    assert all(p.abs().max() == 0 for n, p in student.groups()["patch"].items() if n.endswith(".B"))
    mean = load_file(root / "base" / "model.safetensors")["model.embed_tokens.weight"].float().mean(0)
    torch.testing.assert_close(student.markers, mean.repeat(2, 1))
    with pytest.raises(LohaError, match="has no decoder/, which an svd start needs"):
        main(Options(base=root / "base", encoder=tmp_path / "made", patch="svd", out=tmp_path / "x"))


def test_a_bare_encoder_gets_an_untrained_adapter(root: Path, tmp_path: Path) -> None:
    lclm_from_layers(root / "base", layers=1, ratio=4, window=32, out_dir=tmp_path / "made", seed=0)
    options = Options(base=root / "base", encoder=tmp_path / "made/encoder", ratio=8, window=24, out=tmp_path / "s")
    main(options)
    student = Student.load(tmp_path / "s")
    assert (student.config.ratio, student.config.window) == (8, 24)
    (latents,) = student.latents([torch.arange(50)])
    assert latents.shape == (3 + 3 + 1, 32)


def test_directions_without_energy_can_train(root: Path, tmp_path: Path) -> None:
    write_lclm(tmp_path / "same", root / "base", change=0.0)
    files, report = init_student(Options(base=root / "base", lclm=tmp_path / "same", rank=4, out=tmp_path / "s"))
    assert report is not None
    assert all(A.abs().sum() > 0 and B.abs().max() == 0 for A, B in files.patch.values())
    assert "nan" not in report.table()


def _another_width(lclm: Path) -> None:
    path = lclm / "decoder" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(8, 32)
    save_file(tensors, path)


def _more_layers(lclm: Path) -> None:
    path = lclm / "decoder" / "model.safetensors"
    tensors = load_file(path)
    tensors |= {k.replace("layers.1.", "layers.2."): v.clone() for k, v in tensors.items() if "layers.1." in k}
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_another_width, r"k_proj.weight has shape \[8, 32\], the base has shape \[16, 32\]"),
        (_more_layers, "it also has model.layers.2"),
    ],
)
def test_an_lclm_of_another_base(root: Path, tmp_path: Path, change: object, message: str) -> None:
    write_lclm(tmp_path / "lclm", root / "base")
    change(tmp_path / "lclm")  # type: ignore[operator]
    with pytest.raises(LohaError, match=f"was not made from the base .*{message}"):
        main(Options(base=root / "base", lclm=tmp_path / "lclm", out=tmp_path / "student"))
    assert not (tmp_path / "student").exists()


def test_an_lclm_of_an_unrelated_model_with_the_same_shapes(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing but the weights tells them apart: a warning, and the report shows how far off they are."""
    main(Options(base=root / "base", lclm=root / "lclm", rank=RANK, out=tmp_path / "student"))
    assert "warning" not in capsys.readouterr().err
    other = write_decoder(tmp_path / "other", seed=99)
    write_lclm(tmp_path / "lclm", other)
    main(Options(base=root / "base", lclm=tmp_path / "lclm", rank=RANK, out=tmp_path / "student"))
    assert "differ from the base's by 1.4" in capsys.readouterr().err


def test_an_lclm_of_another_width(root: Path, tmp_path: Path) -> None:
    write_decoder(tmp_path / "wide", width=48)
    with pytest.raises(LohaError, match=r"writes width 32, the base .* reads 48"):
        main(Options(base=tmp_path / "wide", lclm=root / "lclm", out=tmp_path / "student"))


@pytest.mark.parametrize("options", [{}, {"lclm": Path("a"), "encoder": Path("b")}])
def test_one_source_is_needed(root: Path, tmp_path: Path, options: dict[str, Path]) -> None:
    with pytest.raises(LohaError, match="give either --lclm"):
        main(Options(base=root / "base", out=tmp_path / "student", **options))


def test_a_missing_base(root: Path, tmp_path: Path) -> None:
    with pytest.raises(LohaError, match="nowhere is not a folder"):
        main(Options(base=tmp_path / "nowhere", lclm=root / "lclm", out=tmp_path / "student"))


def _another_vocabulary(lclm: Path) -> None:
    path = lclm / "decoder" / "tokenizer.json"
    path.write_text(path.read_text().replace('"a":', '"?":').replace('"b":', '"a":').replace('"?":', '"b":'))


@pytest.mark.parametrize("patch", ["svd", "zero"])
def test_an_lclm_of_another_base_with_the_same_shapes(root: Path, tmp_path: Path, patch: str) -> None:
    write_lclm(tmp_path / "lclm", root / "base")
    _another_vocabulary(tmp_path / "lclm")
    with pytest.raises(LohaError, match=r"the base .*base and the LCLM decoder .*decoder have different tokenizers"):
        main(Options(base=root / "base", lclm=tmp_path / "lclm", patch=patch, out=tmp_path / "student"))


@pytest.mark.parametrize("place", ["taken", "file", "under a file"])
def test_the_output_is_checked_before_the_work(root: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    out = tmp_path / "file" / "student" if place == "under a file" else tmp_path / place
    # The missing base would be told first if the output were checked after any work.
    with pytest.raises(LohaError, match=r"choose another|a file"):
        main(Options(base=tmp_path / "nowhere", lclm=root / "lclm", out=out))
    assert (tmp_path / "taken" / "thesis.txt").read_text() == (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "the weights have 2 layers of width 32, config.json names 2 of width 48"),
        ({"num_hidden_layers": 3}, "not a model config that transformers knows"),
        (None, "config.json is missing"),
    ],
)
def test_a_base_with_the_config_of_another_model(
    root: Path, tmp_path: Path, change: dict[str, object] | None, message: str
) -> None:
    base = write_decoder(tmp_path / "base")
    path = base / "config.json"
    values = json.loads(path.read_text())
    path.unlink() if change is None else path.write_text(json.dumps(values | change))
    with pytest.raises(LohaError, match=message):
        main(Options(base=base, lclm=root / "lclm", out=tmp_path / "student"))
    assert not (tmp_path / "student").exists()
