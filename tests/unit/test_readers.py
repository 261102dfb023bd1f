"""Each format's rows become the canonical form; what is no agent run is refused with a reason."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loha.errors import LohaError
from loha.readers import READERS, BadRow, ExcludedRow, RowContext, by_name, detect, read_row
from loha.readers.chat import canonical_messages
from loha.readers.coderforge import instance_of
from loha.trajectory import Trajectory, check_messages

TOOLS = [{"type": "function", "function": {"name": "execute_bash", "parameters": {"type": "object"}}}]


def context(file: str = "rows.jsonl", row: int = 1) -> RowContext:
    return RowContext(file=Path(file), row=row)


def coderforge_row(**changes: Any) -> dict[str, Any]:
    blank = dict.fromkeys(["content", "function_call", "name", "role", "tool_call_id", "tool_calls"])
    calls = [
        {
            "id": f"call_{i}",
            "type": "function",
            "index": None,
            "function": {"name": "execute_bash", "arguments": {"n": i}},
        }
        for i in range(2)
    ]
    messages = [
        {**blank, "role": "system", "content": "s"},
        {**blank, "role": "user", "content": "fix"},
        {**blank, "role": "assistant", "tool_calls": calls},
        {**blank, "role": "tool", "content": "second", "name": "execute_bash", "tool_call_id": "call_1"},
        {**blank, "role": "tool", "content": "first", "name": "execute_bash", "tool_call_id": "call_0"},
        {**blank, "role": "assistant", "content": "end", "tool_calls": [{**calls[0], "id": "call_9"}]},
    ]
    row = {
        "trajectory_id": "0b01001001__spectree-64_run2",
        "finish_reason": "tool_calls",
        "image": "docker",
        "messages": json.dumps(messages),
        "reward": 1.0,
        "tools": json.dumps(TOOLS),
        "license": "Apache-2.0",
    }
    return {**row, **changes}


def swe_master_run() -> dict[str, Any]:
    return {
        "trajectory_steps": [
            {
                "thought": "<think>look</think>",
                "action": "<function=execute_bash>",
                "observation": "a.py",
                "done": False,
            },
            {"thought": "", "action": "<function=submit>", "observation": "<<< Finished >>>", "done": True},
        ],
        "problem_statement": "It uses {working_dir} wrongly",
        "agent_args": {"system_prompt": "be {good}", "instance_prompt": "In {working_dir}: {problem_statement} Go."},
        "ds": {"instance_id": "owner__repo-7", "license_name": "MIT License"},
        "exp_name": "run_1",
        "reward": 1.0,
    }


def mini_run() -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    return {
        "info": {"mini_version": "2.4.6", "exit_status": "Submitted", "submission": ""},
        "trajectory_format": "mini-swe-agent-1.1",
        "instance_id": "owner__repo-8",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "fix"},
            {"role": "assistant", "content": None, "tool_calls": [call], "extra": {"cost": 1.0}},
            {"role": "tool", "content": "<returncode>0</returncode>", "tool_call_id": "c", "extra": {"raw_output": ""}},
            {"role": "assistant", "content": "bye", "tool_calls": None, "function_call": None, "extra": {}},
            {"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}},
        ],
    }


def openhands_call(turns: int = 2, *, native: bool = True) -> dict[str, Any]:
    """What OpenHands logs for the call that follows `turns` assistant turns."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": [{"type": "text", "text": "fix"}, {"type": "text", "text": "it"}]},
    ]
    for turn in range(turns):
        if native:
            call = {"id": f"c{turn}", "type": "function", "function": {"name": "execute_bash", "arguments": "{}"}}
            messages.append({"role": "assistant", "content": [], "tool_calls": [call]})
            body = [{"type": "text", "text": f"out {turn}"}]
            messages.append({"role": "tool", "content": body, "tool_call_id": f"c{turn}", "name": "execute_bash"})
        else:
            messages.append({"role": "assistant", "content": "<function=execute_bash>\n</function>"})
            messages.append({"role": "user", "content": f"EXECUTION RESULT of [execute_bash]:\nout {turn}"})
    answer = "bye" if native else "<function=finish>\n<parameter=message>bye</parameter>\n"
    return {
        "messages": messages,
        "response": {"choices": [{"message": {"role": "assistant", "content": answer, "tool_calls": None}}]},
        "args": [],
        "kwargs": {"temperature": 0.0, **({"tools": TOOLS} if native else {})},
        "timestamp": 100.0 + turns,
        "cost": 0,
    }


