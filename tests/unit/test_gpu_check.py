"""The GPU check goes through its code on the CPU, and says what it lacks."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from loha.errors import LohaError


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    assert spec and spec.loader
    module = sys.modules["gpu_check"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_dry_run(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(script.Options(dry_run=True)) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["attention"]["forward"] < script.ATTENTION_ERROR and result["attention"]["passes"]
    assert result["loss"]["gradient"] < script.LOSS_ERROR and result["loss"]["passes"]
    assert result["step"]["planned_gb"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu(script: ModuleType) -> None:
    with pytest.raises(LohaError, match="no GPU is visible to torch; --dry-run goes through the same code"):
        script.main(script.Options())
