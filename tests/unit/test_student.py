"""The student: identity with its base, packing without leakage, what trains, files and their fingerprints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from loha.errors import LohaError
from loha.gains import GainRMSNorm
from loha.init_student import Options, init_student
from loha.layout import Window
from loha.lowrank import LowRankLinear
from loha.student import Student
from loha.student_files import StudentFiles
from tests.tiny_models import ARCHITECTURES, history, write_decoder, write_lclm, write_tokenizer
from tests.tolerances import PACKED_FP32, PEFT_LOGITS

LENGTHS = [5, 1, 20, 20, 11, 1, 1]
TOKENS = sum(LENGTHS)


@pytest.fixture(scope="module", params=sorted(ARCHITECTURES))
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, an LCLM of it, an SVD start and a zero start, of one architecture."""
    root = tmp_path_factory.mktemp(request.param)
    base = write_decoder(root / "base", kind=request.param, dtype=torch.bfloat16, tied=request.param != "llama")
    write_lclm(root / "lclm", base, kind=request.param)
    for start in ("svd", "zero"):
        files, _ = init_student(
            Options(base=base, lclm=root / "lclm", rank=6, patch=start, out=root / start)  # type: ignore[arg-type]
        )
        files.write(root / start)
    return root


@pytest.fixture
def student(root: Path) -> Iterator[Student]:
    """An SVD start whose gains have moved too: everything differs from the base."""
    student = Student.load(root / "svd", dtype=torch.float32).eval()
    move(student)
    yield student


def move(student: Student) -> None:
    """Change every trained parameter."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in student.trainable().values():
            parameter += torch.randn_like(parameter) * 0.05


def base_logits(root: Path, ids_T: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the stock model's logits."""
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=dtype, attn_implementation="sdpa").eval()
    with torch.no_grad():
        return model(ids_T.unsqueeze(0), use_cache=False).logits[0]


def logits(student: Student, ids_T: torch.Tensor) -> torch.Tensor:
    """Return the student's logits of one text."""
    positions = torch.arange(len(ids_T)).unsqueeze(0)
    return (student(ids_T, [], positions, [len(ids_T)]) @ student.lm_head_weight.T)[0]


def ids(tokens: int = TOKENS, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(seed))


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)


# -- identity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_start_is_the_base_bit_for_bit(root: Path, dtype: torch.dtype) -> None:
    student = Student.load(root / "zero", dtype=dtype)
    assert torch.equal(logits(student, ids()), base_logits(root, ids(), dtype))


def test_disabled_it_is_the_base_bit_for_bit_after_training(root: Path) -> None:
    student = Student.load(root / "svd", dtype=torch.float32).train()
    expected = base_logits(root, ids())
    groups = [{"params": list(named.values())} for named in student.groups().values()]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        logits(student, ids()).square().mean().backward()
        optimizer.step()
    assert not torch.equal(logits(student, ids()), expected)
    with student.patch_disabled():
        assert torch.equal(logits(student, ids()), expected)
    assert all(m.enabled for m in student.modules() if isinstance(m, LowRankLinear | GainRMSNorm))


def test_disabling_ends_when_the_block_fails(student: Student) -> None:
    with pytest.raises(RuntimeError), student.patch_disabled():
        raise RuntimeError
    assert all(m.enabled for m in student.modules() if isinstance(m, LowRankLinear | GainRMSNorm))


# -- packing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_packed_equals_separate(student: Student, training: bool, checkpointed: bool) -> None:
    if checkpointed:
        student.enable_checkpointing(mlp_chunks=3)
    student.train(training)
    packed = student(ids(), [], positions(LENGTHS), LENGTHS)[0]
    parts = [student(part, [], torch.arange(len(part)).unsqueeze(0), [len(part)])[0] for part in ids().split(LENGTHS)]
    torch.testing.assert_close(packed, torch.cat(parts), rtol=0, atol=PACKED_FP32)


def test_nothing_leaks_between_pieces(student: Student) -> None:
    before = student(ids(), [], positions(LENGTHS), LENGTHS)[0]
    changed = ids()
    changed[6:26] = ids(20, seed=9)  # the third piece
    after = student(changed, [], positions(LENGTHS), LENGTHS)[0]
    same = torch.ones(TOKENS, dtype=torch.bool)
    same[6:26] = False
    assert torch.equal(before[same], after[same])
    assert not torch.equal(before[~same], after[~same])


def test_causal_within_a_piece(student: Student) -> None:
    before = logits(student, ids())
    changed = ids()
    changed[30] = (changed[30] + 1) % 256
    after = logits(student, changed)
    torch.testing.assert_close(before[:30], after[:30], rtol=0, atol=PACKED_FP32)
    assert (before[30] != after[30]).any()


