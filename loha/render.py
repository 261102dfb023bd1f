"""The renderer: a chat history to decoder ids, latent regions and assistant spans.

Teacher cache, training views, server, sweep and reference all call this one class, so that they see the same tokens.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import jinja2

from loha import standins
from loha.errors import LohaError, shown
from loha.layout import (
    LAYOUT_VERSION,
    MARKERS_PER_LATENT_OBSERVATION,
    MIN_OBSERVATION_CHARS,
    Window,
    latent_count,
)
from loha.messages import normalize_messages
from loha.observations import ObservationRule, tool_names
from loha.plain_text import PlainEncoder, tokenizer_hash
from loha.rendering import VIEWS, AssistantSpan, LatentObservation, LatentSettings, Rendering, Segment, View
from loha.sized_cache import SizedCache, ids_bytes
from loha.standins import StandIns
from loha.tools import normalize_tools

FULL_TEXT = Window(k=None)
CACHE_BYTES = 512 << 20
"""Holds about a hundred histories of 50K tokens."""
_MARK = re.compile(f"([{standins.MARKS}])")


class _Piece(NamedTuple):
    """Ids of the text between two control tokens, with the marks found in it: (mark, index into ids)."""

    ids: tuple[int, ...]
    marks: tuple[tuple[str, int], ...]

    def memory(self) -> int:
        """Return its size in bytes."""
        return ids_bytes(len(self.ids)) + 100 * len(self.marks)


@dataclass(frozen=True)
class _Body:
    """Where the body of one observation lies in the sequence."""

    start: int
    end: int
    latent: LatentObservation | None = None


@dataclass
class _Walk:
    """State while pieces are joined into one sequence."""

    ids: list[int] = field(default_factory=list)
    bodies: list[_Body] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    body_start: int = 0
    turn_start: int | None = None

    def note(self, mark: str) -> None:
        """Take note of a mark at the present end of the sequence."""
        if mark == standins.TURN_START:
            self.turn_start = len(self.ids)
        elif mark == standins.BODY_START:
            self.body_start = len(self.ids)
        elif mark == standins.BODY_END:
            self.bodies.append(_Body(self.body_start, len(self.ids)))

    def control(self, token: int, closes_turn: bool) -> None:
        """Append a control token."""
        self.ids.append(token)
        if closes_turn and self.turn_start is not None:
            self.turns.append((self.turn_start, len(self.ids)))
            self.turn_start = None

    def insert(self, observation: int, encoder_ids: tuple[int, ...], count: int, placeholder: int) -> None:
        """Append the positions of a latent observation."""
        start = len(self.ids)
        self.ids += [placeholder] * (count + MARKERS_PER_LATENT_OBSERVATION)
        self.bodies.append(_Body(start, len(self.ids), LatentObservation(observation, encoder_ids, count, start)))


class Renderer:
    """Renders histories with one tokenizer and one chat template.

    Args:
        tokenizer: the base's fast tokenizer, with its chat template.
        encoder_tokenizer: the encoder's fast tokenizer; the same tokenizer when left out.
        settings: compression ratio and encoder window.
        chat_template: replaces the tokenizer's own.
        placeholder_id: decoder id that fills latent positions; the padding token by default, which no text yields.
        rule: what counts as an observation.
        cache_bytes: most memory for what repeats from call to call: pieces of text and their ids.

    Raises:
        LohaError: when the tokenizer or template cannot be rendered piecewise.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        encoder_tokenizer: Any = None,
        settings: LatentSettings | None = None,
        chat_template: str | None = None,
        placeholder_id: int | None = None,
        rule: ObservationRule | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.tokenizer = tokenizer
        self.settings = settings or LatentSettings()
        self.rule = rule or ObservationRule()
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        if not isinstance(self.chat_template, str):
            raise LohaError(
                "the tokenizer has no chat template: add chat_template.jinja beside tokenizer.json or pass one"
            )
        self._plain = PlainEncoder(tokenizer)
        self._standins = StandIns(self._plain.added, cache_bytes=cache_bytes // 8)
        self.placeholder_id = _placeholder(tokenizer) if placeholder_id is None else placeholder_id
        self.encoder_tokenizer = encoder_tokenizer if encoder_tokenizer is not None else tokenizer
        shared = encoder_tokenizer is None or tokenizer_hash(encoder_tokenizer) == tokenizer_hash(tokenizer)
        encoder_plain = self._plain if shared else PlainEncoder(encoder_tokenizer)
        # Observations and pieces repeat from call to call.
        self._encoder_ids: Callable[[str], tuple[int, ...]] = SizedCache(
            lambda body: tuple(encoder_plain(body)), max_bytes=cache_bytes // 4, size=lambda ids: ids_bytes(len(ids))
        )
        self._body_tokens: Callable[[str], int] = (
            (lambda body: len(self._encoder_ids(body)))
            if shared
            else SizedCache(lambda body: len(self._plain(body)), max_bytes=cache_bytes // 8, size=lambda _: 0)
        )
        self._piece: Callable[[str], _Piece] = SizedCache(
            self._encode_piece, max_bytes=cache_bytes // 2, size=_Piece.memory
        )
        self._turn_header, self._turn_end = self._probe()

    # -- public ---------------------------------------------------------------------------------------------

    def plain_ids(self, text: str) -> list[int]:
        """Return decoder ids of untrusted text: never a control token."""
        return self._plain(text)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        window: Window = FULL_TEXT,
        view: View = "latent",
        add_generation_prompt: bool = False,
        keep_tools: frozenset[str] = frozenset(),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendering:
        """Render a history.

        Args:
            messages: chat messages in any form that `normalize_messages` takes.
            tools: tool definitions in any form that `normalize_tools` takes.
            window: which observations stay text.
            view: what becomes of the others: latents, SWE-agent's placeholder text, or nothing (full text).
            add_generation_prompt: end with the header of the next assistant turn.
            keep_tools: names of tools whose observations always stay text.
            template_kwargs: further variables for the chat template; text in them is data, as in messages.

        Raises:
            LohaError: for messages that are no chat history, tools that are no definitions, or a template that does not
                render the messages one by one.
        """
        if view not in VIEWS:
            raise LohaError(f"view must be one of {', '.join(VIEWS)}, got {shown(view)}")
        history = normalize_messages(messages)
        found = self.rule.find(history)
        old = [] if view == "full" else self._old(history, found, window, keep_tools)
        options = {
            "tools": self._standins.swap_all(normalize_tools(tools)),
            "add_generation_prompt": add_generation_prompt,
            # Requests may set any variable, and a template may print it.
            **{name: self._standins.swap_all(value) for name, value in (template_kwargs or {}).items()},
        }
        body = {message: self._mark(history[message]["content"]) for message in found}
        left = [found[i] for i in old]
        rendered = self._template(history, {**body, **dict.fromkeys(left, standins.LATENT)}, options)
        if self._verbatim:
            full = _fill(rendered, [body[message] for message in left])
        else:
            full = self._template(history, body, options)
        if view == "mask":
            rendered = _fill(rendered, [self._mark(_masked(history[message]["content"])) for message in left])
        latents = [(i, history[found[i]]["content"]) for i in old] if view == "latent" else []
        walk = self._walk(rendered, latents)
        _check(walk, history, found)
        return Rendering(
            token_ids=walk.ids,
            segments=_segments(walk),
            assistant_spans=[AssistantSpan(turn, *span) for turn, span in enumerate(walk.turns)],
            latents=[body.latent for body in walk.bodies if body.latent],
            observations=len(found),
            full_text_tokens=self._length(full) if old else len(walk.ids),
        )

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """What must agree between the parts of the system for their token ids to mean the same."""
        return {
            "layout_version": LAYOUT_VERSION,
            "tokenizer": tokenizer_hash(self.tokenizer),
            "encoder_tokenizer": tokenizer_hash(self.encoder_tokenizer),
            "chat_template": hashlib.sha256(str(self.chat_template).encode()).hexdigest(),
            "ratio": self.settings.ratio,
            "window": self.settings.window,
        }

    # -- decisions ------------------------------------------------------------------------------------------

    def _old(
        self, history: list[dict[str, Any]], found: list[int], window: Window, keep_tools: frozenset[str]
    ) -> list[int]:
        """Return the observations (indices into `found`) that do not stay text."""
        leading = window.leading_old(len(found))
        names = tool_names(history, found) if keep_tools else [None] * len(found)
        return [
            i for i in range(leading) if names[i] not in keep_tools and self._compressible(history[found[i]]["content"])
        ]

    def _compressible(self, body: str) -> bool:
        if len(body) < MIN_OBSERVATION_CHARS:
            return False
        count = self._count(self._encoder_ids(body))
        # Never worse: latents that are no shorter than the text would only lose information.
        return count > 0 and count + MARKERS_PER_LATENT_OBSERVATION < self._body_tokens(body)

    # -- template -------------------------------------------------------------------------------------------

    def _template(self, history: list[dict[str, Any]], bodies: Mapping[int, str], options: Mapping[str, Any]) -> str:
        """Return template output with stand-ins for untrusted literals and marks where turns and bodies begin.

        Args:
            history: normalized messages.
            bodies: what to put in the place of each observation's content, by message index.
            options: variables of the template.
        """
        safe = [self._protect(message, bodies.get(index)) for index, message in enumerate(history)]
        rendered = self._apply(safe, **options)
        return rendered.replace(self._turn_header, self._turn_header + standins.TURN_START)

    def _apply(self, messages: list[dict[str, Any]], **options: Any) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, chat_template=self.chat_template, **options
            )
        except jinja2.TemplateSyntaxError as error:
            raise LohaError(f"the chat template is not valid, line {error.lineno}: {error.message}") from error
        except jinja2.TemplateError as error:
            raise LohaError(f"the chat template rejects these messages: {error}") from error
        except RecursionError:
            raise LohaError("call arguments or tool definitions are nested too deeply") from None

    def _protect(self, message: dict[str, Any], body: str | None) -> dict[str, Any]:
        """Return the message with its untrusted text made safe, its content replaced by `body` if there is one."""
        safe = {key: self._standins.swap_all(value) for key, value in message.items() if key != "content"}
        if body is None:
            body = self._standins.swap(message["content"], message["role"] == "assistant")
        return {**safe, "content": body}

    def _mark(self, content: str) -> str:
        """Return an observation's content made safe, with marks around its body.

        The marks go inside the outer white space, so that a template that trims contents still trims it.
        """
        core = content.strip()
        lead, trail = content[: len(content) - len(content.lstrip())], content[len(content.rstrip()) :]
        marked = standins.BODY_START + self._standins.swap(core) + standins.BODY_END
        return lead + marked + (trail if core else "")

    def _length(self, rendered: str) -> int:
        """Return the number of ids that template output without latents becomes."""
        return sum(1 if trusted else len(self._piece(piece).ids) for piece, trusted in self._standins.split(rendered))

    def _walk(self, rendered: str, latents: Sequence[tuple[int, str]] = ()) -> _Walk:
        """Join the pieces of template output into ids.

        Args:
            rendered: template output with stand-ins and marks.
            latents: (observation, body) of each latent mark, in order.
        """
        walk = _Walk()
        waiting = iter(latents)
        for piece, trusted in self._standins.split(rendered):
            if trusted:
                walk.control(self._plain.added[piece], piece == self._turn_end)
                continue
            ids, marks = self._piece(piece)
            done = 0
            for mark, index in marks:
                walk.ids += ids[done:index]
                done = index
                walk.note(mark)
                if mark == standins.LATENT and (latent := next(waiting, None)):
                    encoder_ids = self._encoder_ids(latent[1])
                    walk.insert(latent[0], encoder_ids, self._count(encoder_ids), self.placeholder_id)
            walk.ids += ids[done:]
        return walk

    def _encode_piece(self, piece: str) -> _Piece:
        """Encode the text between two control tokens.

        A latent body splits it: the text before and after is encoded on its own. Other marks only note where a
        token begins, since text that is all text must be encoded as one.
        """
        ids: list[int] = []
        marks: list[tuple[str, int]] = []
        for number, part in enumerate(piece.split(standins.LATENT)):
            if number:
                marks.append((standins.LATENT, len(ids)))
            text, noted = self._take_marks(part)
            if not noted:
                ids += self._plain(text)
                continue
            part_ids, starts = self._plain.with_starts(text)
            marks += [(mark, len(ids) + bisect_left(starts, char)) for mark, char in noted]
            ids += part_ids
        return _Piece(tuple(ids), tuple(marks))

    def _take_marks(self, part: str) -> tuple[str, list[tuple[str, int]]]:
        """Return the restored text without marks, and each mark with the character it stood before."""
        text = ""
        noted = []
        for chunk in _MARK.split(part):
            if len(chunk) == 1 and chunk in standins.MARKS:
                noted.append((chunk, len(text)))
            else:
                text += self._standins.restore(chunk)
        return text, noted

    def _count(self, encoder_ids: Sequence[int]) -> int:
        return latent_count(len(encoder_ids), ratio=self.settings.ratio, window=self.settings.window)

    def _probe(self) -> tuple[str, str]:
        """Return the text that opens an assistant turn and the control token that closes it."""
        user, answer = (
            {"role": "user", "content": "probe"},
            {"role": "assistant", "content": "\U000f0f0fanswer"},
        )
        before, both = self._apply([user]), self._apply([user, answer])
        if not both.startswith(before):
            raise LohaError("the chat template rewrites earlier turns: a turn must render the same in every history")
        header, _, rest = both[len(before) :].partition(answer["content"])
        closing = [piece for piece, trusted in self._standins.split(rest) if trusted]
        opening = [piece for piece, trusted in self._standins.split(header) if trusted]
        if not opening or not closing:
            raise LohaError("the chat template does not open and close an assistant turn with special tokens")
        self._turn_end = closing[0]
        padded = {"role": "tool", "content": "\n padded \n"}
        self._verbatim = self._apply([user, answer, padded]).count(padded["content"]) == 1
        whole = self.tokenizer(both, add_special_tokens=False)["input_ids"]
        pieces = self._walk(both).ids
        if whole != pieces:
            raise LohaError(
                "the tokenizer encodes text next to a special token differently, so it cannot be rendered piecewise "
                f"({len(whole)} tokens at once, {len(pieces)} in pieces)"
            )
        return header, closing[0]


def _check(walk: _Walk, history: list[dict[str, Any]], found: list[int]) -> None:
    if len(walk.bodies) != len(found):
        raise LohaError(
            f"the chat template renders {len(walk.bodies)} of {len(found)} observations: it drops or repeats tool "
            "results, so it cannot carry latent observations"
        )
    turns = sum(message["role"] == "assistant" for message in history)
    if len(walk.turns) != turns:
        raise LohaError(f"the chat template renders {len(walk.turns)} of {turns} assistant turns, each must be kept")


def _fill(rendered: str, bodies: Sequence[str]) -> str:
    """Return template output with each latent mark replaced by the next body."""
    parts = rendered.split(standins.LATENT)
    # A template that drops or repeats a body is refused later, by name; here only the count must not matter.
    return "".join(part + body for part, body in zip_longest(parts, bodies, fillvalue=""))


def _masked(content: str) -> str:
    """Return SWE-agent's placeholder for an old observation."""
    return f"Old environment output: ({len(content.splitlines())} lines omitted)"


def _segments(walk: _Walk) -> list[Segment]:
    """Return the runs of text and latents that cover the sequence."""
    segments: list[Segment] = []
    end = 0
    for index, body in enumerate(walk.bodies):
        if body.start > end:
            segments.append(Segment("text", end, body.start - end, None, body.start - end))
        length = body.end - body.start
        if body.latent:
            segments.append(Segment("latent", body.start, length, index, len(body.latent.encoder_ids)))
        elif length:
            segments.append(Segment("text", body.start, length, index, length))
        end = body.end
    if len(walk.ids) > end:
        segments.append(Segment("text", end, len(walk.ids) - end, None, len(walk.ids) - end))
    return segments


def _placeholder(tokenizer: Any) -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    return 0
