"""The packaged weights: they load, quote, and read latents on held-out trajectories."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import miniature
from loha.errors import LohaError
from loha.lclm import load_lclm as load_released
from loha.render import Renderer
from miniature import evaluate, recipe, world
from miniature.models import load_lclm
from miniature.views import Views
from miniature.world import TOOLS, messages_of


@pytest.fixture(scope="module")
def groups() -> list[list[world.Episode]]:
    return list(evaluate.held_out(1234, groups=1, rows=3, pages=(13, 13)))


def test_the_base_quotes_on_full_text_and_not_when_masked(groups: list[list[world.Episode]]) -> None:
    decoder, tokenizer = recipe.load_base(miniature.base_dir())
    reader, views = evaluate.TextReader(decoder), Views(tokenizer)
    text = evaluate.score(reader, views, groups, k=None)
    masked = evaluate.score(reader, views, groups, k=0, view="mask")
    assert text.turns == masked.turns == 39
    assert text.quoted / text.turns > 0.85
    assert masked.quoted / masked.turns < 0.1


def test_the_lclm_reads_latents_and_the_base_does_not(groups: list[list[world.Episode]]) -> None:
    decoder, tokenizer = recipe.load_base(miniature.base_dir())
    lclm = load_lclm(miniature.lclm_dir(4))
    views = Views(tokenizer)
    own = evaluate.score(lclm, views, groups, k=0)
    foreign = evaluate.score(lclm, views, groups, k=0, decoder=decoder)
    assert own.quoted / own.turns > 0.85
    assert foreign.quoted / foreign.turns < 0.3


def test_greedy_generation_gives_the_whole_reply_token_by_token() -> None:
    """The score's one-pass reading, checked against real generation on a turn that quotes an old observation."""
    decoder, tokenizer = recipe.load_base(miniature.base_dir())
    renderer = Renderer(tokenizer)
    right = 0
    for episode in evaluate.held_out(99, groups=3, rows=1, pages=(6, 6)):
        messages = messages_of(episode[0])
        prompt = renderer.render(messages[: 2 + 2 * 6], TOOLS, add_generation_prompt=True).token_ids
        said = decoder.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, len(prompt) :]
        batch = Views(tokenizer).batch(episode, k=None, turn=6)
        logits = decoder(batch.ids_BT).logits[0, batch.supervised[batch.turns == 6] - 1]
        wanted = batch.ids_BT[0, batch.supervised[batch.turns == 6]]
        assert (said.tolist() == wanted.tolist()) == torch.equal(logits.argmax(-1), wanted)
        right += said.tolist() == wanted.tolist()
    assert right >= 2


def test_the_packaged_lclm_is_the_released_layout() -> None:
    released = load_released(miniature.lclm_dir(4))
    assert released.settings.ratio == 4
    assert released.markers is not None
    assert released.decoder_folder is not None


def test_a_ratio_that_is_not_packaged_is_named() -> None:
    with pytest.raises(LohaError, match=r"no packaged miniature LCLM with ratio 5: have .*lclm-4x"):
        miniature.lclm_dir(5)


def test_the_build_script_runs(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "build_miniature.py"
    command = [sys.executable, str(script), "--quick", "--seed", "3", "--out", str(tmp_path / "m")]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    assert "lclm 4x" in first.stdout
    assert (tmp_path / "m/evaluation.json").is_file()
    load_released(tmp_path / "m/lclm-4x")
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert again.stderr.splitlines()[-1].startswith("error: ")
