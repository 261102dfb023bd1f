"""Replies of the real server: equal to the transformers reference and to stock vLLM, each observation encoded once."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from histories import TOOLS, growing, one_observation
from live_server import Reference, Server, options
from tiny_checkpoint import text


@pytest.mark.parametrize("polling", [1, 8])
@pytest.mark.parametrize("k", [0, 1, 3, None])
def test_replies_equal_the_reference_at_every_step(
    server: Server, reference: Reference, full_text_histories: list[Any], k: int | None, polling: int
) -> None:
    # With P=8 nothing moves before the eighth observation.
    for step, history in enumerate(full_text_histories):
        if polling == 8 and step < 6:
            continue
        assert server.reply(history, loha=options(k, polling)) == reference.reply(history, k=k, polling=polling), step


def test_the_comparison_can_fail(reference: Reference, full_text_histories: list[Any]) -> None:
    """Replies depend on the layout, on the history and on the content of a latent observation."""
    last = full_text_histories[-1]
    by_k = {tuple(reference.reply(last, k=k)) for k in (0, 1, 3, None)}
    assert len(by_k) == 4
    assert len({tuple(reference.reply(history, k=0)) for history in full_text_histories}) > 5
    other = [*last[:-1], {**last[-1], "content": text(77, 247)}]
    assert reference.reply(other, k=0) != reference.reply(last, k=0)


def test_full_text_equals_stock_vllm(
    server: Server, stock_replies: list[list[int]], full_text_histories: list[Any]
) -> None:
    assert [server.reply(history, loha=options(None)) for history in full_text_histories] == stock_replies
    assert len({tuple(reply) for reply in stock_replies}) > 5


def test_each_observation_is_encoded_once_over_a_replay(server: Server, reference: Reference) -> None:
    histories = growing(9, seed=2000)
    latents = [latent for history in histories for latent in reference.render(history, k=1, polling=2).latents]
    distinct = {latent.encoder_ids: latent.count for latent in latents}
    assert len(latents) > 3 * len(distinct)  # encoding on every call would show
    expected = {
        "encoded_observations": len(distinct),
        "encoder_source_tokens": sum(len(ids) for ids in distinct),
        "encoded_latents": sum(distinct.values()),
    }
    for share in (1, 0):  # the second replay finds everything in the caches
        before = {name: server.counter(name) for name in expected}
        for history in histories:
            server.reply(history)  # the server's defaults: K=1, P=2
        after = {name: server.counter(name) - before[name] for name in expected}
        assert after == {name: share * value for name, value in expected.items()}


def test_concurrent_observations_of_equal_length_do_not_mix(server: Server, reference: Reference) -> None:
    def encoder_tokens(body: str) -> int:
        return sum(len(latent.encoder_ids) for latent in reference.render(one_observation(body), k=0).latents)

    bodies = sorted((text(5000 + seed, 60) for seed in range(80)), key=encoder_tokens)
    length, group = max(
        ((length, list(group)) for length, group in itertools.groupby(bodies, encoder_tokens)), key=lambda g: len(g[1])
    )
    by_reply = {tuple(reference.reply(one_observation(body), k=0)): body for body in group}
    group, expected = list(by_reply.values()), [list(reply) for reply in by_reply]
    assert length > 64 and len(group) >= 4  # several bodies of one length whose replies all differ
    order = [i % len(group) for i in range(48)]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda i: server.reply(one_observation(group[i]), loha=options(0)), order))
    assert replies == [expected[i] for i in order]


def test_a_long_observation_is_cut_into_items_and_reads_the_same(server: Server, reference: Reference) -> None:
    history = one_observation(text(31, 16_000))
    rendering = reference.render(history, k=0)
    (latent,) = rendering.latents
    assert latent.count > 3 * 512  # several items of the engine
    before = {name: server.counter(name) for name in ("encoded_observations", "encoder_source_tokens")}
    assert server.reply(history, loha=options(0)) == reference.reply(history, k=0)
    assert server.counter("encoded_observations") - before["encoded_observations"] == 1
    assert server.counter("encoder_source_tokens") - before["encoder_source_tokens"] == len(latent.encoder_ids)


def test_tools_reach_the_template(server: Server, reference: Reference, full_text_histories: list[Any]) -> None:
    history = full_text_histories[3]
    got = server.reply(history, loha=options(1), tools=TOOLS)
    assert got == reference.reply(history, k=1, tools=TOOLS)
    assert got != server.reply(history, loha=options(1))


@pytest.mark.parametrize("view", ["mask", "full"])
def test_other_views_equal_the_reference(
    server: Server, reference: Reference, full_text_histories: list[Any], view: str
) -> None:
    history = full_text_histories[-1]
    assert server.reply(history, loha=options(2, view=view)) == reference.reply(history, k=2, view=view)
