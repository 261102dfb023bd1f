"""The two views of a trajectory as training examples: same assistant tokens, paired by identity.

The state before an assistant token predicts it, so a target at position t is read from state t - 1. Both views hold
the same assistant ids in the same order; that order, not the position, pairs them with each other and with the teacher.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from acd.packing import Piece, View
from acd.readback import Question, ReadBackRule, choose_questions
from loha.errors import LohaError
from loha.layout import Window
from loha.messages import normalize_messages
from loha.render import Renderer
from loha.rendering import Rendering
from loha.student import build_renderer
from loha.student_files import StudentConfig
from loha.trajectory import Trajectory

Region = tuple[int, tuple[int, ...]]
"""(position of the start marker, encoder ids of the body)."""


@dataclass(frozen=True)
class Example:
    """One view of one trajectory, ready to be packed."""

    token_ids: list[int]
    regions: list[Region]
    states: list[int]
    """Positions of the states that predict the assistant tokens."""
    assistant_ids: list[int]
    turn_lengths: tuple[int, ...]
    """Assistant tokens of each turn."""
    answer_states: list[int]
    """Positions of the states that predict read-back answers, in order of the questions."""
    answer_ids: list[int]
    questions: tuple[Question, ...] = ()
    answer_lengths: tuple[int, ...] = ()
    """Tokens of each answer, its end-of-turn token included."""

    @property
    def assistant_hash(self) -> str:
        """Identifies the assistant tokens, for the teacher cache."""
        return ids_hash(self.assistant_ids)


@dataclass(frozen=True, kw_only=True)
class ViewRule:
    """What decides the examples, besides the renderer."""

    latent_k: tuple[int, ...] = (0,)
    latent_share: float = 1.0
    full_share: float = 1.0
    readback: ReadBackRule = field(default_factory=ReadBackRule)
    seed: int = 0


class ViewBuilder:
    """Builds the examples of a trajectory. The same arguments give the same example on every machine.

    Args:
        renderer: the one renderer.
        rule: which views, windows and questions.
        student: lets another process make the same renderer again; without it the builder cannot be sent to one.
    """

    def __init__(self, renderer: Renderer, rule: ViewRule, *, student: StudentConfig | None = None) -> None:
        self._renderer: Renderer | None = renderer
        self.rule = rule
        self.student = student

    @property
    def renderer(self) -> Renderer:
        """The one renderer."""
        if self._renderer is None:
            assert self.student is not None, "a builder that is sent to another process needs its student's config"
            self._renderer = build_renderer(self.student)
        return self._renderer

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_renderer": None}

    def pieces(self, trajectory: Trajectory, epoch: int) -> list[Piece]:
        """Measure the views in which a trajectory trains in an epoch.

        Raises:
            LohaError: when its views do not hold the same assistant tokens; names the trajectory.
        """
        views: list[View] = ["latent", "full"]
        shares = {"latent": self.rule.latent_share, "full": self.rule.full_share}
        kept = [view for view in views if self._rng(trajectory.id, epoch, view).random() < shares[view]]
        k = self._rng(trajectory.id, epoch, "k").choice(self.rule.latent_k)
        pieces, examples = [], []
        for view in kept:
            piece = Piece(trajectory=trajectory.id, view=view, tokens=0, k=k if view == "latent" else None, epoch=epoch)
            example = self.build(trajectory, piece)
            examples.append(example)
            pieces.append(_measured(piece, example))
        for other in examples[1:]:
            require_same_assistant(trajectory.id, examples[0].assistant_ids, other.assistant_ids)
        return pieces

    def build(self, trajectory: Trajectory, piece: Piece) -> Example:
        """Return the example of one piece."""
        if piece.view == "full":
            return full_view(self.renderer, trajectory)
        return latent_view(
            self.renderer,
            trajectory,
            k=piece.k or 0,
            readback=self.rule.readback,
            seed=f"{self.rule.seed}/{piece.epoch}/{trajectory.id}",
        )

    def _rng(self, trajectory_id: str, epoch: int, purpose: str) -> random.Random:
        return random.Random(f"{purpose}/{self.rule.seed}/{epoch}/{trajectory_id}")


def full_view(renderer: Renderer, trajectory: Trajectory) -> Example:
    """Return a trajectory with every observation as text."""
    return example_of(_render(renderer, trajectory.messages, trajectory, view="full"))


def latent_view(
    renderer: Renderer, trajectory: Trajectory, *, k: int, readback: ReadBackRule | None = None, seed: str = ""
) -> Example:
    """Return a trajectory with all but its last `k` observations as latents, and read-back turns after it.

    Args:
        renderer: the one renderer.
        trajectory: as recorded.
        k: Hard-Last-K.
        readback: asks about observations that are latent; None asks nothing.
        seed: decides the questions.
    """
    window = Window(k=k)
    plain = _render(renderer, trajectory.messages, trajectory, window=window)
    if readback is None or readback.share == 0 or not plain.latents:
        return example_of(plain)
    questions = _questions(renderer, trajectory, plain, readback, seed)
    if not questions:
        return example_of(plain)
    asked = _render(renderer, [*trajectory.messages, *_turns(questions)], trajectory, window=window)
    # A template that rewrites earlier turns when a user turn follows would change what J sees: then nothing is asked.
    if asked.token_ids[: len(plain.token_ids)] != plain.token_ids or asked.latents != plain.latents:
        return example_of(plain)
    return example_of(asked, turns=len(plain.assistant_spans), questions=questions)


def ids_hash(ids: Sequence[int]) -> str:
    """Return a short hash of token ids."""
    return hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in ids)).hexdigest()[:16]


def require_same_assistant(trajectory_id: str, one: Sequence[int], other: Sequence[int]) -> None:
    """Check that two renderings of a trajectory hold the same assistant tokens, which pair them.

    Raises:
        LohaError: names the trajectory.
    """
    if list(one) != list(other):
        raise LohaError(
            f"trajectory {trajectory_id!r}: its views hold different assistant tokens ({len(one)} and {len(other)}); "
            "the chat template must render assistant turns independently of observations"
        )


def _questions(
    renderer: Renderer, trajectory: Trajectory, rendering: Rendering, rule: ReadBackRule, seed: str
) -> list[Question]:
    history = normalize_messages(trajectory.messages)
    found = renderer.rule.find(history)
    latent = {region.observation for region in rendering.latents}
    supervised = sum(span.end - span.start for span in rendering.assistant_spans)
    return choose_questions(
        {i: history[found[i]]["content"] for i in sorted(latent)},
        shown=[history[place]["content"] for i, place in enumerate(found) if i not in latent],
        visible=_visible_text(renderer, history, rendering),
        supervised=supervised,
        rule=rule,
        seed=seed,
        count_tokens=lambda answer: len(renderer.plain_ids(answer)) + 1,
    )


def _visible_text(renderer: Renderer, history: Sequence[Mapping[str, Any]], rendering: Rendering) -> str:
    """Return all that the decoder reads as text, and call arguments also as they are, since templates escape them."""
    latent = {t for region in rendering.latents for t in range(region.start, region.start + region.count + 2)}
    ids = [token for t, token in enumerate(rendering.token_ids) if t not in latent]
    calls = [call["function"]["arguments"] for message in history for call in message.get("tool_calls") or ()]
    return "\n".join([renderer.tokenizer.decode(ids, clean_up_tokenization_spaces=False), *_strings(calls)])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _turns(questions: Sequence[Question]) -> list[dict[str, Any]]:
    return [
        turn
        for question in questions
        for turn in ({"role": "user", "content": question.text}, {"role": "assistant", "content": question.answer})
    ]


def _render(renderer: Renderer, messages: Sequence[Any], trajectory: Trajectory, **options: Any) -> Rendering:
    try:
        rendering = renderer.render(messages, trajectory.tools, **options)
    except LohaError as error:
        raise LohaError(f"trajectory {trajectory.id!r}: {error}") from error
    if any(span.start == 0 for span in rendering.assistant_spans):
        raise LohaError(
            f"trajectory {trajectory.id!r}: it begins with an assistant turn and the chat template writes nothing "
            "before it, so that nothing predicts its first token; drop it or use another template"
        )
    return rendering


def example_of(rendering: Rendering, *, turns: int | None = None, questions: Sequence[Question] = ()) -> Example:
    """Turn a rendering into an example.

    Args:
        rendering: of a history.
        turns: assistant spans from this one on are read-back answers; None for none.
        questions: that they answer.
    """
    ids = rendering.token_ids
    spans = rendering.assistant_spans
    own, answers = spans[:turns], spans[turns:] if turns is not None else []
    assert len(answers) == len(questions), f"{len(questions)} questions have {len(answers)} answer spans"
    positions = [t for span in own for t in range(span.start, span.end)]
    answer_positions = [t for span in answers for t in range(span.start, span.end)]
    return Example(
        token_ids=ids,
        regions=[(latent.start, latent.encoder_ids) for latent in rendering.latents],
        states=[t - 1 for t in positions],
        assistant_ids=[ids[t] for t in positions],
        turn_lengths=tuple(span.end - span.start for span in own),
        answer_states=[t - 1 for t in answer_positions],
        answer_ids=[ids[t] for t in answer_positions],
        questions=tuple(questions),
        answer_lengths=tuple(span.end - span.start for span in answers),
    )


def _measured(piece: Piece, example: Example) -> Piece:
    return replace(
        piece,
        tokens=len(example.token_ids),
        positions=len(example.assistant_ids),
        answers=len(example.answer_ids),
    )
