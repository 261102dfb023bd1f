"""Generated tool trajectories whose every reply must quote a value from an observation of random age.

The agent is given a plan: an ordered list of keys. Each page that the tool shows holds a few lines
`key value value`. At step t the agent calls `apply` with the plan's step and the line that holds its key,
exactly as an earlier page showed it; the tool answers with the next page, or after the last step with a
short note, on which the agent ends. A reply is therefore a deterministic function of the history, and a
greedy reply can be checked for equality.

Command line: ``python -m miniature.world --seed 7 --instances 40 --runs 4 --out rows.jsonl`` writes rows in
CoderForge's form (messages and tools as JSON strings, call arguments as dicts).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miniature.words import KEYS, VALUES

LINES_PER_PAGE = 4
LAST_START = 15
SYSTEM = "Apply each line of the plan as the pages show it."
FIRST_LINE = "begin"
LAST_OBSERVATION = "end of the plan"
LAST_REPLY = "end"
TOOL_NAME = "apply"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": "Apply a line, show the next page",
            "parameters": {
                "type": "object",
                "properties": {"line": {"type": "string"}},
                "required": ["line"],
            },
        },
    }
]


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One task and its only right solution.

    Attributes:
        first: number of the opening step. It is random, so that the agent has to read what step comes next and
            cannot count positions (an agent that counts fails as soon as some observations are shorter).
        pages: the observations, oldest first; each `LINES_PER_PAGE` lines `key value value`.
        plan: the key to quote at step 1, 2, ...; `plan[t - 1]` is on one of `pages[:t]`.
        ages: `ages[t - 1]` = how many observations are newer than the one that holds `plan[t - 1]`.
        lines: the full line to quote at each step.
    """

    first: int
    pages: list[str]
    plan: list[str]
    ages: list[int]
    lines: list[str]


def draw_pages(rng: random.Random, count: int) -> list[str]:
    """Return `count` independent pages."""
    return ["\n".join(_draw_lines(rng, LINES_PER_PAGE)) for _ in range(count)]


def _draw_lines(rng: random.Random, count: int) -> list[str]:
    """Return lines with distinct keys and distinct first values; second values may repeat."""
    keys, firsts = rng.sample(KEYS, count), rng.sample(VALUES, count)
    return [f"{key} {first} {rng.choice(VALUES)}" for key, first in zip(keys, firsts, strict=True)]


def make_episode(rng: random.Random, *, pages: int) -> Episode:
    """Draw a task with `pages` pages (at most 16) and as many steps; ages are uniform over what was seen."""
    lines_of_all = _draw_lines(rng, pages * LINES_PER_PAGE)
    rows = [lines_of_all[page::pages] for page in range(pages)]
    unused = [list(row) for row in rows]
    plan: list[str] = []
    ages: list[int] = []
    lines: list[str] = []
    for step in range(1, pages + 1):
        page = rng.choice([index for index in range(step) if unused[index]])
        line = unused[page].pop(rng.randrange(len(unused[page])))
        plan.append(line.split(" ", 1)[0])
        ages.append(step - 1 - page)
        lines.append(line)
    return Episode(
        first=rng.randrange(LAST_START + 1), pages=["\n".join(row) for row in rows], plan=plan, ages=ages, lines=lines
    )


def plan_text(episode: Episode) -> str:
    """Return the user message: one plan line per step."""
    lines = enumerate([FIRST_LINE, *episode.plan], start=episode.first)
    return "\n".join(f"step {number}:{key}" for number, key in lines)


