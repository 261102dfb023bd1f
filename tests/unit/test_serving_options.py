"""Options of a request: merged key by key, checked, and refused with what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loha.errors import LohaError
from loha.layout import Window
from serving.options import DEFAULTS_VARIABLE, RequestOptions, resolve_options, server_defaults


def test_later_layers_win_key_by_key_and_null_counts_as_not_given() -> None:
    got = resolve_options({"k": "2", "polling": 8, "view": "mask"}, None, {"k": 0, "polling": None}, {"view": "full"})
    assert got == RequestOptions(window=Window(k=0, polling=8), view="full")


def test_without_layers_the_paper_s_rule_holds() -> None:
    assert resolve_options() == RequestOptions(window=Window(k=3, polling=1), view="latent", keep_tools=frozenset())


@pytest.mark.parametrize(
    "layer",
    [
        *({"k": -1}, {"k": "three"}, {"k": []}, {"polling": 0}, {"polling": "x"}, {"view": "Latent"}, {"view": 1}),
        *({"view": ["mask"]}, {"keep_tools": "bash"}, {"keep_tools": [1]}, {"K": 3}, {"": 0}, [], "k=3", 3),
    ],
)
def test_what_is_wrong_is_refused_with_what_is_allowed(layer: Any) -> None:
    with pytest.raises(LohaError) as refused:
        resolve_options({"k": 3}, layer)
    message = str(refused.value)
    assert '"keep_tools": [tool names]' in message
    assert len(message) < 400 and "\n" not in message


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_any_json_is_taken_or_refused_and_nothing_else(layer: Any) -> None:
    for tried in (layer, {"k": layer}, {"polling": layer}, {"view": layer}, {"keep_tools": layer}):
        try:
            options = resolve_options(tried)
        except LohaError:
            continue
        assert resolve_options(options.to_json()) == options


def test_server_defaults_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEFAULTS_VARIABLE, raising=False)
    assert server_defaults() == {}
    monkeypatch.setenv(DEFAULTS_VARIABLE, '{"k": "inf", "polling": 4}')
    assert resolve_options(server_defaults(), {"polling": 2}).window == Window(k=None, polling=2)
    monkeypatch.setenv(DEFAULTS_VARIABLE, '{"k": -1}')
    with pytest.raises(LohaError, match=DEFAULTS_VARIABLE):
        server_defaults()
