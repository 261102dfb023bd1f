"""Read-back questions: literal, unambiguous, distinct, seeded, and about as many as asked for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from acd.readback import Question, ReadBackRule, candidates, choose_questions
from tests.acd_world import make_body

BODIES = {
    0: "src/app/main.py: 3 matches\nTIMEOUT = 3000\nred green blue\nred green grey\n",
    1: "src/lib/util.py\nTIMEOUT = 3000\nname: value one\nred yellow\n",
}


def ask(
    bodies: dict[int, str], *, share: float = 0.5, seed: str = "s", visible: str = "", supervised: int = 200
) -> list[Question]:
    rule = ReadBackRule(share=share)
    return choose_questions(
        bodies, visible=visible, supervised=supervised, rule=rule, seed=seed, count_tokens=lambda a: len(a.split()) + 1
    )


def test_candidates_by_eye() -> None:
    """`red` begins three different lines and `red green` two, so neither is a cue. The same answer in two observations
    is no ambiguity; the newest counts. Of several cues for one answer the shortest is kept."""
    found = {(q.kind, q.cue, q.answer, q.observation) for q in candidates(BODIES, ReadBackRule())}
    assert found == {
        ("path", "main.py", "src/app/main.py", 0),
        ("path", "util.py", "src/lib/util.py", 1),
        ("line", "src/app/main.py:", "src/app/main.py: 3 matches", 0),
        ("line", "TIMEOUT", "TIMEOUT = 3000", 1),
        ("line", "name:", "name: value one", 1),
        ("value", "TIMEOUT", "3000", 1),
        ("value", "name", "value one", 1),
    }


def test_ambiguous_cues_are_not_asked() -> None:
    bodies = {0: "port = 8080x\nhost alpha beta", 1: "port = 9090x\nhost alpha gamma"}
    cues = {(q.kind, q.cue) for q in candidates(bodies, ReadBackRule())}
    assert ("value", "port") not in cues and ("line", "host alpha") not in cues


@pytest.mark.parametrize(
    ("kind", "cue", "body", "shown"),
    [
        ("line", "return x", "return x\nreturn x + 1", ""),  # a whole line that begins another
        ("line", "foo", "foo one", "foobar"),
        ("path", "a.py", "src/a.py", "lib/data.py"),
        ("value", "port", "port = 8080", "the port was taken"),
        ("value", "n", "n = n + 1", ""),
    ],
)
def test_a_cue_fits_one_answer_at_its_word(kind: str, cue: str, body: str, shown: str) -> None:
    def cues(*texts: str) -> set[tuple[str, str]]:
        rule = ReadBackRule(share=0.9, kinds=(kind,))  # type: ignore[arg-type]
        asked = choose_questions(
            {0: body}, shown=texts, visible="", supervised=1000, rule=rule, seed="s", count_tokens=len
        )
        return {(q.kind, q.cue) for q in asked}

    assert (kind, cue) not in cues(shown)
    assert {(q.kind, q.cue) for q in candidates({0: body}, ReadBackRule(kinds=(kind,)))}  # type: ignore[arg-type]
    assert not shown or (kind, cue) in cues()


def test_answers_that_are_visible_as_text_are_not_asked() -> None:
    assert any(q.answer == "src/app/main.py" for q in ask(BODIES, supervised=10_000))
    assert not any(q.answer == "src/app/main.py" for q in ask(BODIES, supervised=10_000, visible="see src/app/main.py"))


def test_same_seed_same_questions() -> None:
    bodies = {i: make_body(random.Random(i), i) for i in range(6)}
    assert ask(bodies, seed="a") == ask(bodies, seed="a")
    assert ask(bodies, seed="a") != ask(bodies, seed="b")


def test_wording_can_be_replaced() -> None:
    rule = ReadBackRule(kinds=("path",), templates={"path": "{cue}?{x}"})
    assert {q.text for q in candidates(BODIES, rule)} == {"main.py?{x}", "util.py?{x}"}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(alphabet="ab/.=: \n\tZ9_-", min_size=0, max_size=120), min_size=1, max_size=5), st.integers(0, 99)
)
def test_question_laws(texts: list[str], seed: int) -> None:
    bodies = dict(enumerate(texts))
    questions = ask(bodies, seed=str(seed), supervised=500)
    assert len({q.answer for q in questions}) == len(questions)
    for question in questions:
        assert question.answer in bodies[question.observation]
        assert question.cue in bodies[question.observation]
        assert question.cue in question.text
        assert question.answer == question.answer.strip() and "\n" not in question.answer


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1])
def test_share_is_kept_on_average(share: float) -> None:
    supervised, answers = 0, 0
    for number in range(100):
        bodies = {i: make_body(random.Random(number * 10 + i), i) for i in range(6)}
        questions = ask(bodies, share=share, seed=str(number), supervised=100)
        supervised += 100
        answers += sum(len(q.answer.split()) + 1 for q in questions)
    assert answers / (answers + supervised) == pytest.approx(share, rel=0.25)


def test_no_share_no_questions() -> None:
    assert ask(BODIES, share=0.0) == []
