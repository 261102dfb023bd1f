"""The command line on good and bad input: one clear line, a non-zero exit, nothing half-written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loha.cli import COMMANDS, main


def run(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str, str]:
    """Run one command in this process: exit status, standard output, standard error."""
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


@pytest.fixture(scope="module")
def history(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Canonical trajectories, imported from real rows."""
    path = tmp_path_factory.mktemp("imported") / "trajectories.jsonl"
    with pytest.raises(SystemExit) as stop:
        main(["data", "import", str(shared_data / "swe_master"), "--out", str(path)])
    assert not stop.value.code
    return path


def test_render_k_inf_equals_template_on_every_shared_trajectory(
    shared_data: Path, history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from loha.tokenizer_dir import load_tokenizer

    tokenizer = load_tokenizer(shared_data / "qwen3")
    rows = [json.loads(line) for line in history.open()]
    assert len(rows) == 9
    for row in rows:
        command = ["render", "--tokenizer", shared_data / "qwen3", "--trajectory", history, "--id", row["id"]]
        status, out, _ = run(capsys, *command, "--k", "inf", "--json")
        text = tokenizer.apply_chat_template(row["messages"], tools=row["tools"] or None, tokenize=False)
        assert status == 0
        assert json.loads(out)["token_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_render_shows_people_what_became_of_each_observation(
    shared_data: Path, history: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "render", "--tokenizer", shared_data / "qwen3", "--trajectory", history, "--k", "1")
    assert status == 0
    assert "tokens as" in out and "effective ratio" in out


BAD = [
    ("render --tokenizer {tok} --trajectory {traj} --k -1", "K must be 0, 1, 2"),
    ("render --tokenizer {tok} --trajectory {traj} --k three", "K must be 0, 1, 2"),
    ("render --tokenizer {tok} --trajectory {traj} --polling 0", "polling must be"),
    ("render --tokenizer {tok} --trajectory {missing}", "missing"),
    ("render --tokenizer {tok} --trajectory {traj} --id nobody", "nobody"),
    ("render --tokenizer {missing} --trajectory {traj}", "no such tokenizer folder"),
    ("render --tokenizer {empty} --trajectory {traj}", "tokenizer.json"),
    ("render --tokenizer {tok} --trajectory {junk}", "junk"),
    ("data import {missing} --out {out}", "missing"),
    ("data import {junk} --out {out} --bad-rows fatal", "junk"),
    ("data select {missing} --tokenizer {tok} --out {out}", "missing"),
    ("encode --lclm {missing} --text {junk} --out {out}", "missing"),
    ("encode --lclm {base} --text {junk} --out {out}", "base"),
    ("encode --lclm {lclm} --text {missing} --out {out}", "missing: no such file"),
    ("encode --lclm {lclm} --text {junk} --out {empty}", "empty: is a folder"),
    ("data import {junk} --out {junk}/x.jsonl", "is a file, not a folder"),
    ("init --base {missing} --lclm {lclm} --out {out}", "missing"),
    ("init --base {base} --lclm {base} --out {out}", "base"),
    ("init --base {tok} --lclm {lclm} --out {out}", "qwen3"),
    ("export {missing} --out {out}", "missing"),
    ("export {base} --out {out}", "base"),
]


@pytest.mark.parametrize(("command", "complaint"), BAD, ids=[f"{c.split(' --')[0]}-{m[:20]}" for c, m in BAD])
def test_bad_input_is_one_line_and_leaves_nothing(
    command: str, complaint: str, shared_data: Path, history: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    junk, empty = tmp_path / "junk.jsonl", tmp_path / "empty"
    junk.write_bytes(b"\x00\xff not json {")
    empty.mkdir()
    names = {
        "tok": shared_data / "qwen3",
        "base": shared_data / "tiny/base",
        "lclm": shared_data / "tiny/lclm",
        "traj": history,
        "missing": tmp_path / "missing",
        "junk": junk,
        "empty": empty,
        "out": tmp_path / "result",
    }
    before = sorted(path.name for path in tmp_path.iterdir())
    status, _, err = run(capsys, *command.format(**names).split())
    complaints = [line for line in err.splitlines() if line.startswith("error: ")]
    assert status == 2
    assert len(complaints) == 1 and complaint in complaints[0]
    assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_help_lists_every_command() -> None:
    shown = subprocess.run([sys.executable, "-m", "loha"], capture_output=True, text=True, check=True).stdout
    for words in COMMANDS:
        assert "loha " + " ".join(words) in shown


def test_help_of_a_command_explains_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "render", "--help")
    assert status == 0
    assert "newest observations stay text" in out


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("-m loha render --kk 3", "--tokenizer PATH, --trajectory PATH; Unrecognized options: --kk, 3"),
        ("-m loha serve x --view foo", "invalid choice 'foo' for argument '--view'"),
        ("-m acd.cache_teacher --config configs/miniature.yaml --optimizer.lr-ptch 1", "--optimizer.lr-ptch"),
    ],
)
def test_a_bad_command_line_is_one_line_of_a_real_process(command: str, complaint: str) -> None:
    ended = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ") and complaint in line and line.endswith("--help")


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("init --base a --lclm b --out c --rank three", "--rank: invalid literal for int() with base 10: 'three'; see"),
        ("export a --out b --oot c", "Unrecognized options: --oot, c; Perhaps you meant: --out PATH; see loha export"),
        ("data slect x", "no command loha data slect; did you mean loha data import or loha data select?"),
        ("exprt x", "no command loha exprt; did you mean loha export?"),
    ],
)
def test_a_bad_command_line_is_one_line(command: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *command.split())
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ") and complaint in line
