"""`loha serve` refuses what cannot work, in one line, before vLLM starts."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
from tiny_checkpoint import TinyCheckpoint

from loha.cli import main
from serving import launch


def refusal(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """Run `loha serve` and return its one line of error."""
    with pytest.raises(SystemExit) as ended:
        main(["serve", *map(str, args)])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


@pytest.fixture
def copy(tiny: TinyCheckpoint, tmp_path: Path) -> Path:
    """A copy of the serving checkpoint to damage."""
    return Path(shutil.copytree(tiny.serving, tmp_path / "copy"))


def test_missing_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refusal(capsys, tmp_path / "none")
    assert "none" in line and "loha export" in line


def test_foreign_checkpoint(capsys: pytest.CaptureFixture[str], tiny: TinyCheckpoint) -> None:
    line = refusal(capsys, tiny.decoder_only)
    assert "'qwen3'" in line and "'loha'" in line and "loha export" in line


def test_missing_encoder_tokenizer(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    shutil.rmtree(copy / "encoder_tokenizer")
    assert "encoder_tokenizer" in refusal(capsys, copy)


@pytest.mark.parametrize("which", ["tokenizer", "encoder tokenizer"])
def test_wrong_tokenizer(capsys: pytest.CaptureFixture[str], copy: Path, which: str) -> None:
    path = copy / ("encoder_tokenizer" if which.startswith("encoder") else "") / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"]["merges"] = document["model"]["merges"][:-1]
    path.write_text(json.dumps(document))
    line = refusal(capsys, copy)
    assert f"{which} differs" in line and str(copy) in line


def test_changed_chat_template(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    path = copy / "chat_template.jinja"
    path.write_text(path.read_text().replace("# Tools", "# My tools"))
    assert "chat template differs" in refusal(capsys, copy)


def test_weights_cut_short(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "model.safetensors" in refusal(capsys, copy)


def test_head_width_that_the_cpu_build_cannot_run(
    capsys: pytest.CaptureFixture[str], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "is_cpu_build", lambda: True)
    path = copy / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["head_dim"] = 16
    path.write_text(json.dumps(config))
    assert "16 wide" in refusal(capsys, copy)


@pytest.mark.parametrize("k", ["-1", "three"])
def test_bad_k(capsys: pytest.CaptureFixture[str], tiny: TinyCheckpoint, k: str) -> None:
    line = refusal(capsys, tiny.serving, "--k", k)
    assert k in line and "0, 1, 2" in line


def test_a_port_after_the_dashes(capsys: pytest.CaptureFixture[str], tiny: TinyCheckpoint) -> None:
    line = refusal(capsys, tiny.serving, "--", "--port", 9000)
    assert "--port after --" in line and "launcher's own --port" in line


def test_no_bodies_at_all(capsys: pytest.CaptureFixture[str], tiny: TinyCheckpoint) -> None:
    assert "--max-body-mib must be at least 1" in refusal(capsys, tiny.serving, "--max-body-mib", 0)


def test_port_in_use(capsys: pytest.CaptureFixture[str], tiny: TinyCheckpoint) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refusal(capsys, tiny.serving, "--port", port)
    assert str(port) in line and "--port" in line
