"""The planner: operations by hand and against earlier estimates, levers, serving figures, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from acd.compute_plan import (
    ComputeSetup,
    Lengths,
    ViewWork,
    Work,
    executed_flops,
    model_parts,
    plan_compute,
    planned_work,
    typical_work,
)
from acd.config import Config, parse_config
from acd.packing import Piece
from acd.plan_command import Options, main
from acd.planner import TrainingSetup, largest_row, plan_training, training_setup
from loha.cli import run_main
from loha.hardware import find_gpu
from loha.layout import Window
from loha.model_shape import KNOWN_SHAPES, ModelShape
from loha.replay_model import AgentRun
from loha.serving_plan import ServingSetup, plan_serving

QWEN_4B = KNOWN_SHAPES["qwen3-4b"]
ENCODER = KNOWN_SHAPES["qwen3-embedding-0.6b"]
H100 = find_gpu("h100-80gb")
TINY = ModelShape(layers=2, width=4, mlp_width=6, heads=2, kv_heads=1, head_width=2, vocabulary=10)

CONFIG: dict[str, Any] = {
    "data": {"trajectories": "trajectories.jsonl"},
    "model": {"student": "nowhere", "base": "Qwen/Qwen3-4B-Instruct-2507", "lclm": "0.6b-4b-LCLM-16x"},
    "teacher": {"cache": "cache"},
    "run": {"output_dir": "nowhere/run"},
}


def config(**changes: dict[str, Any]) -> Config:
    sections = set(CONFIG) | set(changes)
    return parse_config({name: CONFIG.get(name, {}) | changes.get(name, {}) for name in sections}, source="test")


def paper_setup(*, world: int = 8, gpu: str = "h100-80gb", utilisation: float = 0.4, **changes: dict) -> TrainingSetup:
    run = config(**changes)
    return training_setup(
        run,
        typical_work(Lengths(), tokens_per_step=run.packing.tokens_per_step),
        decoder=QWEN_4B,
        encoder=ENCODER,
        rank=64,
        window=1024,
        gpu=find_gpu(gpu),
        world=world,
        utilisation=utilisation,
    )


# -- operations and time ------------------------------------------------------------------------------------------


def test_operations_of_a_tiny_run_by_hand() -> None:
    work = Work(
        full=ViewWork(tokens=10, squares=100, positions=4),
        latent=ViewWork(tokens=5, squares=25, positions=3),
        source_tokens=0,
        latents=0,
        steps=2,
        trajectories=1,
    )
    setup = ComputeSetup(decoder=TINY, rank=1, gpu=H100)
    linear, attention, patch = 15 * 480, 4 * 4 * 2 * (100 + 25) / 2, 15 * 2 * TINY.patch_parameters(1)
    assert model_parts(setup, work) == {
        "projections": 2 * linear,  # forward, and the gradient by the input: the weights are frozen
        "attention": 3 * attention,
        "head": 2 * 7 * 80,  # logits, and the hidden gradient made in the forward pass
        "reading patch": 3 * patch,
    }
    model = sum(model_parts(setup, work).values())
    assert executed_flops(setup, work) == model + linear + patch + 1.5 * attention
    assert executed_flops(replace(setup, checkpointing=False), work) == model + 0.5 * attention
    chunked = executed_flops(replace(setup, mlp_chunks=8), work) - executed_flops(setup, work)
    assert chunked == 15 * 2 * 2 * 3 * 6 * 4
    live = model_parts(replace(setup, live_teacher=True), work)["live teacher"]
    assert live == 10 * 480 + 4 * 80 + 4 * 4 * 2 * 100 / 2


@pytest.mark.parametrize(
    ("view", "tokens", "positions", "model", "executed"),
    [("full", 30_000, 10_000, 42.4, 63.2), ("latent", 11_250, 10_000, 26.7, 39.2)],
)
def test_operations_per_token_equal_the_notes(
    view: str, tokens: int, positions: int, model: float, executed: float
) -> None:
    """GFLOP per token of either view, computed before this code existed."""
    one = ViewWork(tokens=tokens, squares=tokens**2, positions=positions)
    work = Work(
        full=one if view == "full" else ViewWork(),
        latent=one if view == "latent" else ViewWork(),
        source_tokens=0,
        latents=0,
        steps=1,
        trajectories=1,
    )
    setup = ComputeSetup(decoder=QWEN_4B, gpu=H100)
    assert sum(model_parts(setup, work).values()) / tokens / 1e9 == pytest.approx(model, abs=0.05)
    assert executed_flops(setup, work) / tokens / 1e9 == pytest.approx(executed, abs=0.05)


@pytest.mark.parametrize(
    ("utilisation", "hours", "hours_on_8", "tokens_per_second"),
    [(0.50, 31.0, 3.9, 13.0e3), (0.45, 34.5, 4.3, 11.7e3), (0.40, 38.8, 4.9, 10.4e3), (0.34, 45.6, 5.7, 8.8e3)],
)
def test_hours_equal_the_notes(utilisation: float, hours: float, hours_on_8: float, tokens_per_second: float) -> None:
    work = typical_work(Lengths(), tokens_per_step=1_638_400, readback_share=0.0)
    one = plan_compute(ComputeSetup(decoder=QWEN_4B, gpu=H100, utilisation=utilisation), work)
    eight = plan_compute(ComputeSetup(decoder=QWEN_4B, gpu=H100, utilisation=utilisation, world=8), work)
    assert one.hours == pytest.approx(hours, abs=0.06)
    assert eight.hours == pytest.approx(hours_on_8, abs=0.06)
    assert one.tokens_per_second_per_gpu == pytest.approx(tokens_per_second, rel=0.006)
    assert eight.gpu_hours == pytest.approx(one.hours)
    assert one.seconds_per_step * one.steps == pytest.approx(3600 * one.hours)


def test_spread_lengths_cost_hours() -> None:
    """E[s^2] / E[s]^2 of 1.5 makes hours grow 1.29-fold, 2.0 1.58-fold: the notes' figures, read-back aside."""

    def hours(spread: float) -> float:
        lengths = Lengths(spread=spread)
        work = typical_work(lengths, tokens_per_step=1_638_400, readback_share=0.0)
        return plan_compute(ComputeSetup(decoder=QWEN_4B, gpu=H100), work).hours

    assert hours(1.5) / hours(1.0) == pytest.approx(1.29, abs=0.006)
    assert hours(2.0) / hours(1.0) == pytest.approx(1.58, abs=0.006)