def chat(*pairs: str, **extra: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": role[0]} for role in pairs], **extra}


EXAMPLES: dict[str, dict[str, Any]] = {
    "coderforge": coderforge_row(),
    "swe-master-run": swe_master_run(),
    "swe-master-sft": {"input": chat("system", "system", "user", "assistant", "tool", "assistant")["messages"]},
    "mini-swe-agent": mini_run(),
    "openhands": openhands_call(),
    "openai-chat": chat("user", "assistant", tools=TOOLS),
}


def test_every_format_has_an_example():
    assert sorted(EXAMPLES) == sorted(reader.name for reader in READERS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_detected_from_its_keys_and_readable_by_name(name: str):
    row = EXAMPLES[name]
    assert detect(row).name == name
    assert read_row(row, context()) == read_row(row, context(), by_name(name))
    assert read_row(row, context()).source == name


def test_coderforge():
    got = read_row(coderforge_row(), context())
    assert (got.id, got.instance_id) == ("0b01001001__spectree-64_run2", "0b01001001__spectree-64")
    assert (got.resolved, got.licence, got.tools) == (True, "Apache-2.0", TOOLS)
    assert got.messages[2] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call_{i}", "type": "function", "function": {"name": "execute_bash", "arguments": f'{{"n": {i}}}'}}
            for i in range(2)
        ],
    }
    assert got.messages[3] == {"role": "tool", "content": "second", "name": "execute_bash", "tool_call_id": "call_1"}
    assert set(got.messages[0]) == {"role", "content"}


@pytest.mark.parametrize(("reward", "resolved"), [(1.0, True), (1, True), (0.0, False), (0.5, False)])
def test_coderforge_success_is_reward_one(reward: float, resolved: bool):
    assert read_row(coderforge_row(reward=reward), context()).resolved is resolved


def test_coderforge_minus_one_is_left_out_not_bad():
    with pytest.raises(ExcludedRow, match="reward -1"):
        read_row(coderforge_row(reward=-1.0), context())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reward": None}, "no reward"),
        ({"reward": float("nan")}, "no reward"),
        ({"messages": "[{"}, "messages is not JSON"),
        ({"messages": "[]"}, "empty trajectory"),
        ({"messages": "{}"}, "no messages"),
        ({"messages": None}, "no messages"),
        ({"tools": "[{"}, "tools is not JSON"),
        ({"trajectory_id": None}, "no trajectory_id"),
    ],
)
def test_coderforge_bad_rows(changes: dict[str, Any], reason: str):
    with pytest.raises(BadRow) as bad:
        read_row(coderforge_row(**changes), context())
    assert bad.value.reason == reason


def test_coderforge_tokenised_rows_are_told_apart():
    row = {"trajectory_id": "a_run1", "reward": 1.0, "chat_template_applied": "x", "input_ids": [1]}
    with pytest.raises(BadRow, match="config `trajectories`"):
        read_row(row, context())


@pytest.mark.parametrize(
    ("trajectory_id", "instance"),
    [
        ("0b01001001__spectree-64_run2", "0b01001001__spectree-64"),
        ("a__b-1_incomplete_20250917_101502", "a__b-1"),
        ("a__b-1_incomplete_20250917_101502_run13", "a__b-1"),
        ("a__b-1_run13_incomplete_20250917_101502", "a__b-1"),
        ("a__b-1_run2_run3", "a__b-1_run2"),
        ("a__b-1_incomplete_2025_101502", "a__b-1_incomplete_2025_101502"),
        ("a__run2_b-1", "a__run2_b-1"),
        ("_run2", "_run2"),
    ],
)
def test_instance_of_examples(trajectory_id: str, instance: str):
    assert instance_of(trajectory_id) == instance


INSTANCE = st.from_regex(r"[A-Za-z0-9_.]{1,12}__[a-z.]{1,12}-[0-9]{1,4}", fullmatch=True)


