"""One cell of a sweep: the reply to one recorded history under one arm, compared with the recorded turn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from loha.errors import LohaError
from loha.trajectory import Trajectory
from serving.arm import Arm
from serving.endpoint import error_text

_RETRIES = 2


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What came of one request."""

    trajectory: str
    turn: int
    """0-based index among the assistant turns."""
    arm: str
    exact: bool = False
    """Text and calls equal the recorded turn."""
    content_equal: bool = False
    calls_equal: bool = False
    context_tokens: int = 0
    full_text_tokens: int = 0
    latent_tokens: int = 0
    encoder_tokens: int = 0
    """Encoder tokens behind the latents of this context, whether encoded now or before."""
    cached_tokens: int | None = None
    completion_tokens: int = 0
    reply: str = ""
    """Text of the reply, calls as JSON after it."""
    error: str | None = None
    """The server's refusal; then nothing above counts."""

    @property
    def key(self) -> tuple[str, int, str]:
        """What identifies the cell in its sweep."""
        return self.trajectory, self.turn, self.arm

    def to_line(self) -> str:
        """Return the cell as one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=True)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A recorded assistant turn and the history before it."""

    trajectory: Trajectory
    turn: int
    index: int
    """Of the turn among the messages."""

    @property
    def recorded(self) -> Mapping[str, Any]:
        """The recorded turn."""
        return self.trajectory.messages[self.index]

    def body(self, arm: Arm, model: str, max_tokens: int) -> dict[str, Any]:
        """Return the request."""
        body: dict[str, Any] = {
            "model": model,
            "messages": self.trajectory.messages[: self.index],
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "loha": arm.request(),
        }
        if self.trajectory.tools:
            body["tools"] = self.trajectory.tools
        return body


def questions(trajectory: Trajectory, turns: str) -> list[Question]:
    """Return the turns of a trajectory that a sweep asks for.

    Args:
        trajectory: canonical.
        turns: `last`, `all` or `every:N` (the last turn and each N-th before it).

    Raises:
        LohaError: for another word.
    """
    indices = [i for i, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
    found = [Question(trajectory=trajectory, turn=turn, index=index) for turn, index in enumerate(indices) if index > 0]
    return sorted(found[::-1][:: turn_step(turns)][: 1 if turns == "last" else None], key=lambda q: q.turn)


def turn_step(turns: str) -> int:
    """Return N of `every:N`; 1 for `last` and `all`.

    Raises:
        LohaError: for another word.
    """
    if turns in ("last", "all"):
        return 1
    word, _, number = turns.partition(":")
    if word != "every" or not number.isdecimal() or int(number) < 1:
        raise LohaError(f"--turns must be last, all or every:N, got {turns!r}")
    return int(number)


async def ask(client: httpx.AsyncClient, question: Question, arm: Arm, *, model: str, max_tokens: int) -> Cell:
    """Send one request and compare the reply.

    Raises:
        LohaError: when the server cannot be reached or fails; names trajectory and turn.
    """
    where = f"trajectory {question.trajectory.id}, turn {question.turn}, arm {arm.name}"
    response = await _post(client, question.body(arm, model, max_tokens), where)
    cell: dict[str, Any] = {"trajectory": question.trajectory.id, "turn": question.turn, "arm": arm.name}
    if response.status_code >= 500:
        raise LohaError(f"{where}: the server failed with HTTP {response.status_code}: {error_text(response)}")
    if response.status_code != 200:
        return Cell(**cell, error=f"HTTP {response.status_code}: {error_text(response)}")
    answer = response.json()
    reply = answer["choices"][0]["message"]
    content, calls = turn_text(reply), turn_calls(reply)
    content_equal = content == turn_text(question.recorded)
    calls_equal = calls == turn_calls(question.recorded)
    return Cell(
        **cell,
        exact=content_equal and calls_equal,
        content_equal=content_equal,
        calls_equal=calls_equal,
        completion_tokens=answer["usage"]["completion_tokens"],
        reply=content + (json.dumps(calls) if calls else ""),
        **_counts(answer["usage"]),
    )


def turn_text(message: Mapping[str, Any]) -> str:
    """Return the text of a turn without outer white space, which tool parsers treat differently."""
    return (message.get("content") or "").strip()


def turn_calls(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (name, parsed arguments) of the calls of a turn, in order."""
    return [
        (call["function"]["name"], _arguments(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    ]


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


def _counts(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return the token counts; a server without the plugin reads its whole prompt as text."""
    account = usage.get("loha") or {}
    prompt = usage["prompt_tokens"]
    details = usage.get("prompt_tokens_details") or {}
    return {
        "context_tokens": account.get("context_tokens", prompt),
        "full_text_tokens": account.get("full_text_tokens", prompt),
        "latent_tokens": account.get("latent_tokens", 0),
        "encoder_tokens": account.get("encoder_tokens", 0),
        "cached_tokens": account.get("cached_tokens", details.get("cached_tokens")),
    }


async def _post(client: httpx.AsyncClient, body: dict[str, Any], where: str) -> httpx.Response:
    for attempt in range(_RETRIES + 1):
        try:
            return await client.post("chat/completions", json=body)
        except httpx.TransportError as error:
            if attempt == _RETRIES:
                name = type(error).__name__
                raise LohaError(
                    f"{where}: no answer from {client.base_url} ({name}: {error}); is the server up?"
                ) from error
    raise AssertionError("unreachable")