def test_offload_and_exchange_take_the_time_of_their_bytes() -> None:
    work = typical_work(Lengths(), tokens_per_step=204_800)
    plain = ComputeSetup(decoder=QWEN_4B, gpu=H100, world=8, exchanged_bytes=566_000_000)
    plan = plan_compute(replace(plain, offload=True), work)
    # 37.7 GB each way for a full row at 50 GB/s, over 8 ranks; rows are 97 % full.
    assert plan.offload_seconds_per_step * 8 == pytest.approx(0.97 * 2 * 37.7e9 / 50e9, rel=0.01)
    assert plan.exchange_seconds_per_step == pytest.approx(2 * 7 / 8 * 566e6 / 450e9)
    far = plan_compute(replace(plain, world=16), work)
    assert far.exchange_seconds_per_step == pytest.approx(2 * 15 / 16 * 566e6 / 50e9)


def test_sharded_ranks_gather_weights_for_every_row() -> None:
    work = typical_work(Lengths(), tokens_per_step=1_638_400)
    plain = ComputeSetup(decoder=QWEN_4B, gpu=H100, world=8, exchanged_bytes=566_000_000, tokens_per_row=204_800)
    replicated, sharded = plan_compute(plain, work), plan_compute(replace(plain, shard=True), work)
    # One row a rank and step: its weights come once forward and once backward, its gradients go once.
    gathered = 2 * (QWEN_4B.parameters() * 2 + 566e6)
    expected = 7 / 8 * (gathered + 566e6) / 450e9
    assert sharded.exchange_seconds_per_step == pytest.approx(expected, rel=0.001)
    assert sharded.hours > replicated.hours


def test_work_of_an_epoch_plan_is_exact() -> None:
    pieces = [
        Piece(trajectory="a", view="full", tokens=100, positions=30),
        Piece(trajectory="a", view="latent", tokens=70, positions=30, answers=5),
        Piece(trajectory="b", view="latent", tokens=40, positions=10),
    ]
    work = planned_work(pieces, 3, ratio=16)
    assert work.full == ViewWork(tokens=100, squares=10_000, positions=30)
    assert work.latent == ViewWork(tokens=110, squares=70**2 + 40**2, positions=45)
    assert (work.tokens, work.steps, work.trajectories) == (210, 3, 2)
    assert (work.source_tokens, work.latents) == (32, 2)  # 30 positions fewer: 32 source tokens became 2 latents


