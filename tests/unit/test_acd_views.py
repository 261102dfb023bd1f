"""Both views hold the same assistant tokens; targets sit where the next token is predicted; plans are exact."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import acd.plan
import tests.acd_processes  # noqa: F401 - the worker processes start from its preloaded server
from acd.corpus import Corpus
from acd.packing import Piece
from acd.plan import Plan, limits, make_plan, plan_key, view_rule
from acd.readback import ReadBackRule
from acd.rows import RowBuilder, TargetSource
from acd.views import ViewBuilder, full_view, latent_view, require_same_assistant
from loha.errors import LohaError
from loha.render import Renderer
from loha.student import build_renderer
from loha.student_files import read_student_config
from loha.trajectory import Trajectory
from tests.acd_world import World, make_trajectory, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("views"), trajectories=9)


@pytest.fixture(scope="module")
def renderer(world: World) -> Renderer:
    return build_renderer(read_student_config(world.student))


@pytest.fixture(scope="module")
def trajectory() -> Trajectory:
    return max((make_trajectory(i) for i in range(9)), key=lambda t: len(t.messages))


def bodies_of(renderer: Renderer, trajectory: Trajectory) -> list[str]:
    return [trajectory.messages[index]["content"] for index in renderer.rule.find(trajectory.messages)]


def test_full_view_predicts_what_the_assistant_wrote(renderer: Renderer, trajectory: Trajectory) -> None:
    example = full_view(renderer, trajectory)
    assert not example.regions and not example.answer_ids
    assert [example.token_ids[state + 1] for state in example.states] == example.assistant_ids
    text = renderer.tokenizer.decode(example.assistant_ids)
    turns = [m for m in trajectory.messages if m["role"] == "assistant"]
    assert text.count("<|im_end|>") == len(turns) == len(example.turn_lengths)
    assert all(turn["content"] in text for turn in turns)
    assert not any(m["content"] in text for m in trajectory.messages if m["role"] in ("system", "user"))
    assert sum(example.turn_lengths) == len(example.assistant_ids)


def test_views_pair_by_assistant_tokens(renderer: Renderer, trajectory: Trajectory) -> None:
    full = full_view(renderer, trajectory)
    for k in (0, 1, 2):
        latent = latent_view(renderer, trajectory, k=k, readback=ReadBackRule(share=0.2), seed="x")
        assert latent.assistant_ids == full.assistant_ids and latent.assistant_hash == full.assistant_hash
        assert latent.states != full.states, "positions differ, tokens do not"
    bodies = bodies_of(renderer, trajectory)
    eligible = sum(len(body) >= 128 for body in bodies)
    assert len(latent_view(renderer, trajectory, k=0).regions) == eligible
    assert len(latent_view(renderer, trajectory, k=len(bodies)).regions) == 0


def test_read_back_turns_follow_the_trajectory(renderer: Renderer, trajectory: Trajectory) -> None:
    plain = latent_view(renderer, trajectory, k=0)
    asked = latent_view(renderer, trajectory, k=0, readback=ReadBackRule(share=0.3), seed="x")
    assert asked.questions
    assert asked.token_ids[: len(plain.token_ids)] == plain.token_ids
    assert (asked.regions, asked.states, asked.assistant_ids) == (plain.regions, plain.states, plain.assistant_ids)
    assert min(asked.answer_states) >= len(plain.token_ids)
    answers = renderer.tokenizer.decode(asked.answer_ids).split("<|im_end|>")
    assert answers[:-1] == [question.answer for question in asked.questions]
    bodies = bodies_of(renderer, trajectory)
    for question in asked.questions:
        assert question.answer in bodies[question.observation]
    assert sum(asked.answer_lengths) == len(asked.answer_ids)


def test_what_a_call_shows_is_not_asked_for(renderer: Renderer, trajectory: Trajectory) -> None:
    """Templates write arguments as JSON, Python would write them otherwise: neither spelling hides them."""
    secret = "raise ValueError('it's \"bad\"')"
    messages = [dict(message) for message in trajectory.messages]
    first = next(i for i, message in enumerate(messages) if message.get("tool_calls"))
    answer = next(i for i in range(first, len(messages)) if messages[i]["role"] == "tool")
    messages[answer]["content"] += f"\n{secret}\n" * 3
    asks = ReadBackRule(share=0.9)

    def answers() -> set[str]:
        view = latent_view(renderer, replace(trajectory, messages=messages), k=0, readback=asks, seed="x")
        return {question.answer for question in view.questions}

    assert secret in answers()
    arguments = json.dumps({"edits": [{"old_str": f"a\n{secret}\nb"}]})
    call = {"type": "function", "function": {"name": "edit", "arguments": arguments}}
    messages[first]["tool_calls"] = [call | {"id": old["id"]} for old in messages[first]["tool_calls"]]
    assert secret not in answers()


def test_a_template_that_rewrites_history_gets_no_questions(renderer: Renderer, trajectory: Trajectory) -> None:
    rewriting = Renderer(
        renderer.tokenizer,
        settings=renderer.settings,
        chat_template="{% if messages | length > 14 %}{{ 'long ' }}{% endif %}" + str(renderer.chat_template),
    )
    short = replace(trajectory, messages=trajectory.messages[:13])
    asked = latent_view(rewriting, short, k=0, readback=ReadBackRule(share=0.5), seed="x")
    assert not asked.questions and asked.token_ids == latent_view(rewriting, short, k=0).token_ids


def test_pieces_depend_only_on_seed_epoch_and_trajectory(world: World, renderer: Renderer) -> None:
    corpus = Corpus(world.trajectories)
    rule = view_rule(world.config(views={"latent_k": [0, 1, 2, 5], "full_share": 0.5}))
    builder, other = ViewBuilder(renderer, rule), ViewBuilder(renderer, replace(rule, seed=1))

    def pieces(which: ViewBuilder, epoch: int) -> list[Piece]:
        return [p for e in corpus.entries() for p in which.pieces(corpus[e.id], epoch)]

    first = pieces(builder, 0)
    assert first == pieces(ViewBuilder(renderer, rule), 0)
    assert first != pieces(builder, 1) and first != pieces(other, 0)
    assert {p.k for p in first if p.view == "latent"} > {0}
    assert 0 < sum(p.view == "full" for p in first) < len(corpus)


def test_plan_is_exact_and_survives_its_file(world: World, tmp_path: Path) -> None:
    config = world.config(run={"epochs": 2})
    corpus = Corpus(world.trajectories)
    student = read_student_config(world.student)
    plan = make_plan(config, corpus, student)
    plan.save(tmp_path / "plan.jsonl")
    assert Plan.load(tmp_path / "plan.jsonl") == plan
    assert make_plan(config, corpus, student) == plan
    for epoch in (0, 1):
        mine = [(p.trajectory, p.view) for p in plan.pieces() if p.epoch == epoch]
        assert sorted(mine) == sorted((e.id, view) for e in corpus.entries() for view in ("latent", "full"))
    order = [[p.trajectory for p in plan.pieces() if p.epoch == epoch] for epoch in (0, 1)]
    assert order[0] != order[1], "each epoch has its own order"
    (tmp_path / "cut.jsonl").write_text("\n".join((tmp_path / "plan.jsonl").read_text().splitlines()[:-1]))
    with pytest.raises(LohaError, match=r"not a whole epoch plan .* makes one"):
        Plan.load(tmp_path / "cut.jsonl")


def test_plan_measured_by_processes_is_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acd.plan, "_CHUNK", 2)  # the corpus is smaller than what is worth processes
    corpus, student = Corpus(world.trajectories), read_student_config(world.student)
    config = world.config()
    assert make_plan(config, corpus, student, workers=2) == make_plan(config, corpus, student)


def test_plan_key_knows_what_matters(world: World, renderer: Renderer) -> None:
    corpus = Corpus(world.trajectories)
    key = plan_key(world.config(), corpus, renderer.fingerprint)
    same = world.config("elsewhere", optimizer={"lr_patch": 0.5}, run={"max_steps": 3, "checkpoint_every": 1})
    assert plan_key(same, corpus, renderer.fingerprint) == key
    for sections in ({"run": {"seed": 1}}, {"readback": {"share": 0.1}}, {"packing": {"attention_tokens": 9}}):
        assert plan_key(world.config(**sections), corpus, renderer.fingerprint) != key
    assert plan_key(world.config(), Corpus(world.trajectories, limit=3), renderer.fingerprint) != key


def test_over_long_trajectories_are_reported(world: World) -> None:
    corpus, student = Corpus(world.trajectories), read_student_config(world.student)
    longest = max(p.tokens for p in make_plan(world.config(), corpus, student).pieces())
    config = world.config(packing={"tokens_per_row": longest - 1, "tokens_per_step": 3 * (longest - 1)})
    plan = make_plan(config, corpus, student)
    (skipped,) = [s for s in plan.skipped if s.tokens == longest]
    assert skipped.reason == f"its longest view has {longest} tokens, a row {longest - 1}"
    with pytest.raises(LohaError, match=r"no trajectory of .* fits 10 tokens per row"):
        make_plan(world.config(packing={"tokens_per_row": 10, "tokens_per_step": 10}), corpus, student)
    assert limits(config).rows_per_step == 3


def test_corpus_errors_name_file_and_row(tmp_path: Path) -> None:
    line = make_trajectory(0).to_line()
    for text, message in (
        ("", "holds no trajectory"),
        (f"{line}\n{line}\n", "row 2: id 't000' is already used"),
        (f"{line}\n{line[:50]}", "row 2: not a canonical trajectory"),
        ('{"id": 5}', "row 1: id must be a non-empty string"),
    ):
        (tmp_path / "t.jsonl").write_text(text)
        with pytest.raises(LohaError, match=f"t.jsonl: .*{message}|t.jsonl: {message}"):
            Corpus(tmp_path / "t.jsonl")
    with pytest.raises(LohaError, match="no such trajectory file"):
        Corpus(tmp_path / "none.jsonl")


def test_what_user_data_can_break_is_named(world: World, renderer: Renderer) -> None:
    """A plan of other data, and views that do not pair."""
    corpus = Corpus(world.trajectories)
    views = ViewBuilder(renderer, view_rule(world.config()))
    (piece, *_) = views.pieces(corpus["t000"], 0)
    rows = RowBuilder(corpus, views, TargetSource())
    with pytest.raises(LohaError, match=r"trajectory 't000': its latent view has \d+ tokens, but 7 in the epoch plan"):
        rows.build((replace(piece, tokens=7),))
    with pytest.raises(LohaError, match=r"trajectory 't9': its views hold different assistant tokens \(2 and 1\)"):
        require_same_assistant("t9", [1, 2], (1,))
