"""Cut recorded trajectories down to short rows, for runs on a laptop.

Keeps the first turns and elides the middle of long messages, as scaffolds do with long tool output. The result is
still real text with real tool calls; it is no longer a whole trajectory, so use it to try things, not to train.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loha.cli import run_main
from loha.console import out
from loha.errors import LohaError
from loha.trajectory import Trajectory, read_trajectories, write_trajectories


@dataclass(frozen=True, kw_only=True)
class Options:
    trajectories: Path
    """Canonical JSONL (`loha data import`)."""

    out: Path
    """Canonical JSONL to write."""

    max_turns: int = 6
    """Assistant turns to keep."""

    max_chars: int = 500
    """Characters to keep of each message: its head and its tail."""

    max_assistant_chars: int | None = None
    """The same for assistant turns: their text, and each string of their calls' arguments. Default: the text as the
    other messages, arguments whole."""

    every: int = 1
    """Keep every Nth trajectory, starting with number `offset`."""

    offset: int = 0
    """Where to start."""


def main(options: Options) -> None:
    """Cut trajectories to a few turns with short messages."""
    for name in ("max_turns", "max_chars", "max_assistant_chars", "every"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise LohaError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    rows = list(read_trajectories(options.trajectories))[options.offset :: options.every]
    if not rows:
        raise LohaError(f"{options.trajectories}: no trajectory is left with --every {options.every}")
    write_trajectories(options.out, (shorten(row, options) for row in rows))
    out(f"{options.out}: {len(rows)} trajectories of up to {options.max_turns} turns")


def shorten(trajectory: Trajectory, options: Options) -> Trajectory:
    """Return the first turns of a trajectory with long messages elided."""
    messages: list[dict[str, Any]] = []
    turns = 0
    for message in trajectory.messages:
        turns += message["role"] == "assistant"
        messages.append(_shortened(message, options))
        if turns == options.max_turns:
            break
    seconds = trajectory.tool_seconds and trajectory.tool_seconds[:turns]  # one entry per turn that is left
    return dataclasses.replace(trajectory, messages=messages, tool_seconds=seconds)


def _shortened(message: dict[str, Any], options: Options) -> dict[str, Any]:
    limit = options.max_assistant_chars
    if message["role"] != "assistant" or limit is None:
        return {**message, "content": elide(message["content"], options.max_chars)}
    shorter = {**message, "content": elide(message["content"], limit)}
    if "tool_calls" in message:
        shorter["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _shorter(call["function"]["arguments"], limit)}}
            for call in message["tool_calls"]
        ]
    return shorter


def _shorter(arguments: str, limit: int) -> str:
    try:
        values = json.loads(arguments)
    except ValueError:
        return arguments
    if not isinstance(values, dict):
        return arguments
    short = {name: elide(value, limit) if isinstance(value, str) else value for name, value in values.items()}
    return json.dumps(short, ensure_ascii=False)


def elide(text: str, max_chars: int) -> str:
    """Return a text of about `max_chars` characters: head, a notice, tail."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters elided ...]\n{text[-half:]}"


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:], prog="scripts/shorten_trajectories.py"))