def test_gradients_packed_with_checkpointing_equal_plain_ones(student: Student) -> None:
    def gradients() -> dict[str, torch.Tensor]:
        student.zero_grad()
        student(ids(), [], positions(LENGTHS), LENGTHS).square().mean().backward()
        return {n: p.grad.clone() for n, p in student.trainable().items() if p.grad is not None}

    student.train()
    plain = gradients()
    student.enable_checkpointing(mlp_chunks=3)
    assert not student.input_embeds(ids(), []).requires_grad, "nothing before the first layer trains"
    checkpointed = gradients()
    assert set(plain) == {name for name in student.trainable() if not name.startswith("adapter.")}
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checkpointed", [True, False])
def test_greedy_equals_recomputing_from_scratch(student: Student, checkpointed: bool) -> None:
    if checkpointed:
        student.enable_checkpointing()
    student.train(checkpointed)
    sequence = ids(30)
    expected: list[int] = []
    for _ in range(7):
        expected.append(int(logits(student, torch.cat([sequence, torch.tensor(expected)]).long())[-1].argmax()))
    embeds = student.decoder.get_input_embeddings()(sequence)
    assert student.greedy(embeds, max_new_tokens=7) == expected
    assert student.training == checkpointed
    stop = expected[2]
    cut = expected[: expected.index(stop) + 1]
    assert student.greedy(embeds, max_new_tokens=7, stop_ids=frozenset([stop])) == cut


# -- input vectors ----------------------------------------------------------------------------------------------------


def rendered(student: Student, k: int = 1) -> tuple[Any, list[tuple[int, torch.Tensor]]]:
    rendering = student.renderer().render(history(4), window=Window(k=k))
    return rendering, [(region.start, torch.tensor(region.encoder_ids)) for region in rendering.latents]


def test_input_vectors_of_a_rendering(student: Student) -> None:
    rendering, regions = rendered(student)
    embeds = student.input_embeds(torch.tensor(rendering.token_ids), regions)
    assert len(regions) == 3
    assert embeds.shape == (len(rendering.token_ids), 32)
    is_text = torch.ones(len(embeds), dtype=torch.bool)
    for region, (start, encoder_ids) in zip(rendering.latents, regions, strict=True):
        (latents,) = student.latents([encoder_ids])
        assert torch.equal(embeds[start], student.markers[0])
        torch.testing.assert_close(embeds[start + 1 : start + 1 + region.count], latents, rtol=0, atol=PACKED_FP32)
        assert torch.equal(embeds[start + 1 + region.count], student.markers[1])
        is_text[start : start + region.count + 2] = False
    text_ids = torch.tensor(rendering.token_ids)[is_text]
    assert torch.equal(embeds[is_text], student.decoder.get_input_embeddings()(text_ids))


def test_only_latents_reach_the_adapter(student: Student) -> None:
    rendering, regions = rendered(student)
    token_ids = torch.tensor(rendering.token_ids)
    student(token_ids, regions, torch.arange(len(token_ids)).unsqueeze(0), [len(token_ids)]).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in student.trainable().values())
    frozen = [n for n, p in student.named_parameters() if p.grad is None]
    assert len(frozen) + len(student.trainable()) == len(list(student.named_parameters()))


@pytest.mark.parametrize("change", ["longer", "shorter", "outside"])
def test_a_region_of_another_length_is_an_error(student: Student, change: str) -> None:
    rendering, regions = rendered(student)
    start, encoder_ids = regions[0]
    if change == "longer":
        regions[0] = (start, torch.cat([encoder_ids, encoder_ids]))
    elif change == "shorter":
        regions[0] = (start, encoder_ids[:20])
    else:
        regions[-1] = (len(rendering.token_ids) - 3, encoder_ids)
    with pytest.raises(LohaError, match="latent region at position"):
        student.input_embeds(torch.tensor(rendering.token_ids), regions)


# -- what trains ------------------------------------------------------------------------------------------------------


def test_trainable_names(root: Path, student: Student) -> None:
    named = student.trainable()
    qk_norms = 4 if root.name.startswith("qwen3") else 0
    assert list(named) == sorted(named)
    assert {k: len(v) for k, v in student.groups().items()} == {"patch": 2 * 7 * 2, "gains": 5 + qk_norms, "adapter": 5}
    assert "patch.model.layers.0.self_attn.q_proj.A" in named
    assert "gains.model.norm" in named
    assert "adapter.fc1.weight" in named
    assert {id(p) for p in named.values()} == {id(p) for p in student.parameters() if p.requires_grad}
    assert all(p.dtype == torch.float32 for p in named.values())


