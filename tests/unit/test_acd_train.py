"""A whole small run, its files, its learning-rate groups, evaluation, and the ways in which a start can fail."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file

from acd import evaluate
from acd.cache_teacher import write_cache
from acd.checkpoint import CheckpointFolder, Cursor, random_state, restore, set_random_state
from acd.config import OptimizerConfig, load_config
from acd.corpus import Corpus
from acd.encoder_cache import PooledCache
from acd.evaluate import EvaluationRule, Evaluator
from acd.held_out import is_better
from acd.metrics import JsonLines, flat
from acd.optimizer import make_optimizer, schedule_factor, set_rates
from acd.parts import load_student, make_accelerator
from acd.readback import ReadBackRule
from acd.rows import pack_examples
from acd.scores import Answer, answer_report
from acd.train import train
from acd.views import latent_view
from loha.atomic import recover
from loha.command_line import run_reporting
from loha.errors import LohaError
from loha.init_student import Options, init_student
from loha.student import Student
from tests.acd_world import World, full_disk, make_trajectory, make_world

CPU = torch.device("cpu")
STEPS = 12


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("train"), trajectories=6)


@pytest.fixture(scope="module")
def run(world: World) -> Path:
    """The folder of a short run with everything switched on."""
    config = world.config(
        "run",
        data={"held_out": str(world.trajectories), "held_out_limit": 1},
        model={"checkpointing": False},
        views={"latent_k": [0, 1]},
        run={
            "epochs": 12,
            "max_steps": STEPS,
            "checkpoint_every": 5,
            "evaluate_every": STEPS // 2,
            "probe_turns": 1,
            "trackers": ["tensorboard"],
        },
        packing={"tokens_per_row": 2600, "tokens_per_step": 5200},
        optimizer={"lr_patch": 3e-3, "lr_gains": 3e-3, "lr_adapter": 1e-3, "warmup_steps": 2, "schedule": "linear"},
    )
    write_cache(config, make_accelerator(config))
    train(config)
    return world.root / "run"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_of_metrics_per_step(run: Path) -> None:
    steps = lines(run / "metrics.jsonl")
    assert [line["step"] for line in steps] == list(range(STEPS))
    for line in steps:
        distill, read_back, anchor = (line[term] for term in ("distill", "read_back", "anchor"))
        assert line["loss"] == pytest.approx(
            (distill["sum"] + read_back["sum"]) / (distill["count"] + read_back["count"])
            + anchor["sum"] / anchor["count"]
        )
        assert distill["count"] == anchor["count"] > 0
        assert line["tokens_per_s"] > 0 and line["grad_norm"] > 0
    assert [steps[i]["lr"]["patch"] for i in (0, 1, 2, 7)] == pytest.approx([1.5e-3, 3e-3, 3e-3, 1.5e-3])
    assert steps[5]["lr"]["adapter"] == pytest.approx(steps[5]["lr"]["patch"] / 3)


def test_distillation_falls(run: Path) -> None:
    kl = [line["distill"]["sum"] / line["distill"]["count"] for line in lines(run / "metrics.jsonl")]
    assert sum(kl[-4:]) < 0.8 * sum(kl[:4])


def test_what_a_run_leaves(run: Path, world: World) -> None:
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000010", "step-00000012"]
    names = set(load_file(run / "checkpoints" / "step-00000012" / "trained.safetensors"))
    assert not [name for name in names if not name.startswith(("patch.", "gains.", "adapter."))]
    assert any(path.name.startswith("events.out") for path in run.rglob("*"))
    versions = json.loads((run / "versions.json").read_text())
    assert versions["packages"]["torch"] and versions["python"]
    assert "output_dir" in (run / "config.yaml").read_text()
    evaluations = lines(run / "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [6, 12]
    assert evaluations[1]["k"]["0"]["kl"] < evaluations[0]["k"]["0"]["kl"]
    assert (run / "best" / "student.json").is_file()
    assert {k: probe["asked"] for k, probe in evaluations[1]["tool_calls"].items()} == {"0": 1, "inf": 1}


def test_everything_trained_has_moved(run: Path, world: World) -> None:
    start, end = (Student.load(folder, verify=False).trainable() for folder in (world.student, run / "student"))
    for name, parameter in end.items():
        moved = (parameter != start[name]).double().mean()
        assert moved > 0.9, f"{name}: {moved:.0%} of the entries moved"


def test_a_finished_run_started_again_does_nothing(run: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "student" / "reading.safetensors").read_bytes()
    train(load_config(run / "config.yaml"))
    assert "nothing is left to do: 12 steps are done of 12" in capsys.readouterr().err
    assert (run / "student" / "reading.safetensors").read_bytes() == before
    assert len(lines(run / "metrics.jsonl")) == STEPS


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"run": {"resume": False}}, "holds checkpoints of an earlier run; choose another run.output_dir"),
        ({"run": {"seed": 5}}, "made with another epoch plan"),
        ({"data": {"trajectories": "none.jsonl"}}, "none.jsonl: no such trajectory file"),
        ({"model": {"student": "nowhere"}}, "nowhere is not a folder"),
        ({"teacher": {"cache": "nowhere"}}, "nowhere: holds no teacher cache"),
        ({"run": {"evaluate_every": 1}}, "run.evaluate_every needs data.held_out"),
    ],
)
def test_a_start_that_cannot_work(run: Path, world: World, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(LohaError, match=message):
        train(world.config("run", **sections))


def test_cache_of_another_template(run: Path, world: World, tmp_path: Path) -> None:
    """The student is sound in itself; the cache was made with its base's template before it was edited."""
    other = make_world(tmp_path, trajectories=2)
    for folder in (other.base, other.lclm / "encoder"):
        template = folder / "chat_template.jinja"
        template.write_text(template.read_text().replace("{{ m.content }}", "{{ m.content + '.' }}"))
    init_student(Options(base=other.base, lclm=other.lclm, rank=4, out=other.student))[0].write(other.student)
    config = other.config(teacher={"cache": str(world.root / "cache")})
    message = r"chat template differs: this configuration has \w+, teacher cache .*shard-00000-\w+.safetensors was made"
    with pytest.raises(LohaError, match=message):
        train(config)
    assert not (other.root / "run" / "metrics.jsonl").exists()