def test_a_limited_run_is_a_part_of_the_work() -> None:
    work = typical_work(Lengths(), tokens_per_step=1_638_400)
    assert work.limited(None) == work.limited(work.steps) == work.limited(10**9) == work
    some = work.limited(100)
    assert some.steps == 100
    assert some.tokens / work.tokens == pytest.approx(100 / work.steps, rel=1e-6)
    setup = ComputeSetup(decoder=QWEN_4B, gpu=H100, world=8)
    assert plan_compute(setup, some).hours == pytest.approx(plan_compute(setup, work).hours * 100 / work.steps)


def test_weights_must_fit_whole_to_be_sharded() -> None:
    """70B in bfloat16: an eighth of it fits, but every rank loads all of it."""
    big = replace(QWEN_4B, layers=80, width=8192, mlp_width=28_672, heads=64)
    setup = paper_setup(model={"shard": True, "offload": True}).with_levers(tokens_per_row=8192)
    plan = plan_training(replace(setup, memory=replace(setup.memory, decoder=big)))
    assert plan.memory.phase_bytes("backward") < H100.memory_bytes < plan.memory.phase_bytes("whole")
    assert plan.memory.peak_phase == "whole" and not plan.fits


def test_typical_work_follows_the_shares_and_epochs() -> None:
    lengths = Lengths(trajectories=100, full_tokens=300, latent_tokens=150, assistant_tokens=97)
    work = typical_work(lengths, tokens_per_step=1000, full_share=0.5, epochs=2, readback_share=0.03)
    assert work.full.tokens == 100 * 300
    assert work.latent.tokens == 200 * 150
    assert work.latent.positions == 20_000  # 3 % of them are answers
    assert work.source_tokens == 200 * 160


# -- levers -------------------------------------------------------------------------------------------------------


def test_the_papers_run_fits_one_h100_with_offload() -> None:
    plan = plan_training(paper_setup(model={"offload": True}))
    assert plan.fits
    assert plan.advice.startswith("fits, ")
    assert plan.memory.host_bytes == 36 * 204_800 * 2560 * 2
    assert plan.to_json()["largest_row_tokens"] >= 204_800


def test_the_cheapest_lever_is_named() -> None:
    assert "set model.shard: true" in plan_training(paper_setup()).advice
    plan = plan_training(paper_setup(world=1, packing={"tokens_per_row": 262_144, "tokens_per_step": 2_097_152}))
    assert not plan.fits
    assert "set model.offload: true" in plan.advice
    by_change = {lever.change: lever for lever in plan.levers}
    offload, chunks = by_change["model.offload: true"], by_change["model.mlp_chunks: 8"]
    assert offload.fits
    assert plan.compute.hours < offload.hours < chunks.hours
    both = by_change["model.offload: true, model.mlp_chunks: 8"]
    assert both.peak_bytes < min(offload.peak_bytes, chunks.peak_bytes)


def test_sharding_is_a_lever_of_several_ranks() -> None:
    changes = {lever.change for lever in plan_training(paper_setup(world=1)).levers}
    assert "model.shard: true" not in changes
    replicated = plan_training(paper_setup())
    lever = next(lever for lever in replicated.levers if lever.change == "model.shard: true")
    sharded = plan_training(paper_setup(model={"shard": True}))
    assert lever.peak_bytes == sharded.memory.peak_bytes < replicated.memory.peak_bytes
    assert lever.hours == sharded.compute.hours > replicated.compute.hours
    assert sharded.memory.of("frozen decoder") == pytest.approx(replicated.memory.of("frozen decoder") / 8, abs=1)
    assert plan_training(paper_setup(world=1, model={"shard": True})).memory.of("gathered weights") == 0


def test_shorter_rows_come_when_nothing_else_is_enough() -> None:
    plan = plan_training(paper_setup(gpu="a100-40gb", world=1))
    assert not plan.fits
    assert not any(lever.fits for lever in plan.levers if lever.change == "model.offload: true")
    small = plan_training(paper_setup(gpu="rtx4090-24gb", world=1))
    assert "packing.tokens_per_row: " in small.advice
    row = int(small.advice.split("packing.tokens_per_row: ")[1].split()[0])
    assert 1_638_400 % row == 0
    assert plan_training(
        paper_setup(gpu="rtx4090-24gb", world=1).with_levers(tokens_per_row=row, offload=True, mlp_chunks=8)
    ).fits


def test_nothing_fits_where_the_weights_do_not() -> None:
    wide = replace(QWEN_4B, width=16_384, mlp_width=65_536)
    setup = paper_setup(gpu="rtx4090-24gb", world=1)
    setup = replace(setup, memory=replace(setup.memory, decoder=wide), compute=replace(setup.compute, decoder=wide))
    plan = plan_training(setup)
    assert largest_row(setup) == 0
    assert "no lever is enough" in plan.advice