@settings(deadline=None, max_examples=60)
@given(
    instance=INSTANCE,
    run=st.integers(0, 10**6),
    stamp=st.from_regex(r"[0-9]{8}_[0-9]{6}", fullmatch=True),
    form=st.sampled_from(
        ["{i}", "{i}_run{r}", "{i}_incomplete_{s}", "{i}_incomplete_{s}_run{r}", "{i}_run{r}_incomplete_{s}"]
    ),
)
def test_instance_of_strips_what_was_added(instance: str, run: int, stamp: str, form: str):
    assert instance_of(form.format(i=instance, r=run, s=stamp)) == instance
    assert instance_of(instance) == instance


def test_swe_master_run():
    got = read_row(swe_master_run(), context())
    assert (got.id, got.instance_id, got.resolved) == ("owner__repo-7@run_1", "owner__repo-7", True)
    assert (got.licence, got.tools) == ("MIT License", None)
    assert got.messages == [
        {"role": "system", "content": "be {good}"},
        {"role": "user", "content": "In /testbed: It uses {working_dir} wrongly Go."},
        {"role": "assistant", "content": "<think>look</think>\n\n<function=execute_bash>"},
        {"role": "tool", "content": "a.py"},
        {"role": "assistant", "content": "<function=submit>"},
    ]


def test_swe_master_run_that_was_cut_off_keeps_its_last_observation():
    row = swe_master_run()
    row["trajectory_steps"][1]["done"] = False
    assert read_row(row, context()).messages[-1] == {"role": "tool", "content": "<<< Finished >>>"}


def test_swe_master_sft_keeps_two_systems_and_tool_results_without_ids():
    got = read_row(EXAMPLES["swe-master-sft"], context())
    assert [message["role"] for message in got.messages] == [
        "system",
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert got.messages[4] == {"role": "tool", "content": "t"}
    assert got.resolved is None


def test_mini_swe_agent():
    got = read_row(mini_run(), context())
    assert (got.id, got.instance_id, got.resolved) == ("owner__repo-8", "owner__repo-8", None)
    assert [message["role"] for message in got.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert got.messages[3]["name"] == "bash"
    assert got.tools is not None and got.tools[0]["function"]["name"] == "bash"
    assert not any("extra" in message for message in got.messages)


def test_mini_swe_agent_in_text_mode_has_no_tools():
    row = mini_run()
    row["messages"] = [m for m in row["messages"] if m["role"] in ("system", "user")]
    row["messages"].append({"role": "assistant", "content": "```bash\nls\n```", "extra": {}})
    row["messages"].append({"role": "user", "content": "<returncode>0</returncode>", "extra": {}})
    assert read_row(row, context()).tools is None


def test_openhands_native():
    got = read_row(openhands_call(), context("llm_completions/owner__repo-9/openai__m-17.5.json"))
    assert (got.id, got.instance_id) == ("owner__repo-9@openai__m-17.5", "owner__repo-9")
    assert [message["content"] for message in got.messages] == ["s", "fix\nit", "", "out 0", "", "out 1", "bye"]
    assert got.tools == TOOLS


def test_openhands_text_mode_gets_its_closing_tag_back():
    got = read_row(openhands_call(native=False), context("x/y/z.json"))
    assert got.messages[-1]["content"] == "<function=finish>\n<parameter=message>bye</parameter>\n</function>"
    assert got.tools is None


def test_openhands_failed_call_is_bad():
    with pytest.raises(BadRow, match="no answer"):
        read_row({**openhands_call(), "response": {"error": "overloaded"}}, context())


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (  # nebius SWE-agent
            {
                "instance_id": "i",
                "target": True,
                "trajectory": [
                    {"role": "system", "text": None, "system_prompt": "s", "mask": True},
                    {"role": "user", "text": "u"},
                    {"role": "ai", "text": "a"},
                ],
            },
            ("i", True, ["s", "u", "a"]),
        ),
        (  # SWE-smith
            {
                "instance_id": "i",
                "resolved": False,
                "traj_id": "i.x",
                "patch": "",
                "messages": json.dumps(
                    [
                        {
                            "role": "user",
                            "content": [{"type": "text", "text": "u", "cache_control": None}],
                            "agent": "main",
                        },
                        {"role": "assistant", "content": "a", "thought": "t", "action": "ls"},
                    ]
                ),
            },
            ("i", False, ["u", "a"]),
        ),
        (  # SWE-Gym
            {**chat("user", "assistant"), "instance_id": "i", "run_id": "r1", "resolved": True, "test_result": {}},
            ("i", True, ["u", "a"]),
        ),
        (  # unknown outcome written as -1
            {**chat("user", "assistant"), "instance_id": "i", "resolved": -1},
            ("i", None, ["u", "a"]),
        ),
        (  # SWE-agent's .traj: steps under `trajectory`, messages under `history`
            {"trajectory": [{"action": "ls"}], "history": chat("user", "assistant")["messages"], "instance_id": "i"},
            ("i", None, ["u", "a"]),
        ),
    ],
    ids=["nebius", "swe-smith", "swe-gym", "minus one", "swe-agent"],
)
def test_other_chat_rows(row: dict[str, Any], expected: tuple[Any, ...]):
    got = read_row(row, context())
    assert (got.instance_id, got.resolved, [message["content"] for message in got.messages]) == expected