def test_evaluation_command(run: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    config = world.write_config("evaluate", data={"held_out": str(world.trajectories), "held_out_limit": 2})
    words = ["--config", str(config), "--student", str(run / "student"), "--k", "0", "1", "3", "inf"]
    assert run_reporting(lambda: evaluate.main([*words, "--turns", "2", "--read-back", "--probe", "2"])) == 0
    *table, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert list(report["k"]) == ["0", "1", "3", "inf"] and len(table) == 5
    assert {r["turns"] for r in report["k"].values()} == {4}
    assert len({r["positions"] for r in report["k"].values()}) == 1
    assert report["drift"] == report["k"]["inf"]["kl"] > 0
    assert {k: probe["asked"] for k, probe in report["tool_calls"].items()} == dict.fromkeys(report["k"], 4)
    assert run_reporting(lambda: evaluate.main([*words[:-1], "three"])) == 2
    assert "K must be 0, 1, 2, ... or inf" in capsys.readouterr().err


def test_a_history_per_turn_equals_one_pass(run: Path, world: World) -> None:
    """K = 99 keeps everything as text, as inf does, but takes the way of a moving window."""
    corpus = Corpus(world.trajectories, limit=2)
    evaluator = Evaluator(Student.load(run / "student").eval(), EvaluationRule(ks=(None, 99), tokens_per_row=1500))
    for entry in corpus.entries():
        evaluator.add(corpus[entry.id])
    one_pass, by_turn = evaluator.report()["k"]["inf"], evaluator.report()["k"]["99"]
    assert one_pass["turns"] == by_turn["turns"] == sum(corpus[e.id].assistant_turns for e in corpus.entries())
    assert by_turn["kl"] == pytest.approx(one_pass["kl"], rel=1e-4)
    assert by_turn["exact_tokens"] == pytest.approx(one_pass["exact_tokens"], abs=0.01)


def test_the_base_is_its_own_teacher(world: World) -> None:
    """Patch off at K = inf: no KL at all, and the teacher's top id everywhere. Masked text differs from full text."""
    student = Student.load(world.student).eval()
    corpus = Corpus(world.trajectories, limit=2)
    base = Evaluator(student, EvaluationRule(ks=(None,)), patch=False)
    masked = Evaluator(student, EvaluationRule(ks=(0, None), view="mask"), patch=False)
    for entry in corpus.entries():
        base.add(corpus[entry.id])
        masked.add(corpus[entry.id])
    report = base.report()
    assert abs(report["drift"]) < 1e-6 and report["k"]["inf"]["same_top_1"] == 1.0
    assert masked.report()["k"]["0"]["kl"] > 1e-3 > masked.report()["drift"]


def test_answers_by_age() -> None:
    counts = ((0, 4, 4, 0.5), (2, 2, 0, 6.0), (3, 2, 2, 0.5), (40, 2, 1, 3.0))  # age, tokens, likeliest ones, nats
    report = answer_report([Answer(age=a, tokens=t, exact_tokens=e, nats=n) for a, t, e, n in counts])
    assert report == {
        "asked": 4,
        "exact": 0.5,
        "exact_tokens": 0.7,
        "nll": 1.0,
        "by_age": {
            "0": {"asked": 1, "exact": 1.0, "exact_tokens": 1.0, "nll": 0.125},
            "1-3": {"asked": 2, "exact": 0.5, "exact_tokens": 0.5, "nll": 1.625},
            "16+": {"asked": 1, "exact": 0.0, "exact_tokens": 0.5, "nll": 1.5},
        },
    }
    assert answer_report([]) == {"asked": 0, "exact": None, "exact_tokens": None, "nll": None, "by_age": {}}


@torch.no_grad()
def test_read_back_is_scored_as_dense_logits_say(run: Path, world: World) -> None:
    corpus = Corpus(world.trajectories, limit=1)
    (trajectory,) = (corpus[entry.id] for entry in corpus.entries())
    student, rule = Student.load(run / "student").eval(), ReadBackRule(share=0.3)
    evaluator = Evaluator(student, EvaluationRule(ks=(), readback=rule))
    evaluator.add(trajectory)
    example = latent_view(student.renderer(), trajectory, k=0, readback=rule, seed=f"evaluation/{trajectory.id}")
    packed = pack_examples([example])
    hidden = student(packed.token_ids_T, packed.regions, packed.position_ids_1T, packed.lengths)[0]
    logits = hidden[list(example.answer_states)] @ student.lm_head_weight.t()
    answers = torch.tensor(list(example.answer_ids))
    nats = -logits.log_softmax(1).gather(1, answers[:, None])[:, 0]
    report = evaluator.report()["read_back"]
    assert report["asked"] == len(example.questions) > 1
    assert report["nll"] == pytest.approx(nats.mean().item(), rel=1e-5)
    assert report["exact_tokens"] == pytest.approx((logits.argmax(1) == answers).double().mean().item())


def test_groups_and_schedule(world: World) -> None:
    student = load_student(world.config(model={"checkpointing": False}), CPU)
    config = OptimizerConfig(weight_decay=0.1, warmup_steps=4, schedule="cosine")
    optimizer = make_optimizer(student, config)
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert {name: (g["lr"], g["weight_decay"]) for name, g in groups.items()} == {
        "patch": (1e-4, 0.1),
        "gains": (1e-4, 0.0),
        "adapter": (5e-5, 0.1),
    }
    assert all(g["param_names"] == sorted(g["param_names"]) for g in groups.values())
    assert sum(len(g["params"]) for g in groups.values()) == len(student.trainable())
    assert set_rates(optimizer, config, 0, 100)["patch"] == pytest.approx(0.25e-4)
    assert [schedule_factor(config, step, 104) for step in (3, 4, 54)] == pytest.approx([1.0, 1.0, 0.5])
    assert schedule_factor(OptimizerConfig(), 99, 100) == 1.0


def test_checkpoints_of_another_student_are_refused(world: World, tmp_path: Path) -> None:
    student = load_student(world.config(model={"checkpointing": False}), CPU)
    optimizer = make_optimizer(student, OptimizerConfig())
    folder = CheckpointFolder(tmp_path, keep_last=1)
    path = folder.save(Cursor(step=1, plan_key="k"), student.trainable(), optimizer, [random_state()])
    assert restore(path, student.trainable(), optimizer, rank=3, plan_key="k") == Cursor(step=1, plan_key="k")
    with pytest.raises(LohaError, match="another epoch plan"):
        restore(path, student.trainable(), optimizer, rank=0, plan_key="other")
    fewer = dict(list(student.trainable().items())[1:])
    with pytest.raises(LohaError, match="is not in both the checkpoint and the student"):
        restore(path, fewer, optimizer, rank=0, plan_key="k")
    (path / "trained.safetensors").write_bytes((path / "trained.safetensors").read_bytes()[:-9])
    with pytest.raises(LohaError, match="not a complete safetensors file"):
        restore(path, student.trainable(), optimizer, rank=0, plan_key="k")


def test_a_checkpoint_that_does_not_fit_the_disk(world: World, tmp_path: Path) -> None:
    """The older one stays."""
    student = load_student(world.config(model={"checkpointing": False}), CPU)
    optimizer = make_optimizer(student, OptimizerConfig())
    folder = CheckpointFolder(tmp_path, keep_last=1)
    folder.save(Cursor(step=1, plan_key="k"), student.trainable(), optimizer, [])
    with full_disk(after=10_000), pytest.raises(LohaError, match=r"cannot be written: .* is there space"):
        folder.save(Cursor(step=2, plan_key="k"), student.trainable(), optimizer, [])
    assert folder.steps() == [1] and len(list(tmp_path.iterdir())) == 1


def test_a_gradient_that_is_no_number_ends_the_run_before_the_weights_are_lost(world: World) -> None:
    config = world.config(
        "no-number",
        optimizer={"lr_patch": 1e30, "lr_gains": 1e30, "lr_adapter": 1e30},
        run={"epochs": 4, "max_steps": 4, "checkpoint_every": 1},
        teacher={"mode": "live", "cache": None},
    )
    with pytest.raises(LohaError, match=r"step 1: the gradient norm is (nan|inf)"):
        train(config)
    folder = CheckpointFolder(Path(config.run.output_dir) / "checkpoints", keep_last=2)
    assert folder.steps() == [1]
    assert all(tensor.isfinite().all() for tensor in load_file(folder.path(1) / "trained.safetensors").values())


def test_a_cache_that_lacks_trajectories_is_told_before_the_first_step(run: Path, world: World) -> None:
    lines_of = world.trajectories.read_text().splitlines()
    more, changed = make_trajectory(99).to_line(), lines_of[-1].replace("You fix bugs.", "You fix all bugs.")
    for name, texts in (("more", [*lines_of, more]), ("changed", [*lines_of[:-1], changed])):
        path = world.root / f"{name}.jsonl"
        path.write_text("\n".join(texts) + "\n")
        config = world.config(f"lacks-{name}", data={"trajectories": str(path)})
        with pytest.raises(LohaError, match=r"cache: lacks 1 of [67] trajectories that train"):
            train(config)
        assert not (Path(config.run.output_dir) / "metrics.jsonl").exists()


def test_a_refused_resume_leaves_the_record_of_the_run(run: Path, world: World) -> None:
    names = ("config.yaml", "versions.json", "plan.jsonl")
    before = [(run / name).read_bytes() for name in names]
    for sections in ({"packing": {"tokens_per_row": 5200, "tokens_per_step": 5200}}, {"model": {"base": "nowhere"}}):
        with pytest.raises(LohaError):
            train(world.config(run.name, **sections))
    assert [(run / name).read_bytes() for name in names] == before


def test_a_folder_that_was_moved_aside_comes_back(tmp_path: Path) -> None:
    """What a kill between the two renames of `atomic_path` leaves."""
    for name in (".best.77.old", ".best.77.tmp", ".done.5.old", "done", ".keep", ".other.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / ".best.77.old" / "file").write_text("the only copy")
    (tmp_path / ".shard-0.safetensors.3.tmp").write_text("half")
    recover(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"best", "done", ".keep", ".other.tmp"}
    assert (tmp_path / "best" / "file").read_text() == "the only copy"


def test_no_number_is_never_the_best() -> None:
    assert is_better(2.0, None) and is_better(1.0, 2.0)
    assert not is_better(2.0, 2.0)
    assert not any(is_better(loss, best) for loss in (math.nan, math.inf) for best in (None, 1.0))


def test_random_states_survive_json() -> None:
    state = json.loads(json.dumps(random_state()))
    first = torch.rand(3)
    set_random_state(state)
    assert torch.equal(torch.rand(3), first)


def test_pooled_states_are_computed_once(world: World) -> None:
    student = load_student(world.config(), CPU)
    calls: list[int] = []
    student.latent_encoder.register_forward_hook(lambda *_: calls.append(1))
    ids = [torch.arange(5), torch.arange(40), torch.arange(5)]
    plain = student.latent_encoder(ids)
    calls.clear()
    cache = PooledCache(student.latent_encoder, max_bytes=10**6)
    for _ in range(2):
        for a, b in zip(cache(ids), plain, strict=True):
            torch.testing.assert_close(a, b)
    assert len(calls) == 2
    tiny = PooledCache(student.latent_encoder, max_bytes=1)
    tiny(ids)
    assert tiny.bytes == 0


def test_metrics_after_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    log = JsonLines(path, before=2)
    log.write({"step": 2, "again": True})
    assert lines(path) == [{"step": 0}, {"step": 1}, {"step": 2, "again": True}]
    assert flat({"step": 3, "a": {"sum": 6.0, "count": 3}, "lr": {"patch": 0.5}}) == {"a": 2.0, "lr/patch": 0.5}


@pytest.fixture(autouse=True, scope="module")
def _accelerate_leaves_nothing() -> Any:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
