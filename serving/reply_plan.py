"""What a replay will ask: which calls of each recorded run fit the context, and how many tokens each reply had.

Lengths come from the server's own tokenizer and chat template (`/tokenize`), before anything is measured. Calls whose
full text does not fit the context are left out of every arm, so that all arms do the same work.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loha.atomic import atomic_path
from loha.errors import LohaError
from loha.progress import note, progress_bar
from loha.trajectory import Trajectory
from serving.endpoint import Endpoint
from serving.run_tag import run_tag, tag_messages

_SPACE_SIGNS = str.maketrans({"Ġ": " ", "Ċ": "\n", "▁": " ", "ĉ": "\t"})
_OPENING = {"role": "user", "content": "x"}


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The calls of one recorded run that a replay makes."""

    trajectory: Trajectory
    replies: tuple[int, ...]
    """Tokens of the reply of each call, in order; the end-of-turn token counts."""

    @property
    def indices(self) -> list[int]:
        """Where the replies stand among the messages."""
        return call_indices(self.trajectory)[: len(self.replies)]

    def waits(self, tool_time: str) -> list[float]:
        """Return how long the agent's tools take after each call, in seconds.

        Args:
            tool_time: none, recorded, or a number of seconds.
        """
        turns = [turn for turn, index in _turns(self.trajectory) if index > 0]
        if tool_time != "recorded":
            seconds = 0.0 if tool_time == "none" else float(tool_time)
            return [seconds] * len(self.replies)
        recorded = self.trajectory.tool_seconds or [None] * self.trajectory.assistant_turns
        return [recorded[turn] or 0.0 for turn in turns[: len(self.replies)]]


def call_indices(trajectory: Trajectory) -> list[int]:
    """Return the messages that the agent's model wrote with a history before them."""
    return [index for _, index in _turns(trajectory) if index > 0]


async def plan_runs(
    endpoint: Endpoint, model: str, trajectories: Sequence[Trajectory], *, max_model_len: int | None, concurrency: int
) -> list[PlannedRun]:
    """Return the runs of a replay; notes on standard error what was cut.

    Args:
        endpoint: the server with the plugin.
        model: served model.
        trajectories: recorded.
        max_model_len: longest context with the reply that every arm's server takes; None where unknown.
        concurrency: requests at a time.

    Raises:
        LohaError: when the server cannot tokenize, or no call fits.
    """
    free = asyncio.Semaphore(concurrency)
    header = await _header(endpoint, model)
    with progress_bar("token counts", total=sum(len(call_indices(t)) for t in trajectories), unit="turn") as bar:

        async def one(trajectory: Trajectory) -> PlannedRun:
            async with free:
                try:
                    replies = [
                        await _reply_tokens(endpoint, model, trajectory.messages[index], header)
                        for index in call_indices(trajectory)
                    ]
                    count = await _calls_that_fit(endpoint, model, trajectory, replies, max_model_len)
                except LohaError as error:
                    raise LohaError(f"trajectory {trajectory.id}: {error}") from error
                bar.update(len(replies))
                return PlannedRun(trajectory=trajectory, replies=tuple(replies[:count]))

        tasks = [asyncio.ensure_future(one(trajectory)) for trajectory in trajectories]
        try:
            planned = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    for run in planned:
        _note_cut(run, max_model_len)
    runs = [run for run in planned if run.replies]
    if not runs:
        raise LohaError(
            f"no call of {len(planned)} trajectories fits {max_model_len} positions as full text; "
            "serve with a larger --max-model-len or take shorter trajectories"
        )
    return runs


def write_plan(path: Path, runs: Sequence[PlannedRun]) -> None:
    """Keep the lengths for a run that goes on later."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps({run.trajectory.id: run.replies for run in runs}) + "\n", encoding="utf-8")


def read_plan(path: Path, trajectories: Sequence[Trajectory]) -> list[PlannedRun] | None:
    """Return the runs of an earlier plan, or None when there is none."""
    if not path.is_file():
        return None
    lengths = json.loads(path.read_text(encoding="utf-8"))
    return [PlannedRun(trajectory=t, replies=tuple(lengths[t.id])) for t in trajectories if t.id in lengths]


def _turns(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Return (assistant turn, index among the messages)."""
    indices = [index for index, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
    return list(enumerate(indices))


async def _header(endpoint: Endpoint, model: str) -> list[int]:
    return (await endpoint.tokenize(model, [_OPENING], add_generation_prompt=True))["tokens"]


async def _reply_tokens(endpoint: Endpoint, model: str, turn: dict[str, Any], header: list[int]) -> int:
    """Return how many tokens a model generates to write this turn.

    The turn is rendered alone behind a short opening: what the template puts before it is the generation prompt, and
    white space after its end-of-turn token belongs to the next turn.
    """
    answer = await endpoint.tokenize(model, [_OPENING, turn], add_generation_prompt=False, return_token_strs=True)
    texts = answer.get("token_strs") or []
    end = len(answer["tokens"])
    while end > len(header) + 1 and len(texts) >= end and not texts[end - 1].translate(_SPACE_SIGNS).strip():
        end -= 1
    return max(1, end - len(header))


async def _calls_that_fit(
    endpoint: Endpoint, model: str, trajectory: Trajectory, replies: Sequence[int], limit: int | None
) -> int:
    """Return how many leading calls fit as full text; contexts only grow, so halving finds it."""
    if limit is None:
        return len(replies)
    messages = tag_messages(trajectory.messages, run_tag(0, 0))
    indices = call_indices(trajectory)

    async def fits(call: int) -> bool:
        more = {"tools": trajectory.tools} if trajectory.tools else {}
        answer = await endpoint.tokenize(model, messages[: indices[call]], add_generation_prompt=True, **more)
        return answer["count"] + replies[call] <= limit

    low, high = 0, len(replies)
    probe = high - 1
    while low < high:
        if await fits(probe):
            low = probe + 1
        else:
            high = probe
        probe = (low + high) // 2
    return low


def _note_cut(run: PlannedRun, limit: int | None) -> None:
    recorded = len(call_indices(run.trajectory))
    if len(run.replies) < recorded:
        note(
            f"trajectory {run.trajectory.id}: the first {len(run.replies)} of {recorded} calls are replayed; "
            f"the others do not fit {limit} positions as full text"
        )
