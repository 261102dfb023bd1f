"""Laws of the miniature's generated trajectories."""

from __future__ import annotations

import json
import random
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from loha.layout import MIN_OBSERVATION_CHARS
from miniature import world
from miniature.words import KEYS, VALUES


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), pages=st.integers(1, 16))
def test_every_quote_is_a_line_of_the_observation_of_its_age_and_of_no_other(seed: int, pages: int) -> None:
    episode = world.make_episode(random.Random(seed), pages=pages)
    assert len(episode.pages) == len(episode.plan) == len(episode.ages) == len(episode.lines) == pages
    for step, (key, age, line) in enumerate(zip(episode.plan, episode.ages, episode.lines, strict=True), start=1):
        seen = episode.pages[:step]
        holders = [index for index, page in enumerate(seen) if line in page.split("\n")]
        assert holders == [step - 1 - age]
        assert line.split(" ")[0] == key
        assert sum(page.count(key) for page in episode.pages) == 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), pages=st.integers(1, 16))
def test_observations_are_long_enough_to_be_compressed(seed: int, pages: int) -> None:
    episode = world.make_episode(random.Random(seed), pages=pages)
    assert min(map(len, episode.pages)) >= MIN_OBSERVATION_CHARS


def test_a_quote_cannot_be_read_from_the_text_that_stays(rng_seed: int = 5) -> None:
    episode = world.make_episode(random.Random(rng_seed), pages=14)
    messages = world.messages_of(episode)
    for step, line in enumerate(episode.lines, start=1):
        before = messages[: 2 + 2 * step]
        kept = "\n".join(json.dumps(message) for message in before if message["role"] != "tool")
        assert line not in kept
        assert any(line in message["content"] for message in before if message["role"] == "tool")


def test_messages_alternate_and_quote_the_lines() -> None:
    episode = world.make_episode(random.Random(3), pages=4)
    messages = world.messages_of(episode)
    assert [message["role"] for message in messages] == ["system", "user"] + ["assistant", "tool"] * 5 + ["assistant"]
    said = [world.quoted_line(message) for message in messages if message["role"] == "assistant"]
    assert said == ["begin", *episode.lines, ""]
    assert [message["content"] for message in messages if message["role"] == "tool"] == [
        *episode.pages,
        world.LAST_OBSERVATION,
    ]
    assert messages[1]["content"].split("\n")[4] == f"step {episode.first + 4}:{episode.plan[3]}"


def test_ages_cover_the_whole_history() -> None:
    ages = [age for episode in world.episodes(1, count=200, pages=(14, 14)) for age in episode.ages]
    assert set(ages) == set(range(14))


def test_the_same_seed_gives_the_same_rows_and_another_seed_others() -> None:
    first, again, other = (list(world.coderforge_rows(seed, instances=3, runs=2)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_rows_have_coderforge_form_and_some_failed_runs() -> None:
    rows = list(world.coderforge_rows(4, instances=6, runs=3))
    assert [row["trajectory_id"].rsplit("_run", 1)[1] for row in rows[:3]] == ["1", "2", "3"]
    assert len({row["trajectory_id"] for row in rows}) == 18
    assert [row["reward"] for row in rows].count(-1.0) == 1
    assert [row["reward"] for row in rows].count(0.0) == 1
    messages = json.loads(rows[0]["messages"])
    assert messages[2]["tool_calls"][0]["function"]["arguments"] == {"line": messages[1]["content"].split("\n")[0]}
    assert set(messages[0]) == {"content", "function_call", "name", "role", "tool_call_id", "tool_calls"}
    assert json.loads(rows[0]["tools"]) == world.TOOLS
    lengths = {len(row["messages"]) for row in rows}
    assert len(lengths) > 1


def test_a_failed_run_quotes_a_wrong_line() -> None:
    row = next(row for row in world.coderforge_rows(4, instances=6, runs=3) if row["reward"] <= 0.0)
    messages = json.loads(row["messages"])
    pages = "\n".join(message["content"] for message in messages if message["role"] == "tool")
    said = [world.quoted_line(message) for message in messages if message["role"] == "assistant"]
    assert any(line not in pages for line in said[1:-1])


def test_quoted_line_survives_malformed_calls() -> None:
    broken = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "apply", "arguments": "{"}}]}
    assert world.quoted_line(broken) == ""
    assert world.quoted_line({"role": "assistant", "content": None}) == ""


def test_keys_and_values_are_distinct_words() -> None:
    assert len(set(KEYS)) == 128
    assert len(set(VALUES)) == 64
    assert not set(KEYS) & set(VALUES)


def test_the_command_writes_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    world.main(world.Options(out=path, seed=1, instances=2, runs=2, pages=(2, 3)))
    assert len(path.read_text().splitlines()) == 4