# -- files ------------------------------------------------------------------------------------------------------------


def test_save_and_load_are_bit_equal(student: Student, tmp_path: Path) -> None:
    student.save(tmp_path / "saved")
    again = Student.load(tmp_path / "saved", dtype=torch.float32)
    for name, parameter in student.trainable().items():
        assert torch.equal(parameter, again.trainable()[name]), name
    assert torch.equal(logits(student, ids()), logits(again, ids()))
    assert again.config == student.config


def test_frozen_weights_are_not_saved(student: Student, tmp_path: Path) -> None:
    student.save(tmp_path / "saved")
    size = sum(file.stat().st_size for file in (tmp_path / "saved").rglob("*") if file.is_file())
    assert size < 4 * sum(p.numel() for p in student.trainable().values()) + 20_000


def test_peft_loads_the_patch(root: Path, student: Student, tmp_path: Path) -> None:
    from peft import PeftModel

    student.save(tmp_path / "saved")
    base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32, attn_implementation="sdpa")
    model = PeftModel.from_pretrained(base, str(tmp_path / "saved" / "patch")).eval()
    files = StudentFiles.read(tmp_path / "saved")
    with torch.no_grad():
        for name, gain in files.gains.items():
            base.get_submodule(name).weight.copy_(gain)
        got = model(ids().unsqueeze(0), use_cache=False).logits[0]
        torch.testing.assert_close(got, logits(student, ids()), rtol=0, atol=PEFT_LOGITS)
    scales = [m.scaling["default"] for name, m in model.named_modules() if name.endswith("_proj")]
    assert scales == [1.0] * 14


def test_rank_is_clipped_in_the_peft_files(root: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    files, _ = init_student(Options(base=root / "base", lclm=root / "lclm", rank=64, out=tmp_path / "wide"))
    files.write(tmp_path / "wide")
    base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32, attn_implementation="sdpa")
    model = PeftModel.from_pretrained(base, str(tmp_path / "wide" / "patch")).eval()
    with torch.no_grad():
        got = model(ids().unsqueeze(0), use_cache=False).logits[0]
        torch.testing.assert_close(
            got, logits(Student.load(tmp_path / "wide", dtype=torch.float32), ids()), rtol=0, atol=PEFT_LOGITS
        )


@pytest.mark.parametrize("part", ["base", "tokenizer", "template", "encoder"])
def test_another_part_is_refused_by_name(root: Path, tmp_path: Path, part: str) -> None:
    kind = root.name[:5]
    base, lclm = tmp_path / "base", tmp_path / "lclm"
    shutil.copytree(root / "base", base)
    shutil.copytree(root / "lclm", lclm)
    if part == "base":
        write_decoder(base, kind=kind, seed=7, dtype=torch.bfloat16, tied=kind != "llama")
    elif part == "tokenizer":
        write_tokenizer(base, extra=("<|other|>",))
    elif part == "template":
        (base / "chat_template.jinja").write_text((base / "chat_template.jinja").read_text() + "\n")
    else:
        shutil.rmtree(lclm)
        write_lclm(lclm, root / "base", kind=kind, seed=8)
    words = {"base": "base weights", "template": "chat template", "encoder": "encoder weights"}.get(part, part)
    with pytest.raises(
        LohaError, match=f"^{words} differs: base {base} with encoder {lclm}/encoder has .* student {root}"
    ):
        Student.load(root / "svd", base=base, lclm=lclm)


def test_a_base_that_moved_is_asked_for(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "svd", tmp_path / "student")
    path = tmp_path / "student" / "student.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base": str(tmp_path / "gone")}))
    with pytest.raises(LohaError, match=r"was made with .*gone, which is not there; say where it is with base"):
        Student.load(tmp_path / "student")
    Student.load(tmp_path / "student", base=root / "base")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("student.json", r"is no student: student\.json is missing"),
        ("reading.safetensors", "lacks reading.safetensors"),
        ("patch/adapter_config.json", r"adapter_config\.json is missing"),
    ],
)
def test_incomplete_students(root: Path, tmp_path: Path, name: str, message: str) -> None:
    shutil.copytree(root / "svd", tmp_path / "student")
    (tmp_path / "student" / name).unlink()
    with pytest.raises(LohaError, match=message):
        Student.load(tmp_path / "student")


def test_a_patch_that_is_cut_short(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "svd", tmp_path / "student")
    path = tmp_path / "student" / "patch" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(LohaError, match="is not a complete safetensors file"):
        Student.load(tmp_path / "student")
