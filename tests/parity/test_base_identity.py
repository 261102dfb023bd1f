"""On the shared checkpoints: the student is its base when it should be, and its parts are told from others'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from loha.init_student import Options, main
from loha.student import Student


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_disabled_patch_is_the_base_bit_for_bit(shared_data: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    tiny = shared_data / "tiny"
    main(Options(base=tiny / "base", lclm=tiny / "lclm", out=tmp_path / "student"))
    student = Student.load(tmp_path / "student", dtype=dtype)
    base = AutoModelForCausalLM.from_pretrained(tiny / "base", dtype=dtype, attn_implementation="sdpa").eval()
    ids = torch.randint(3, 1500, (301,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = base(ids.unsqueeze(0), use_cache=False).logits[0]
        positions = torch.arange(301).unsqueeze(0)
        patched = (student(ids, [], positions, [301]) @ student.lm_head_weight.T)[0]
        with student.patch_disabled():
            plain = (student(ids, [], positions, [301]) @ student.lm_head_weight.T)[0]
    assert torch.equal(plain, expected)
    assert not torch.equal(patched, expected)