def messages_of(episode: Episode, lines: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the episode as OpenAI chat messages.

    Args:
        episode: the task.
        lines: what the agent quotes at each step; default the right lines.
    """
    said = [FIRST_LINE, *(episode.lines if lines is None else lines)]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": plan_text(episode)},
    ]
    for step, (line, page) in enumerate(
        zip(said, [*episode.pages, LAST_OBSERVATION], strict=True), start=episode.first
    ):
        messages += _exchange(step, line, page)
    return [*messages, {"role": "assistant", "content": LAST_REPLY}]


def _exchange(step: int, line: str, page: str) -> list[dict[str, Any]]:
    call_id = f"call_{step:024x}"
    function = {"name": TOOL_NAME, "arguments": json.dumps({"line": f"step {step}:{line}"})}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
        {"role": "tool", "content": page, "name": TOOL_NAME, "tool_call_id": call_id},
    ]


def quoted_line(message: dict[str, Any]) -> str:
    """Return the line that an assistant message quotes in its call, without the step; "" if none."""
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        try:
            loaded = json.loads(arguments) if isinstance(arguments, str) else arguments
        except json.JSONDecodeError:
            return ""
        return str(loaded.get("line", "")).partition(":")[2] if isinstance(loaded, dict) else ""
    return ""


def spoil(episode: Episode, rng: random.Random) -> list[str]:
    """Return quotes of a run that failed: from some step on, values that no page shows beside the key."""
    start = rng.randrange(len(episode.lines))
    wrong = [f"{key} {rng.choice(VALUES)} {rng.choice(VALUES)}" for key in episode.plan]
    return episode.lines[:start] + wrong[start:]


def episodes(seed: int, *, count: int, pages: tuple[int, int]) -> Iterator[Episode]:
    """Yield `count` episodes whose number of observations is uniform in the closed range `pages`."""
    rng = random.Random(f"episodes-{seed}")
    for _ in range(count):
        yield make_episode(rng, pages=rng.randint(*pages))


def coderforge_rows(
    seed: int, *, instances: int, runs: int, pages: tuple[int, int] = (12, 16)
) -> Iterator[dict[str, Any]]:
    """Yield rows as CoderForge stores them: `runs` runs per instance, of different lengths.

    The last run of every third instance failed (reward 0.0, wrong quotes) and one row of the whole set has
    the undocumented reward -1.0. The other runs of an instance see other pages and are all right.
    """
    rng = random.Random(f"rows-{seed}")
    for instance in range(instances):
        task = f"miniature__plan-{seed}-{instance:04d}"
        for run in range(runs):
            episode = make_episode(rng, pages=rng.randint(*pages))
            failed = runs > 1 and run == runs - 1 and instance % 3 == 0
            broken = failed and instance == 0
            lines = spoil(episode, rng) if failed else None
            yield {
                "trajectory_id": f"{task}_run{run + 1}",
                "finish_reason": "stop",
                "image": "none",
                "messages": json.dumps([_coderforge_message(message) for message in messages_of(episode, lines)]),
                "reward": -1.0 if broken else 0.0 if failed else 1.0,
                "tools": json.dumps(TOOLS),
                "license": "Apache-2.0",
            }


def _coderforge_message(message: dict[str, Any]) -> dict[str, Any]:
    """Give a message all of CoderForge's keys and its arguments as a dict."""
    full = {key: message.get(key) for key in ("content", "function_call", "name", "role", "tool_call_id", "tool_calls")}
    if full["tool_calls"]:
        full["tool_calls"] = [
            {
                **call,
                "index": None,
                "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])},
            }
            for call in full["tool_calls"]
        ]
    return full


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of ``python -m miniature.world``."""

    out: Path
    """JSONL file to write, rows in CoderForge's form."""
    seed: int = 0
    """Seed of the generator; the same seed gives the same file."""
    instances: int = 40
    """Number of tasks."""
    runs: int = 2
    """Recorded runs per task."""
    pages: tuple[int, int] = (12, 16)
    """Fewest and most observations per run."""


def main(options: Options) -> int:
    """Write generated trajectories in CoderForge's form."""
    from loha.atomic import atomic_path
    from loha.console import out

    count = 0
    with atomic_path(options.out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for row in coderforge_rows(options.seed, instances=options.instances, runs=options.runs, pages=options.pages):
            file.write(json.dumps(row) + "\n")
            count += 1
    out(f"{count} rows of {options.instances} instances -> {options.out}")
    return 0


if __name__ == "__main__":
    import sys

    from loha.cli import run_main

    sys.exit(run_main(main, sys.argv[1:], prog="python -m miniature.world"))
