"""`loha bench` through the real server: recorded lengths, cold caches per run, encode once, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from histories import TOOLS, call
from live_server import Reference, Server
from tiny_checkpoint import text

from loha.errors import LohaError
from loha.trajectory import Trajectory, write_trajectories
from serving import bench

ARMS = ("full", "k0")
CALLS = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of three calls; the second goes on with an observation that no context holds."""
    rows = []
    for number in range(2):
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": text(60, 30)},
            {"role": "user", "content": text(61 + number, 20)},
        ]
        for step in range(CALLS):
            said = text(70 + 10 * number + step, 3 + step)
            messages.append({"role": "assistant", "content": said, "tool_calls": call(step)})
            messages.append({"role": "tool", "tool_call_id": f"call{step}", "content": text(90 + step, 70 + 9 * step)})
        rows.append(Trajectory(id=f"run{number}", instance_id=f"task{number}", messages=messages[:-1], tools=TOOLS))
    flood = [
        *rows[1].messages,
        {"role": "tool", "tool_call_id": f"call{CALLS - 1}", "content": text(9, 20000)},
        {"role": "assistant", "content": "no"},
    ]
    rows[1] = Trajectory(id="run1", instance_id="task1", messages=flood, tools=TOOLS)
    path = tmp_path_factory.mktemp("recorded") / "recorded.jsonl"
    write_trajectories(path, rows)
    return path


def run(server: Server, recorded: Path, out: Path, **more: Any) -> int:
    settings: dict[str, Any] = {"arms": ARMS, "rounds": 2, "concurrency": 3, "decoder": "qwen3-4b"} | more
    return bench.main(bench.Options(trajectories=recorded, out=out, base_url=server.base_url, **settings))


def test_bench_replays_compares_and_goes_on(
    server: Server, reference: Reference, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.counter("requests")
    # A second name of the same server stands in for a stock one: it is asked without our options.
    stock_url = server.base_url.replace("127.0.0.1", "localhost")
    assert run(server, recorded, tmp_path, stock_url=stock_url) == 0
    captured = capsys.readouterr()
    assert "trajectory run1: the first 3 of 4 calls are replayed" in captured.err
    summary = json.loads(captured.out.splitlines()[-1])
    arms = {arm["arm"]: arm for arm in summary["arms"]}
    assert list(arms) == ["full", "latent:k0p1", "stock"]
    warm_up = 2 * len(arms)
    assert server.counter("requests") - before == warm_up + sum(arm["calls"] for arm in arms.values())
    full, latent = arms["full"], arms["latent:k0p1"]

    # Every arm makes the same calls with the recorded reply lengths: 3 runs (run0 twice) of 3 calls, twice.
    rows = [json.loads(line) for line in recorded.read_text().splitlines()]
    rendering = reference.model.renderer.render(rows[0]["messages"], TOOLS)
    lengths = [span.end - span.start for span in rendering.assistant_spans]
    for arm in arms.values():
        assert (arm["rounds"], arm["runs"], arm["calls"]) == (2, 6, 6 * CALLS)
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    for done in (run for run in runs if run["trajectory"] == "run0"):
        assert [timed["usage"]["completion_tokens"] for timed in done["calls"]] == lengths
        assert all(0 < timed["first_token_s"] <= timed["seconds"] for timed in done["calls"])

    # Caches of the server start cold in every run, within a run they hold.
    assert latent["encoder_runs_per_observation"] == 1.0
    assert full["encoder_tokens_engine"] == 0
    once = latent["columns"]["mean"]["encoder_tokens"]
    encoder_ids = reference.render(rows[0]["messages"][:-1], k=0, tools=TOOLS).latents
    tag_tokens = once - sum(len(found.encoder_ids) for found in encoder_ids)
    assert 0 < tag_tokens <= 25 * len(encoder_ids)
    assert 0.3 < full["columns"]["mean"]["cached_share"] < 0.95
    assert latent["columns"]["mean"]["decoder_input"] < full["columns"]["mean"]["decoder_input"]
    assert full["engine"]["generated_tokens"] == pytest.approx(full["columns"]["mean"]["output_tokens"])
    prefilled = full["engine"]["prompt_tokens"] - full["engine"]["prefix_hits"]
    assert prefilled == pytest.approx(full["prefill_tokens"])
    assert full["columns"]["mean"]["decoder_pflops"] > 0 and full["columns"]["retail_usd"] > 0

    ratios = {(ratio["arm"], ratio["over"], ratio["figure"]): ratio for ratio in summary["ratios"]}
    context = ratios["latent:k0p1", "full", "context_tokens"]
    assert context["low"] == context["high"] < 1 and context["rounds"] == 2
    speed = ratios["full", "stock", "instances_per_hour"]
    assert 0 < speed["low"] <= speed["mean"] <= speed["high"]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert "| latent:k0p1 / full |" in (tmp_path / "bench.md").read_text()

    # Again with the last run's line cut off: that run alone is replayed.
    asked = server.counter("requests")
    log = tmp_path / "runs.jsonl"
    log.write_text(log.read_text()[:-20])
    assert run(server, recorded, tmp_path, stock_url=stock_url) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert server.counter("requests") - asked == CALLS + 2
    assert [arm["runs"] for arm in again["arms"]] == [6, 6, 6]
    assert len(log.read_text().splitlines()) == 18

    # And once more: nothing is left to do.
    asked = server.counter("requests")
    assert run(server, recorded, tmp_path, stock_url=stock_url) == 0
    assert server.counter("requests") == asked
    with pytest.raises(LohaError, match="concurrency 3, this one has 4"):
        run(server, recorded, tmp_path, concurrency=4)


def test_a_refusal_names_the_call_and_keeps_what_was_finished(server: Server, recorded: Path, tmp_path: Path) -> None:
    """A limit above the server's lets the flood through to the server, which refuses it."""
    with pytest.raises(LohaError, match="run1, call 4, arm full") as refused:
        run(server, recorded, tmp_path, arms=("full",), rounds=1, concurrency=1, max_model_len=10**6)
    assert "maximum context length" in str(refused.value)
    assert [json.loads(line)["trajectory"] for line in (tmp_path / "runs.jsonl").read_text().splitlines()] == ["run0"]
    assert not (tmp_path / "bench.json").exists()


def test_without_a_server_nothing_is_written(recorded: Path, tmp_path: Path) -> None:
    options = bench.Options(trajectories=recorded, out=tmp_path / "out", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(LohaError, match="is the server up"):
        bench.main(options)
    assert not (tmp_path / "out").exists()
