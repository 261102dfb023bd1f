"""A tag in the texts of one replayed run, so that no cache of the server carries over from another run.

A replay sends the same recorded run many times: once per arm and round, and side by side to fill the concurrency. Real
agents share their system prompt and nothing else. The tag goes into the task and into every observation that can
become latent, which makes prefix cache, encoder cache and rendered pieces start cold, on any server, while the system
prompt stays shared. It has the same number of tokens in every run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from loha.layout import MIN_OBSERVATION_CHARS
from loha.observations import TEXT_MODE_MARKERS, ObservationRule

_MARKER = re.compile("|".join(TEXT_MODE_MARKERS))
_LONG_LINE = 200


def run_tag(start: float, sequence: int) -> str:
    """Return the tag of one run.

    Args:
        start: seconds since the epoch at which this benchmark started.
        sequence: number of the run within it.
    """
    return f"[{int(start) % 10**8:08d} {sequence:06d}]"


def tag_messages(messages: Sequence[Mapping[str, Any]], tag: str) -> list[dict[str, Any]]:
    """Return the messages with the tag in the task and in every observation of at least 128 characters.

    Args:
        messages: canonical.
        tag: of the run.
    """
    tagged = [dict(message) for message in messages]
    task = next((index for index, message in enumerate(tagged) if message["role"] == "user"), None)
    found = ObservationRule().find(messages)
    for index in {*found, *([] if task is None else [task])}:
        content = tagged[index]["content"]
        if index == task or len(content) >= MIN_OBSERVATION_CHARS:
            tagged[index]["content"] = _insert(content, tag)
    return tagged


def _insert(content: str, tag: str) -> str:
    """Return the text with the tag on a line of its own near the start, behind what marks an observation."""
    marker = _MARKER.match(content)
    start = marker.end() if marker else 0
    line_end = content.find("\n", start, start + _LONG_LINE)
    at = line_end if line_end >= 0 else min(len(content), start + _LONG_LINE)
    return f"{content[:at]}\n{tag}{content[at:]}"
