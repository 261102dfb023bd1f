"""Model names with a suffix: what they ask for, what is refused, and names that only look like one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loha.errors import LohaError
from serving.model_name import LISTED, ImpossibleLayout, NamedLayout, read_model_name
from serving.options import resolve_options


@pytest.mark.parametrize(
    ("suffix", "options"),
    [
        ("k8", {"k": "8"}),
        ("k3p8", {"k": "3", "polling": "8"}),
        ("kinf", {"k": "inf"}),
        ("kinfp2", {"k": "inf", "polling": "2"}),
        ("mask", {"view": "mask"}),
        ("full", {"view": "full"}),
        ("latent:k0", {"view": "latent", "k": "0"}),
        ("mask:k3p8", {"view": "mask", "k": "3", "polling": "8"}),
    ],
)
def test_suffixes_are_read(suffix: str, options: dict[str, Any]) -> None:
    assert read_model_name(f"org/name:{suffix}", ["x", "org/name"]) == NamedLayout("org/name", options)


def test_listed_suffixes_are_possible() -> None:
    for suffix in LISTED:
        resolve_options(read_model_name(f"m:{suffix}", ["m"]).options)


@pytest.mark.parametrize("suffix", ["", "latest", "maskk3", "mask:", "mask:mask", ":k3", "pro"])
def test_an_unknown_suffix_is_a_model_that_does_not_exist(suffix: str) -> None:
    with pytest.raises(LohaError, match="does not exist") as refused:
        read_model_name(f"m:{suffix}", ["m"])
    assert not isinstance(refused.value, ImpossibleLayout) and "k3p8 (K=3, P=8)" in str(refused.value)


@pytest.mark.parametrize("suffix", ["k", "k-1", "k3p0", "kthree", "K3", "k3 ", "k3\n", "p8", "p-1", "mask:k-1"])
def test_an_impossible_layout_is_refused_with_what_is_allowed(suffix: str) -> None:
    with pytest.raises(ImpossibleLayout, match="impossible K or P") as refused:
        read_model_name(f"m:{suffix}", ["m"])
    assert "k3p8 (K=3, P=8)" in str(refused.value)


@pytest.mark.parametrize("served", [["a", "a:b"], ["a:b", "a"]])
def test_of_several_served_names_the_longest_counts(served: list[str]) -> None:
    assert read_model_name("a:b:k3", served) == NamedLayout("a:b", {"k": "3"})
    assert read_model_name("a:k3", served) == NamedLayout("a", {"k": "3"})


@pytest.mark.parametrize("name", ["m", "other:k8", "m:latest", "mk8", "", ":k8"])
def test_served_names_and_foreign_names_stay_as_they_are(name: str) -> None:
    assert read_model_name(name, ["m", "m:latest"]) == NamedLayout(name, None)


@given(st.text(max_size=30))
def test_any_suffix_is_read_or_refused_and_nothing_else(suffix: str) -> None:
    try:
        named = read_model_name(f"m:{suffix}", ["m"])
    except LohaError as error:
        assert "\n" not in str(error).replace(suffix, "")
        return
    assert named.model == "m" and named.options