def test_largest_row_is_the_last_that_fits() -> None:
    setup = paper_setup()
    row = largest_row(setup)
    assert plan_training(setup.with_levers(tokens_per_row=row)).fits
    assert not plan_training(setup.with_levers(tokens_per_row=row + 1024)).fits


# -- serving ------------------------------------------------------------------------------------------------------


def test_serving_bytes_by_hand() -> None:
    setup = ServingSetup(decoder=QWEN_4B, encoder=ENCODER, gpu=H100)
    plan = plan_serving(setup, [Window(k=None), Window(k=3), Window(k=3, polling=8)])
    assert plan.kv_bytes_per_token == 2 * 36 * 8 * 128 * 2
    assert plan.latents_per_observation == 50
    assert plan.latent_bytes_per_observation == 50 * 2560 * 2
    assert plan.text_kv_bytes_per_observation == 800 * 147_456
    assert plan.latent_kv_bytes_per_observation == 52 * 147_456
    assert plan.components["encoder cache"] == 65_536 * 2560 * 2
    assert plan.kv_tokens * 147_456 + sum(plan.components.values()) <= 0.9 * H100.memory_bytes
    full, paper, polled = plan.arms
    assert full.last_context == 5000 + 84 * 1050 + 250
    assert full.kv_bytes == full.last_context * 147_456
    assert paper.runs_resident > 2 * full.runs_resident
    assert polled.prefilled_tokens < 0.6 * paper.prefilled_tokens
    assert polled.kv_moved_bytes < paper.kv_moved_bytes < paper.kv_moved_cold_bytes
    assert plan.fits
    assert plan.allreduce_bytes_per_token == 0


def test_tensor_parallel_splits_the_decoder_only() -> None:
    one = plan_serving(ServingSetup(decoder=QWEN_4B, encoder=ENCODER, gpu=H100), [Window()])
    two = plan_serving(ServingSetup(decoder=QWEN_4B, encoder=ENCODER, gpu=H100, tensor_parallel=2), [Window()])
    assert two.components["decoder weights"] == one.components["decoder weights"] // 2
    assert two.components["encoder and adapter weights"] == one.components["encoder and adapter weights"]
    assert two.kv_bytes_per_token == one.kv_bytes_per_token // 2
    # Two sums per layer, each rank sends half of each vector twice in a ring of two.
    assert two.allreduce_bytes_per_token == 2 * 36 * 2560 * 2


def test_a_server_that_does_not_fit_says_so() -> None:
    setup = ServingSetup(decoder=QWEN_4B, encoder=ENCODER, gpu=find_gpu("rtx4090-24gb"), encoder_cache_latents=10**7)
    assert not plan_serving(setup, [Window()]).fits


# -- the command --------------------------------------------------------------------------------------------------


def run_command(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = run_main(main, args, prog="loha plan")
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(CONFIG | {"run": {"output_dir": str(tmp_path / "run")}}))  # JSON is YAML
    return path


def test_command_prints_a_table_and_one_json_line(capsys: pytest.CaptureFixture[str], config_file: Path) -> None:
    code, text, _ = run_command(capsys, "--config", str(config_file), "--gpu", "h100-80gb", "--world", "8")
    assert code == 0
    report = json.loads(text.splitlines()[-1])
    assert report["gpu"] == "h100-80gb" and report["world"] == 8
    assert report["components"]["frozen decoder"] == 8_044_936_192
    assert report["trained_parameters"] == {"patch": 132_120_576, "gains": 196_096, "adapter": 9_181_184}
    assert report["hours"] == pytest.approx(4.9, abs=0.1)
    for part in ("frozen decoder", "Adam moments", "recomputed layer", "optimizer steps", "model.offload: true"):
        assert part in text


@pytest.mark.parametrize("name", ["qwen3-4b", "swe-master-4b"])
def test_command_plans_the_papers_recipes_before_anything_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    path = (Path(__file__).parents[2] / "configs" / f"{name}.yaml").resolve()
    monkeypatch.chdir(tmp_path)
    code, text, notes = run_command(capsys, "--config", str(path), "--gpu", "h100-80gb", "--world", "8")
    assert code == 0
    assert f"taking {name} from its path as the base" in notes
    report = json.loads(text.splitlines()[-1])
    assert report["fits"] and report["tokens_per_row"] == 204_800
    assert report["host_bytes_per_rank"] == 36 * 204_800 * 2560 * 2