def test_swe_agent_ids_come_as_a_list():
    call = {"id": "q", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "tool", "content": "o", "tool_call_ids": ["q"]},
    ]
    assert read_row({"messages": messages}, context()).messages[1]["tool_call_id"] == "q"


def test_canonical_rows_pass_through_unchanged():
    before = read_row(coderforge_row(), context())
    assert read_row(json.loads(before.to_line()), context()) == before


def test_rows_without_ids_get_them_from_their_content():
    first, again, other = (
        read_row(chat("user", "assistant", *more), context(row=row)) for row, more in ((1, ()), (7, ()), (2, ("user",)))
    )
    assert first.id == again.id != other.id
    assert first.instance_id == other.instance_id


# -- tool results and calls ----------------------------------------------------------------------------------


def turn(*ids: str | None) -> dict[str, Any]:
    calls = [{"id": id_, "function": {"name": f"tool{i}", "arguments": None}} for i, id_ in enumerate(ids)]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(call_id: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": "o", "tool_call_id": call_id}


def links(messages: list[dict[str, Any]]) -> list[tuple[str | None, str | None]]:
    found = canonical_messages(messages, context())
    return [(m.get("tool_call_id"), m.get("name")) for m in found if m["role"] == "tool"]


def test_results_without_ids_follow_the_order_of_the_calls():
    assert links([turn("a", "b"), result(), result(), turn("c"), result()]) == [
        ("a", "tool0"),
        ("b", "tool1"),
        ("c", "tool0"),
    ]


def test_results_with_ids_are_matched_by_id_even_when_ids_repeat_in_later_turns():
    assert links([turn("a", "b"), result("b"), result("a"), turn("a"), result("a")]) == [
        ("b", "tool1"),
        ("a", "tool0"),
        ("a", "tool0"),
    ]


def test_calls_without_ids_get_one():
    found = canonical_messages([turn(None, None), result("x"), result(), turn(None)], context())
    calls = [call["id"] for message in found for call in message.get("tool_calls", ())]
    assert calls == ["x", "call_2", "call_4_0"]
    assert [m["tool_call_id"] for m in found if m["role"] == "tool"] == ["x", "call_2"]


@pytest.mark.parametrize(
    ("messages", "reason", "word"),
    [
        ([turn("a"), turn("b")], "call without result", "message 1"),
        ([turn("a", "b"), result("b"), {"role": "user", "content": "?"}, turn()], "call without result", "message 3"),
        ([turn("a"), result("z")], "result without call", "'z'"),
        ([turn("a"), result("a"), result("a")], "result without call", "message 2"),
        ([{"role": "user", "content": "x"}], "no assistant turn", "1 messages"),
        (["hi"], "bad message", "message 0"),
        ([{"role": "exit", "content": "x"}], "unknown role", "'exit'"),
        ([{"role": "assistant", "content": [{"type": "image_url"}]}], "content is not text", "image_url"),
        ([{"role": "assistant", "content": 7}], "content is not text", "int"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "bad tool call", "message 0: tool call 0"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}], "bad tool call", "int"),
    ],
)
def test_what_is_no_agent_run(messages: list[Any], reason: str, word: str):
    with pytest.raises(BadRow) as bad:
        canonical_messages(messages, context())
    assert bad.value.reason == reason
    assert word in bad.value.detail


def test_malformed_arguments_are_kept_as_they_are():
    call = {"id": "a", "function": {"name": "f", "arguments": '{"command": "cut'}}
    found = canonical_messages([{"role": "assistant", "tool_calls": [call]}], context())
    assert found[0]["tool_calls"][0]["function"]["arguments"] == '{"command": "cut'


