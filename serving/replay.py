"""Replay one recorded run against an endpoint, as its agent would call it, and time every call."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from loha.errors import LohaError
from serving.endpoint import Endpoint, error_text
from serving.load_arm import LoadArm
from serving.reply_plan import PlannedRun
from serving.run_tag import tag_messages

_RETRIES = 2


@dataclass(frozen=True, kw_only=True)
class TimedCall:
    """One call, as the agent saw it."""

    first_token_s: float
    """From sending the request to the first token."""
    seconds: float
    """To the last."""
    usage: dict[str, Any]
    """As the server reports it, with its `loha` object."""

    @property
    def per_token_s(self) -> float | None:
        """Return the mean time between tokens after the first; None for a reply of one token."""
        gaps = self.usage["completion_tokens"] - 1
        return (self.seconds - self.first_token_s) / gaps if gaps > 0 else None


@dataclass(frozen=True, kw_only=True)
class ReplayedRun:
    """One finished run."""

    arm: str
    round: int
    trajectory: str
    copy: int
    """0, 1, ...: a trajectory is replayed several times side by side when there are fewer than the concurrency."""
    seconds: float
    """From the first request to the last token, waits for tools included."""
    calls: list[TimedCall]

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What identifies the run in its benchmark."""
        return self.arm, self.round, self.trajectory, self.copy

    def to_line(self) -> str:
        """Return the run as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> ReplayedRun:
        """Read what `to_line` wrote.

        Raises:
            ValueError, TypeError, KeyError: for anything else, such as a line that was cut.
        """
        row = json.loads(line)
        return cls(**{**row, "calls": [TimedCall(**call) for call in row["calls"]]})


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Which run is to be replayed."""

    planned: PlannedRun
    arm: LoadArm
    round: int
    copy: int
    tag: str

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What identifies the run in its benchmark."""
        return self.arm.name, self.round, self.planned.trajectory.id, self.copy


async def replay_run(
    endpoint: Endpoint,
    model: str,
    request: RunRequest,
    *,
    tool_time: str,
    calls: int | None = None,
    done: Callable[[], object] = lambda: None,
) -> ReplayedRun:
    """Make the calls of a run one after the other: the history grows by the recorded turns, not by the replies.

    Args:
        endpoint: the arm's server.
        model: served model.
        request: which run.
        tool_time: wait between calls: none, recorded, or a number of seconds.
        calls: stop after so many.
        done: called after each call.

    Raises:
        LohaError: when the server refuses, fails, or replies with another length; names run, turn and arm.
    """
    planned = request.planned
    messages = tag_messages(planned.trajectory.messages, request.tag)
    waits = planned.waits(tool_time)
    timed: list[TimedCall] = []
    start = time.perf_counter()
    for number, (index, tokens) in enumerate(list(zip(planned.indices, planned.replies, strict=True))[:calls]):
        if number:
            await asyncio.sleep(waits[number - 1])
        body = _body(request, model, messages[:index], tokens)
        where = f"trajectory {planned.trajectory.id}, call {number + 1}, arm {request.arm.name}"
        timed.append(await _call(endpoint, body, where))
        done()
    return ReplayedRun(
        arm=request.arm.name,
        round=request.round,
        trajectory=planned.trajectory.id,
        copy=request.copy,
        seconds=time.perf_counter() - start,
        calls=timed,
    )


def _body(request: RunRequest, model: str, history: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": history,
        "temperature": 0.0,
        "max_tokens": tokens,
        "min_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.arm.layout is not None:
        body["loha"] = request.arm.layout.request()
    if request.planned.trajectory.tools:
        # The tools are part of the prompt; what a random reply looks like to a tool parser is of no interest.
        body |= {"tools": request.planned.trajectory.tools, "tool_choice": "none"}
    return body


async def _call(endpoint: Endpoint, body: Mapping[str, Any], where: str) -> TimedCall:
    content = json.dumps(body).encode()
    for attempt in range(_RETRIES + 1):
        stream = _Stream()
        try:
            call = await stream.read(endpoint, content, where)
        except httpx.TransportError as error:
            # Only a connection that broke before anything came may be tried again: the rest would be timed wrongly.
            if attempt == _RETRIES or stream.started:
                raise LohaError(
                    f"{where}: no answer from {endpoint.base_url} ({type(error).__name__}: {error}); is the server up? "
                    "Start again with the same --out to go on from the finished runs"
                ) from error
            continue
        expected, got = body["max_tokens"], call.usage["completion_tokens"]
        if got != expected:
            raise LohaError(
                f"{where}: the reply has {got} tokens, expected {expected}; the server must support ignore_eos and "
                "min_tokens, as vLLM does"
            )
        return call
    raise AssertionError("unreachable")


class _Stream:
    """Reads one streamed reply and notes when its tokens came."""

    def __init__(self) -> None:
        self.started = False
        self._first: float | None = None
        self._last = 0.0
        self._usage: dict[str, Any] | None = None

    async def read(self, endpoint: Endpoint, content: bytes, where: str) -> TimedCall:
        """Send the request and read the reply to its end."""
        url = f"{endpoint.base_url}/chat/completions"
        start = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        async with endpoint.client.stream("POST", url, content=content, headers=headers) as response:
            if response.status_code != 200:
                await response.aread()
                raise LohaError(f"{where}: {url} answered HTTP {response.status_code}: {error_text(response)}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self.started = True
                    self._take(json.loads(line[6:]), where)
        if self._first is None or self._usage is None:
            raise LohaError(f"{where}: the reply ended without tokens or without usage; its stream was cut off")
        return TimedCall(first_token_s=self._first - start, seconds=self._last - start, usage=self._usage)

    def _take(self, chunk: Mapping[str, Any], where: str) -> None:
        now = time.perf_counter()
        if "error" in chunk:
            raise LohaError(f"{where}: the server failed in the middle of the reply: {chunk['error']}")
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            # The first chunk says only who speaks.
            if self._first is None and ("role" not in delta or delta.get("content")):
                self._first = now
            self._last = now
