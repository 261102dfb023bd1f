"""Find the observations of a history: tool results, and the user turns that text-mode agents use for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TEXT_MODE_MARKERS = (
    r"EXECUTION RESULT of \[",  # OpenHands without native calls
    r"(?:Exit code: [^\n]*\n)?Execution output of \[",  # R2E-Gym, SWE-Master
    r"OBSERVATION:",  # SWE-agent
    r"<returncode>",  # mini-swe-agent
    r"<output>",
    r"<tool_response>",  # Qwen-rendered dumps
)
_TOOL_NAME = re.compile(r"(?:Exit code: [^\n]*\n)?(?:EXECUTION RESULT|Execution output) of \[([^\]\n]{1,100})\]")


@dataclass(frozen=True, kw_only=True)
class ObservationRule:
    """What counts as an observation in one source of trajectories."""

    user_markers: tuple[str, ...] = TEXT_MODE_MARKERS
    """Regular expressions; a user turn after the first assistant turn that begins with one is an observation."""

    any_user_turn: bool = False
    """Every user turn after the first assistant turn is an observation (agents that know no other user turns)."""

    def find(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the indices of the messages that are observations, in order.

        Args:
            messages: normalized messages (`loha.messages.normalize_messages`).
        """
        pattern = re.compile("|".join(self.user_markers)) if self.user_markers else None
        found = []
        seen_assistant = False
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                seen_assistant = True
            elif message["role"] == "tool" or (
                message["role"] == "user" and seen_assistant and self._is_result(message["content"], pattern)
            ):
                found.append(index)
        return found

    def _is_result(self, content: str, pattern: re.Pattern[str] | None) -> bool:
        return self.any_user_turn or (pattern is not None and pattern.match(content) is not None)


def tool_names(messages: Sequence[Mapping[str, Any]], observations: Sequence[int]) -> list[str | None]:
    """Return the tool that produced each observation, where it can be known.

    Taken from the message's own name, else from the call with its id, else from a text-mode marker.

    Args:
        messages: normalized messages.
        observations: indices of the observations among them.
    """
    by_call_id = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
        if "id" in call
    }
    return [_tool_name(messages[index], by_call_id) for index in observations]


def _tool_name(message: Mapping[str, Any], by_call_id: Mapping[str, str]) -> str | None:
    if message.get("name"):
        return message["name"]
    if message.get("tool_call_id") in by_call_id:
        return by_call_id[message["tool_call_id"]]
    match = _TOOL_NAME.match(message["content"])
    return match.group(1) if match else None
