"""The exported checkpoint, run by the reference, against the student that it was made from."""

from __future__ import annotations

import pytest
import torch

from loha.export import export
from loha.init_student import Options, init_student
from loha.layout import Window
from loha.reference import ReferenceModel
from loha.student import Student
from tests.tiny_models import history, write_decoder, write_lclm
from tests.tolerances import MERGED_FP32


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Student, ReferenceModel]:
    root = tmp_path_factory.mktemp(request.param)
    base = write_decoder(root / "base", kind=request.param)
    write_lclm(root / "lclm", base)
    files, _ = init_student(Options(base=base, lclm=root / "lclm", rank=6, out=root / "student"))
    for gain in files.gains.values():
        gain += torch.linspace(-0.2, 0.2, len(gain))
    files.write(root / "student")
    export(root / "student", root / "serving", probe="")
    return Student.load(root / "student").eval(), ReferenceModel.from_checkpoint(root / "serving")


@pytest.mark.parametrize("k", [0, 1, 3, None])
@pytest.mark.parametrize("polling", [1, 3])
def test_logits(pair: tuple[Student, ReferenceModel], k: int | None, polling: int) -> None:
    student, reference = pair
    rendering = reference.renderer.render(history(5), window=Window(k=k, polling=polling), add_generation_prompt=True)
    ids = torch.tensor(rendering.token_ids)
    regions = [(region.start, torch.tensor(region.encoder_ids)) for region in rendering.latents]
    with torch.no_grad():
        hidden = student(ids, regions, torch.arange(len(ids)).unsqueeze(0), [len(ids)])
    expected = (hidden @ student.lm_head_weight.T)[0]
    torch.testing.assert_close(reference.logits(rendering), expected, rtol=0, atol=MERGED_FP32)
    assert (
        student.renderer().render(history(5), window=Window(k=k, polling=polling), add_generation_prompt=True)
        == rendering
    )


@pytest.mark.parametrize("k", [0, None])
def test_greedy_equals_recomputing_from_scratch(pair: tuple[Student, ReferenceModel], k: int | None) -> None:
    _, reference = pair
    rendering = reference.renderer.render(history(3), window=Window(k=k), add_generation_prompt=True)
    embeds = reference.embeds(rendering)
    expected = []
    with torch.no_grad():
        for _ in range(9):
            expected.append(
                int(reference.decoder(inputs_embeds=embeds.unsqueeze(0), use_cache=False).logits[0, -1].argmax())
            )
            row = reference.decoder.get_input_embeddings()(torch.tensor(expected[-1:]))
            embeds = torch.cat([embeds, row])
    assert reference.greedy(rendering, 9, ignore_eos=True) == expected


def test_greedy_stops_at_the_end_token(pair: tuple[Student, ReferenceModel]) -> None:
    _, reference = pair
    rendering = reference.renderer.render(history(3), window=Window(k=1), add_generation_prompt=True)
    free = reference.greedy(rendering, 9, ignore_eos=True)
    stop = free[3]
    reference.eos_token_ids, kept = frozenset([stop]), reference.eos_token_ids
    try:
        assert reference.greedy(rendering, 9) == free[: free.index(stop) + 1]
    finally:
        reference.eos_token_ids = kept
