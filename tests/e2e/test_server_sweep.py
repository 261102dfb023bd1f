"""`loha sweep` through the real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from live_server import Server, options
from tiny_checkpoint import text

from loha.errors import LohaError
from loha.trajectory import Trajectory, write_trajectories
from serving import sweep

REPLY_TOKENS = 6


@pytest.fixture(scope="module")
def recorded(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trajectories whose turns are the model's own at full text; the second ends in a history that is too long."""
    rows = []
    for number in range(2):
        messages: list[dict[str, Any]] = [{"role": "user", "content": text(700 + number, 10)}]
        for step in range(4):
            answer = server.post(messages, loha=options(None), max_tokens=REPLY_TOKENS, ignore_eos=False).json()
            said = answer["choices"][0]["message"]["content"] or ""
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "tool", "content": text(800 + 10 * number + step, 60)})
        rows.append(Trajectory(id=f"run{number}", instance_id=f"task{number}", messages=messages[:-1]))
    flood = [*rows[1].messages, {"role": "tool", "content": text(9, 20000)}, {"role": "assistant", "content": "no"}]
    rows[1] = Trajectory(id="run1", instance_id="task1", messages=flood)
    path = tmp_path_factory.mktemp("recorded") / "recorded.jsonl"
    write_trajectories(path, rows)
    return path


def run(server: Server, recorded: Path, out: Path, **more: Any) -> int:
    settings: dict[str, Any] = {"k": ("0", "inf"), "view": ("latent", "mask"), "max_tokens": REPLY_TOKENS} | more
    return sweep.main(sweep.Options(trajectories=recorded, out=out, base_url=server.base_url, **settings))


def test_sweep_scores_resumes_and_names_refusals(
    server: Server, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.counter("requests")
    assert run(server, recorded, tmp_path) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out.splitlines()[-1])
    rows = {(row["view"], row["k"]): row for row in summary["arms"]}
    assert set(rows) == {("latent", "0"), ("mask", "0"), ("full", "inf")}
    full, latent, mask = rows["full", "inf"], rows["latent", "0"], rows["mask", "0"]
    assert (full["exact"], full["calls"], full["errors"]) == (1.0, 8, 1)
    assert latent["exact"] < 1.0 and latent["effective_ratio"] > 1.5
    assert latent["encoder_tokens_once"] < latent["encoder_tokens_per_call"]
    assert mask["latents_per_call"] == 0
    assert "trajectory run1, turn 4, arm full" in captured.err and "maximum context length" in captured.err
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "| latent | 0 |" in (tmp_path / "sweep.md").read_text()
    asked = server.counter("requests") - before
    assert asked == full["calls"] + latent["calls"] + mask["calls"]

    # Again: answered cells are kept, and the refused one is asked again.
    assert run(server, recorded, tmp_path) == 0
    assert server.counter("requests") - before == asked
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["arms"] == summary["arms"]
    assert "trajectory run1, turn 4, arm full" in captured.err


def test_sweep_does_not_mix_two_sweeps_in_one_folder(server: Server, recorded: Path, tmp_path: Path) -> None:
    assert run(server, recorded, tmp_path, turns="last", limit=1) == 0
    with pytest.raises(LohaError, match="max_tokens"):
        run(server, recorded, tmp_path, turns="last", limit=1, max_tokens=REPLY_TOKENS + 1)


def test_sweep_without_a_server_says_so(recorded: Path, tmp_path: Path) -> None:
    options_ = sweep.Options(trajectories=recorded, out=tmp_path / "out", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(LohaError, match="is the server up"):
        sweep.main(options_)
    assert not (tmp_path / "out").exists()
