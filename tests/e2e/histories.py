"""Histories that the end-to-end tests send: an agent's, one observation longer at each step."""

from __future__ import annotations

from typing import Any

from tiny_checkpoint import text

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


def call(step: int = 0) -> list[dict[str, Any]]:
    """Return the calls of one assistant turn, as clients send them."""
    return [{"id": f"call{step}", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}]


def growing(steps: int, *, seed: int) -> list[list[dict[str, Any]]]:
    """Return the history of each step; all observations are distinct and of different lengths."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text(seed, 5)},
        {"role": "user", "content": text(seed + 1, 15)},
    ]
    histories = []
    for step in range(steps):
        messages = [
            *messages,
            {"role": "assistant", "content": text(seed + 100 + step, 6), "tool_calls": call(step)},
            {"role": "tool", "tool_call_id": f"call{step}", "content": text(seed + 200 + step, 40 + 23 * step)},
        ]
        histories.append(messages)
    return histories


def one_observation(body: Any) -> list[dict[str, Any]]:
    """Return a history whose only observation is `body`."""
    return [
        {"role": "user", "content": "task"},
        {"role": "assistant", "content": "", "tool_calls": call()},
        {"role": "tool", "tool_call_id": "call0", "content": body},
    ]
