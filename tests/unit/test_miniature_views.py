"""Training batches of the miniature, and its scores, on models made on the spot."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from loha.encoder import LatentEncoder
from loha.lclm import load_lclm as load_released
from miniature import evaluate, recipe, world
from miniature.models import TinyLclm, load_lclm, new_base, new_encoder, save_lclm
from miniature.tokenizer import MEMORY, build_tokenizer
from miniature.training import view_embeds
from miniature.views import Views
from tests.tolerances import MINIATURE_LATENTS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return recipe.load_tokenizer(folder)


def _lclm(tokenizer: Any, ratio: int = 4) -> TinyLclm:
    torch.manual_seed(0)
    return TinyLclm(new_base(tokenizer), new_encoder(tokenizer), ratio, first_marker=len(tokenizer))


def test_a_saved_lclm_is_read_by_loha_with_the_latents_and_markers_of_training(tokenizer: Any, tmp_path: Path) -> None:
    lclm = _lclm(tokenizer)
    save_lclm(lclm, tokenizer, tmp_path / "lclm")
    released = load_released(tmp_path / "lclm")
    body = tokenizer.encode(world.draw_pages(random.Random(1), 1)[0], add_special_tokens=False)
    ours = lclm.latents(torch.tensor([body]))[0]
    encode = LatentEncoder(released.encoder, released.settings)
    theirs = released.adapter(encode([torch.tensor(body)])[0])
    assert ours.shape == theirs.shape == (4, 128)
    torch.testing.assert_close(ours, theirs, atol=MINIATURE_LATENTS, rtol=0)
    assert torch.equal(lclm.markers().detach(), released.markers)


def test_a_saved_lclm_keeps_its_bases_tokenizer_and_adds_three_tokens(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "base")
    tokenizer = recipe.load_tokenizer(tmp_path / "base")
    tokenizer.add_tokens(["an unusual token"])  # not what build_tokenizer makes
    save_lclm(_lclm(tokenizer), tokenizer, tmp_path / "lclm")
    encoder, decoder = (recipe.load_tokenizer(tmp_path / "lclm" / name) for name in ("encoder", "decoder"))
    assert encoder.get_vocab() == tokenizer.get_vocab()
    added = {text: len(tokenizer) + index for index, text in enumerate(MEMORY)}
    assert decoder.get_vocab() == tokenizer.get_vocab() | added
    assert decoder.decode(list(added.values()), skip_special_tokens=True) == ""


def test_a_saved_lclm_comes_back(tokenizer: Any, tmp_path: Path) -> None:
    lclm = _lclm(tokenizer)
    save_lclm(lclm, tokenizer, tmp_path / "lclm")
    again = load_lclm(tmp_path / "lclm")
    views = Views(tokenizer)
    batch = views.batch([world.make_episode(random.Random(2), pages=3)], k=1)
    assert torch.equal(view_embeds(lclm, batch), view_embeds(again, batch))


def test_segments_hold_marker_latents_marker(tokenizer: Any) -> None:
    lclm = _lclm(tokenizer, ratio=16)
    views = Views(tokenizer, ratio=16)
    episodes = [world.make_episode(random.Random(seed), pages=4) for seed in (3, 4)]
    batch = views.batch(episodes, k=1)
    embeds = view_embeds(lclm, batch)
    body = torch.tensor(tokenizer.encode(episodes[1].pages[2], add_special_tokens=False))
    start = batch.starts[2]
    start_marker, end_marker = lclm.markers()
    assert torch.equal(embeds[1, start], start_marker)
    torch.testing.assert_close(
        embeds[1, start + 1 : start + 2], lclm.latents(body[None])[0], atol=MINIATURE_LATENTS, rtol=0
    )
    assert torch.equal(embeds[1, start + 2], end_marker)


@pytest.mark.parametrize("k", [None, 0, 2])
def test_score_equals_greedy_generation(tokenizer: Any, k: int | None) -> None:
    """The one-pass score is what greedy decoding would say: here on a model that knows only the frame."""
    lclm = _lclm(tokenizer)
    views = Views(tokenizer)
    recipe.train_lclm_phases(lclm, views, recipe.QUICK, random.Random(0), lambda name: lambda *_: None)
    episode = next(evaluate.held_out(0, groups=1, rows=1, pages=(3, 3)))[0]
    scored = evaluate.score(lclm, views, [[episode]], k=k)
    whole = 0
    for turn in (1, 2, 3):
        batch = views.batch([episode], k=k, turn=turn)
        here = batch.supervised[batch.turns == turn]
        embeds = view_embeds(lclm, batch)[:, : here[0]]
        wanted = batch.ids_BT[0, here].tolist()
        said = lclm.decoder.generate(inputs_embeds=embeds, max_new_tokens=len(wanted), do_sample=False)
        whole += said[0].tolist() == wanted
    assert scored.turns == 3
    assert scored.whole == whole


def test_masked_views_hold_no_old_observation(tokenizer: Any) -> None:
    views = Views(tokenizer)
    episode = world.make_episode(random.Random(6), pages=5)
    text = tokenizer.decode(views.batch([episode], k=2, view="mask", turn=5).ids_BT[0])
    assert [page in text for page in episode.pages] == [False, False, False, True, True]


def test_held_out_tasks_are_fixed_by_their_seed_and_apart_from_training() -> None:
    first, again, other = (list(evaluate.held_out(seed, groups=2, rows=2)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    trained = list(world.episodes(1, count=4, pages=(12, 16)))
    assert not any(episode in trained for group in first for episode in group)
