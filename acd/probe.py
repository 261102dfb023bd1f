"""The tool-call probe: greedy replies at recorded positions, do they parse as calls, and do edits quote their file.

A reply is generated from the history before an assistant turn that was recorded with a call. An edit quotes exactly
when its `old_str` stands word for word in an observation of that history, line numbers of file views aside: what an
agent that edits must do, and what a student that reads latents may fail at first.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from loha.layout import Window
from loha.render import Renderer
from loha.rendering import View
from loha.student import Student
from loha.trajectory import Trajectory

_JSON_CALL = re.compile(r"<tool_call>\s*(\{.*?)</tool_call>", re.DOTALL)  # Qwen-Coder puts its tags in <tool_call> too
_TAG_CALL = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_TAG_ARGUMENT = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_LINE_NUMBER = re.compile(r"^ *\d+(?:\t|: ?|\| ?)", re.MULTILINE)


@dataclass(frozen=True)
class Call:
    """A tool call that a reply makes."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def quote(self) -> str | None:
        """What an edit claims to find in its file; None for other calls."""
        old = self.arguments.get("old_str")
        return old if isinstance(old, str) and old else None


@dataclass(frozen=True, kw_only=True)
class ProbeRule:
    """What is probed."""

    turns: int = 4
    """Turns of each trajectory: recorded edits first, then others at random."""
    max_new_tokens: int = 256
    ks: tuple[int | None, ...] = (0, None)


@dataclass
class ProbeCounts:
    """Sums over replies, so that ranks can be added up."""

    asked: int = 0
    calls: int = 0
    """Replies that parse as a call."""
    same_tool: int = 0
    """Calls of the recorded tool."""
    edits: int = 0
    """Calls with an `old_str`."""
    exact_quotes: int = 0
    """Edits whose `old_str` stands in an observation word for word."""

    def add(self, other: ProbeCounts) -> None:
        """Add another sum to this one."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def report(self) -> dict[str, Any]:
        """Return counts and shares."""
        return {
            "asked": self.asked,
            "parses": self.calls / max(1, self.asked),
            "same_tool": self.same_tool / max(1, self.asked),
            "edits": self.edits,
            "exact_quotes": self.exact_quotes / self.edits if self.edits else None,
        }


def parse_call(text: str) -> Call | None:
    """Return the first call of a reply; None when there is none or it is malformed.

    Knows `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen) and
    `<function=NAME><parameter=KEY>VALUE</parameter></function>` (OpenHands, Qwen-Coder).
    """
    tagged, found = _TAG_CALL.search(text), _JSON_CALL.search(text)
    # The arguments of a JSON call may quote a tagged one, and the other way round: the outer one begins first.
    if found and (not tagged or found.start() < tagged.start()):
        return _json_call(found[1])
    return Call(tagged[1], dict(_TAG_ARGUMENT.findall(tagged[2]))) if tagged else None


def _json_call(text: str) -> Call | None:
    try:
        values = json.loads(text)
        arguments = values["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return Call(values["name"], arguments) if isinstance(arguments, dict) and values["name"] else None
    except (ValueError, KeyError, TypeError):
        return None


def recorded_call(message: Mapping[str, Any]) -> Call | None:
    """Return the first call of a recorded assistant turn, None when it has none."""
    if not message.get("tool_calls"):
        return parse_call(message.get("content") or "")
    function = message["tool_calls"][0]["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return None
    return Call(function["name"], arguments) if isinstance(arguments, dict) else None


def probed_turns(trajectory: Trajectory, rule: ProbeRule) -> list[tuple[int, Call]]:
    """Return (index of the message, recorded call) of the turns to probe, in order; the same for every student."""
    calls = [(i, recorded_call(m)) for i, m in enumerate(trajectory.messages) if m["role"] == "assistant" and i > 0]
    found = [(i, call) for i, call in calls if call is not None]
    random.Random(f"probe/{trajectory.id}").shuffle(found)
    found.sort(key=lambda item: item[1].quote is None)
    return sorted(found[: rule.turns], key=lambda item: item[0])


def quotes_exactly(quote: str, observations: Sequence[str]) -> bool:
    """Return whether a text stands in an observation word for word, line numbers of file views aside."""
    return any(quote in body or quote in _LINE_NUMBER.sub("", body) for body in observations)


@torch.no_grad()
def probe(
    student: Student, renderer: Renderer, trajectory: Trajectory, rule: ProbeRule, *, window: Window, view: View
) -> ProbeCounts:
    """Return what the student's greedy replies to the probed turns of a trajectory are.

    Args:
        student: on its device; its patch is as the caller left it.
        renderer: the one renderer.
        trajectory: as recorded.
        rule: how many turns, and how long a reply.
        window: of the histories.
        view: what becomes of observations outside it.
    """
    counts = ProbeCounts()
    for index, recorded in probed_turns(trajectory, rule):
        history = trajectory.messages[:index]
        rendering = renderer.render(history, trajectory.tools, window=window, view=view, add_generation_prompt=True)
        reply = _greedy(student, renderer, rendering, rule.max_new_tokens)
        call = parse_call(reply)
        counts.asked += 1
        if call is None:
            continue
        counts.calls += 1
        counts.same_tool += call.name == recorded.name
        if call.quote is not None:
            counts.edits += 1
            bodies = [history[i]["content"] for i in renderer.rule.find(history)]
            counts.exact_quotes += quotes_exactly(call.quote, bodies)
    return counts


def _greedy(student: Student, renderer: Renderer, rendering: Any, max_new_tokens: int) -> str:
    device = student.markers.device
    ids_T = torch.tensor(rendering.token_ids, device=device)
    regions = [(region.start, torch.tensor(region.encoder_ids, device=device)) for region in rendering.latents]
    embeds_TD = student.input_embeds(ids_T, regions)
    stop = frozenset([renderer.tokenizer.eos_token_id])
    new_ids = student.greedy(embeds_TD, max_new_tokens=max_new_tokens, stop_ids=stop)
    return renderer.tokenizer.decode(new_ids, skip_special_tokens=False)
