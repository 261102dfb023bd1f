"""Which replies count as calls, and which edits quote their file."""

from __future__ import annotations

import json

import pytest

from acd.probe import Call, ProbeCounts, ProbeRule, parse_call, probed_turns, quotes_exactly
from loha.trajectory import Trajectory


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('ok <tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>', Call("bash", {"cmd": "ls"})),
        ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', Call("a", {"x": 1})),
        (
            "<function=edit>\n<parameter=old_str>\na\n  b\n</parameter>\n</function>",
            Call("edit", {"old_str": "a\n  b"}),
        ),
        (
            '<tool_call>{"name": "grep", "arguments": {"text": "<function=a><parameter=x>1</parameter></function>"}}'
            "</tool_call>",
            Call("grep", {"text": "<function=a><parameter=x>1</parameter></function>"}),
        ),
        (
            "<function=grep><parameter=text><tool_call>{}</tool_call></parameter></function>",
            Call("grep", {"text": "<tool_call>{}</tool_call>"}),
        ),
        ("<tool_call>\n<function=a><parameter=x>1</parameter></function></tool_call>", Call("a", {"x": "1"})),
        ('<tool_call>{"name": <function=a></function></tool_call>', None),
        ("no call at all", None),
        ('<tool_call>{"name": "bash", "arguments": {"cmd": </tool_call>', None),
        ('<tool_call>{"name": "bash", "arguments": {}}', None),
        ('<tool_call>{"name": "bash", "arguments": [1]}</tool_call>', None),
        ("<tool_call>[]</tool_call>", None),
        ("<tool_call>7</tool_call>", None),
    ],
)
def test_what_parses_as_a_call(text: str, call: Call | None) -> None:
    assert parse_call(text) == call


def test_an_edit_must_quote_word_for_word() -> None:
    viewed = "Here's the result of running `cat -n`:\n     9\tdef f(x):\n    10\t    return x\n"
    assert quotes_exactly("def f(x):\n    return x", ["other", viewed])
    assert not quotes_exactly("def f(x):\n   return x", [viewed])
    assert quotes_exactly("    10\t", [viewed]) and not quotes_exactly("a", [])


def test_recorded_edits_are_probed_first() -> None:
    def said(name: str, **arguments: str) -> dict:
        function = {"name": name, "arguments": json.dumps(arguments)}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }

    messages: list[dict] = [{"role": "user", "content": "fix"}]
    for i in range(6):
        messages += [said("bash", cmd=str(i)), {"role": "tool", "content": "x", "tool_call_id": "c"}]
    messages += [said("edit", old_str="a"), {"role": "tool", "content": "x", "tool_call_id": "c"}]
    messages += [{"role": "assistant", "content": "done"}]
    trajectory = Trajectory(id="t", instance_id="i", resolved=True, messages=messages)
    turns = probed_turns(trajectory, ProbeRule(turns=3))
    assert (
        len(turns) == 3
        and turns[-1] == (13, Call("edit", {"old_str": "a"}))
        and turns == sorted(turns, key=lambda t: t[0])
    )
    assert probed_turns(trajectory, ProbeRule(turns=3)) == turns


def test_counts_add_up() -> None:
    counts = ProbeCounts(asked=3, calls=2, same_tool=1, edits=2, exact_quotes=1)
    counts.add(ProbeCounts(asked=1))
    assert counts.report() == {"asked": 4, "parses": 0.5, "same_tool": 0.25, "edits": 2, "exact_quotes": 0.5}
    assert ProbeCounts().report()["exact_quotes"] is None
