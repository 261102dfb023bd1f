"""Read-back questions: ask for a literal span of an observation, so that latents must carry exact text. Pure Python.

A question names a cue (the first words of a line, the name of a file, the name of a value) and its answer is a
substring of an observation. A cue is used only when every place where it occurs in observations gives that answer.

Source: the ACD paper asks for substrings of observations at about 3 % of supervised positions; its question list is
not public, so kinds and wording are ours.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["line", "path", "value"]

_PATH = re.compile(r"(?<![\w./-])/?(?:[\w.@+-]+/)+[\w.@+-]*\w")
_VALUE = re.compile(r"^\s*[\"']?([A-Za-z_][\w.-]*)[\"']?\s*(?:[:=]|\s)\s*(\S.*?)\s*$")
_CUE_WORDS = 8
_MIN_ANSWER_CHARS = 3


class Question(NamedTuple):
    """One read-back question."""

    kind: Kind
    cue: str
    answer: str
    """A substring of the observation's body."""

    observation: int
    """0-based index of the newest observation that holds the answer."""

    text: str
    """The user turn that asks it."""


@dataclass(frozen=True, kw_only=True)
class ReadBackRule:
    """What is asked, and how much of it."""

    share: float = 0.03
    """Answer tokens as a share of all supervised positions."""

    kinds: tuple[Kind, ...] = ("line", "path", "value")
    templates: Mapping[str, str] = field(
        default_factory=lambda: {
            "line": "From the tool output above, quote exactly the line that begins with: {cue}",
            "path": "From the tool output above, quote exactly the full path that ends with: {cue}",
            "value": "From the tool output above, quote exactly what stands after: {cue}",
        }
    )
    max_answer_chars: int = 160


def choose_questions(
    bodies: Mapping[int, str],
    *,
    shown: Sequence[str] = (),
    visible: str,
    supervised: int,
    rule: ReadBackRule,
    seed: str,
    count_tokens: Callable[[str], int],
) -> list[Question]:
    """Return the questions for one trajectory.

    Args:
        bodies: observations that the decoder reads as latents, by index.
        shown: observations that it reads as text: a cue must not fit them either.
        visible: all text that the decoder reads as text; an answer found there tests nothing and is not asked for.
        supervised: assistant positions of the trajectory; `rule.share` is taken of these and the answers together.
        rule: kinds, wording and share.
        seed: decides which questions; the same seed gives the same questions.
        count_tokens: tokens of an answer turn, its end-of-turn token included.

    Returns:
        Questions with distinct cues and answers, in the order in which they are asked. Their expected number of
        answer tokens is the share asked for, as far as the observations hold enough candidates.
    """
    budget = supervised * rule.share / (1 - rule.share)
    rng = random.Random(f"read-back/{seed}")
    chosen: list[Question] = []
    answers: set[str] = set()
    observations = [*bodies.values(), *shown]
    for question in _shuffled(candidates(bodies, rule), rng):
        if budget <= 0:
            break
        if question.answer in answers or question.answer in visible or _is_ambiguous(question, observations):
            continue
        cost = count_tokens(question.answer)
        # The last question is asked with the chance that makes the expected share exact.
        if cost <= budget or rng.random() < budget / cost:
            chosen.append(question)
            answers.add(question.answer)
        budget -= cost
    return chosen


def candidates(bodies: Mapping[int, str], rule: ReadBackRule) -> list[Question]:
    """Return every question about these observations whose cue, as `_spans` cuts them, has one answer; fixed order."""
    found: dict[tuple[Kind, str], dict[str, int]] = defaultdict(dict)
    for index, body in bodies.items():
        for kind, cue, answer in _spans(body):
            found[kind, cue][answer] = index
    questions = [
        Question(kind, cue, answer, index, rule.templates[kind].replace("{cue}", cue))
        for (kind, cue), places in found.items()
        if kind in rule.kinds and len(places) == 1
        for answer, index in places.items()
        if _MIN_ANSWER_CHARS <= len(answer) <= rule.max_answer_chars
    ]
    return _one_per_answer(questions)


def _is_ambiguous(question: Question, observations: Iterable[str]) -> bool:
    """Return whether the question, taken at its word, has another answer anywhere in the observations.

    `candidates` compares whole words and lines of one kind; `red` also begins `reddish`, and a name may stand in prose.
    Asked of chosen questions only, for it reads all the text.
    """
    cue, found = question.cue, set[str | None]()
    name = re.compile(rf"(?<![\w.-]){re.escape(cue)}(?![\w.-])")
    for body in observations:
        if cue not in body:
            continue
        if question.kind == "path":
            found |= {match.group() for match in _PATH.finditer(body) if match.group().endswith(cue)}
            continue
        for line in body.splitlines():
            if question.kind == "line":
                found |= {line.strip()} if line.strip().startswith(cue) else set()
            elif occurrences := len(name.findall(line)):
                value = _VALUE.match(line)
                found.add(value.group(2) if value and value.group(1) == cue and occurrences == 1 else None)
    return found != {question.answer}


def _spans(body: str) -> Iterator[tuple[Kind, str, str]]:
    """Yield (kind, cue, answer) of every span that could be asked for, ambiguous ones included."""
    for match in _PATH.finditer(body):
        path = match.group()
        yield "path", path.rsplit("/", 1)[1], path
    for line in body.splitlines():
        words = line.split()
        line = line.strip()
        value = _VALUE.match(line)
        if value:
            yield "value", value.group(1), value.group(2)
        for cue in _prefixes(line, words):
            yield "line", cue, line


def _prefixes(line: str, words: Sequence[str]) -> Iterator[str]:
    """Yield the beginnings of a line by whole words, short of the line itself."""
    end = 0
    for word in words[: min(_CUE_WORDS, len(words) - 1)]:
        end = line.index(word, end) + len(word)
        yield line[:end]


def _one_per_answer(questions: list[Question]) -> list[Question]:
    """Keep the shortest cue of each (kind, answer)."""
    best: dict[tuple[Kind, str], Question] = {}
    for question in questions:
        known = best.get((question.kind, question.answer))
        if known is None or len(question.cue) < len(known.cue):
            best[question.kind, question.answer] = question
    return list(best.values())


def _shuffled(questions: list[Question], rng: random.Random) -> Iterator[Question]:
    """Yield questions in random order, every kind as likely as the others while it lasts."""
    by_kind: dict[Kind, list[Question]] = defaultdict(list)
    for question in questions:
        by_kind[question.kind].append(question)
    for group in by_kind.values():
        rng.shuffle(group)
    while by_kind:
        kind = rng.choice(sorted(by_kind))
        yield by_kind[kind].pop()
        if not by_kind[kind]:
            del by_kind[kind]