def test_command_reads_the_student_and_its_epoch_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config_file: Path
) -> None:
    base = {"model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
    base |= {"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 97}
    for name in ("base", "encoder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(base))
    student = tmp_path / "student"
    student.mkdir()
    record = {
        "base": str(tmp_path / "base"),
        "encoder": str(tmp_path / "encoder"),
        "rank": 4,
        "ratio": 16,
        "window": 64,
    }
    (student / "student.json").write_text(json.dumps(record))
    settings = CONFIG | {"model": {"student": str(student)}, "run": {"output_dir": str(tmp_path / "run")}}
    config_file.write_text(json.dumps(settings))
    (tmp_path / "run").mkdir()
    piece = {"trajectory": "a", "view": "full", "tokens": 100, "positions": 30, "answers": 0, "k": None, "epoch": 0}
    header = {"format": 1, "key": "k", "steps": 1, "skipped": []}
    (tmp_path / "run" / "plan.jsonl").write_text(json.dumps(header) + "\n" + json.dumps([[piece]]) + "\n")
    code, text, _ = run_command(capsys, "--config", str(config_file), "--world", "1")
    report = json.loads(text.splitlines()[-1])
    assert code == 0
    assert (report["tokens"], report["steps"]) == (100, 1)
    shape = ModelShape.from_config(base)
    assert report["trained_parameters"]["patch"] == shape.patch_parameters(4)
    (tmp_path / "base" / "config.json").write_text(json.dumps(base | {"dtype": "float32"}))
    _, text, _ = run_command(capsys, "--config", str(config_file), "--world", "1")
    wide = json.loads(text.splitlines()[-1])["components"]["frozen decoder"]
    assert wide == 2 * report["components"]["frozen decoder"] == 4 * shape.parameters()
    config_file.write_text(json.dumps(settings | {"packing": {"tokens_per_row": 99, "tokens_per_step": 99}}))
    code, _, told = run_command(capsys, "--config", str(config_file))
    assert code == 2 and "has a row of 100 tokens, packing.tokens_per_row is 99" in told


def test_command_plans_a_server_from_a_serving_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "vocab_size": 97,
    }
    nested = {"text_config": sizes, "encoder_config": sizes | {"num_hidden_layers": 1}, "compression_ratio": 8}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    code, text, _ = run_command(capsys, "--serving", "--checkpoint", str(tmp_path), "--k", "3", "--polling", "8")
    report = json.loads(text.splitlines()[-1])
    assert code == 0
    assert report["latents_per_observation"] == 100
    assert [(arm["k"], arm["polling"]) for arm in report["arms"]] == [("3", 8)]
    code, text, _ = run_command(capsys, "--serving", "--base", "qwen3-4b")
    arms = [(arm["k"], arm["polling"]) for arm in json.loads(text.splitlines()[-1])["arms"]]
    assert arms == [("inf", 1), ("3", 1), ("3", 8), ("8", 1), ("8", 8)]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "say what to plan"),
        (("--serving",), "say which model to serve"),
        (("--serving", "--checkpoint", "nowhere"), "no config.json there"),
        (("--config", "nowhere.yaml"), "no such configuration file"),
        (("--config", "CONFIG", "--gpu", "h100"), "unknown accelerator 'h100'"),
        (("--config", "CONFIG", "--utilisation", "40"), "must lie above 0 and at most at 1"),
        (("--config", "CONFIG", "--utilisation", "nan"), "must lie above 0 and at most at 1"),
        (("--config", "CONFIG", "--length-spread", "-1"), "--length-spread must be a finite number of at least 0"),
        (("--config", "CONFIG", "--rank", "0"), "--rank must be at least 1"),
        (("--config", "CONFIG", "--latent-tokens", "40000"), "cannot be more than --full-tokens"),
        (("--config", "CONFIG", "--world", "0"), "--world must be at least 1"),
        (("--config", "CONFIG", "--base", "nowhere"), "no known model name"),
        (("--serving", "--base", "qwen3-4b", "--k", "three"), "K must be"),
    ],
    ids=str,
)
def test_command_says_what_is_wrong_in_one_line(
    capsys: pytest.CaptureFixture[str], config_file: Path, args: tuple[str, ...], message: str
) -> None:
    words = [str(config_file) if word == "CONFIG" else word for word in args]
    code, _, errors = run_command(capsys, *words)
    assert code == 2
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert message in errors


def test_options_have_help() -> None:
    assert Options.__doc__ and AgentRun().calls == Options().calls