def test_lone_surrogates_are_replaced_and_noted():
    place = context()
    found = canonical_messages([{"role": "assistant", "content": ["ok", {"type": "text", "text": "\ud800"}]}], place)
    assert found[0]["content"] == "ok\n\ufffd"
    assert place.notes == ["lone surrogates replaced by U+FFFD"]
    clean = context()
    canonical_messages([{"role": "assistant", "content": "an honest \ufffd, and \x00"}], clean)
    assert clean.notes == []


CONTENT = st.one_of(
    st.none(),
    st.text(max_size=8),
    st.lists(st.builds(lambda t: {"type": "text", "text": t}, st.text(max_size=5)), max_size=2),
)
ARGUMENTS = st.one_of(
    st.none(), st.just(""), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2), st.just('{"a": 1}')
)


@st.composite
def agent_runs(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(CONTENT)}]
    for number in range(draw(st.integers(1, 4))):
        with_ids = draw(st.booleans())
        calls = [
            {"id": f"c{number}-{i}" if with_ids else None, "function": {"name": "f", "arguments": draw(ARGUMENTS)}}
            for i in range(draw(st.integers(0, 3)))
        ]
        messages.append({"role": "assistant", "content": draw(CONTENT), "tool_calls": calls})
        results = [{"role": "tool", "content": draw(CONTENT), "tool_call_id": call["id"]} for call in calls]
        messages += draw(st.permutations(results))
    return messages


@settings(deadline=None, max_examples=60)
@given(agent_runs())
def test_canonical_form_is_valid_lossless_and_stable(messages: list[dict[str, Any]]):
    original = copy.deepcopy(messages)
    found = canonical_messages(messages, context())
    assert messages == original, "the input was changed"
    check_messages(found)
    assert [m["role"] for m in found] == [m["role"] for m in messages]
    assert all(m["tool_call_id"] for m in found if m["role"] == "tool")
    assert canonical_messages(found, context()) == found
    assert canonical_messages(json.dumps(messages), context()) == found


# -- the registry --------------------------------------------------------------------------------------------


def test_by_name():
    assert by_name("auto") == READERS
    assert [reader.name for reader in by_name("SWE_Master")] == ["swe-master-run", "swe-master-sft"]
    with pytest.raises(LohaError, match="did you mean coderforge"):
        by_name("codeforge")


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"a": 1}, "keys a fit none"),
        ({}, "keys none fit none"),
        ({"input_ids": [1]}, "tokenised"),
        ({"test_result": {}, "history": [{"action": "run"}], "instance_id": "i"}, "llm_completions"),
    ],
)
def test_unknown_rows_say_what_was_seen(row: dict[str, Any], word: str):
    with pytest.raises(BadRow, match="unknown format") as bad:
        read_row(row, context())
    assert word in bad.value.detail


@pytest.mark.parametrize("row", [None, 5, "text", [1]])
def test_rows_that_are_no_objects(row: Any):
    with pytest.raises(BadRow, match="not an object"):
        read_row(row, context())


def test_shared_rows(shared_data: Path):
    for name, source, count in (("raw_runs", "swe-master-run", 5), ("sft_rows", "swe-master-sft", 4)):
        lines = (shared_data / "swe_master" / f"{name}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        found = [read_row(row, context(row=i)) for i, row in enumerate(rows, 1)]
        assert len({trajectory.id for trajectory in found}) == count
        assert {trajectory.source for trajectory in found} == {source}
        for row, trajectory in zip(rows, found, strict=True):
            _compare(row, trajectory)


def _compare(row: dict[str, Any], trajectory: Trajectory) -> None:
    contents = [message["content"] for message in trajectory.messages]
    if "input" in row:
        assert [{"role": m["role"], "content": m["content"]} for m in row["input"]] == trajectory.messages
        return
    steps = row["trajectory_steps"]
    assert contents[3::2] == [step["observation"] for step in steps[:-1]]
    assert all(step["action"] in text for step, text in zip(steps, contents[2::2], strict=True))
    assert row["problem_statement"] in contents[1] and "{working_dir}" not in contents[1]
    assert trajectory.resolved is (row["reward"] == 1.0)
