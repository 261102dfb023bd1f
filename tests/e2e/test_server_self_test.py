"""The self-test passes on the checkpoint that the server runs and notices any other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from histories import one_observation
from live_server import Reference, Server
from safetensors.torch import load_file, save_file
from tiny_checkpoint import TinyCheckpoint, text

from serving import self_test as module
from serving.checkpoint import check_checkpoint, checkpoint_hash, latent_identity
from serving.liveness import SelfTestFailed
from serving.self_test import TOLERANCES, as_served, mean_difference, self_test, streamed_reference


def change(name: str, factor: float) -> Callable[[Path], None]:
    """Return what multiplies one tensor of a checkpoint."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[name] = tensors[name] * factor
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def patch_rope(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for part in ("text_config", "encoder_config"):
        config[part]["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (folder / "config.json").write_text(json.dumps(config))


def test_it_passes_on_the_served_checkpoint(server: Server, tiny: TinyCheckpoint) -> None:
    assert "in float32" in self_test(server.client, server.model, tiny.serving)
    log = server.log.read_text(errors="replace").splitlines()
    assert next(line for line in log if line.startswith(("self-test: ", "ready: "))).startswith("self-test: mean")


def test_another_rope_is_another_checkpoint_and_makes_other_latents(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """The weights are the same; caches of latents and of results must not be."""
    copy = Path(shutil.copytree(tiny.serving, tmp_path / "copy"))

    def names() -> tuple[str, str]:
        config = check_checkpoint(copy)
        return checkpoint_hash(copy, config), latent_identity(copy, config, "torch.float32")

    before = names()
    assert names() == before
    patch_rope(copy)
    assert all(new != old for new, old in zip(names(), before, strict=True))


@pytest.mark.parametrize(
    "damage",
    [
        change("adapter.fc2.weight", 1.1),
        change("markers", 0.5),
        change("encoder.layers.1.mlp.down_proj.weight", 1.5),
        change("decoder.model.layers.1.self_attn.q_norm.weight", 1.1),
        patch_rope,
    ],
    ids=["adapter", "markers", "encoder", "decoder", "rope"],
)
def test_it_notices_other_weights(
    server: Server, tiny: TinyCheckpoint, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    copy = Path(shutil.copytree(tiny.serving, tmp_path / "copy"))
    damage(copy)
    with pytest.raises(SelfTestFailed, match="differs from this checkpoint"):
        self_test(server.client, server.model, copy)


def test_token_ids_of_another_template_are_compared_as_they_are(reference: Reference) -> None:
    own = reference.render(one_observation(text(41, 80)), k=0)
    hole = reference.model.renderer.placeholder_id
    (latent,) = own.latents
    served = as_served(own, [1, 2, *own.token_ids, 3], hole)
    assert served.latents[0].start == latent.start + 2 and served.token_ids[:2] == [1, 2]
    torch.testing.assert_close(reference.model.embeds(served)[2:-1], reference.model.embeds(own), rtol=0.0, atol=0.0)
    shorter = own.token_ids[: latent.start] + own.token_ids[latent.start + 1 :]
    for ids in (shorter, [*own.token_ids, hole], [1, 2]):
        with pytest.raises(SelfTestFailed, match="latent positions"):
            as_served(own, ids, hole)


def test_other_token_ids_need_another_template(
    server: Server, tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*args: Any) -> Any:
        body, dtype = ask(*args)
        return {**body, "prompt_token_ids": [*body["prompt_token_ids"][:1], *body["prompt_token_ids"]]}, dtype

    ask = module._ask
    monkeypatch.setattr(module, "_ask", changed)
    with pytest.raises(SelfTestFailed, match="to other token ids"):
        self_test(server.client, server.model, tiny.serving)


def test_the_streamed_reference_is_the_reference_and_keeps_no_weights(
    tiny: TinyCheckpoint, reference: Reference
) -> None:
    streamed = streamed_reference(tiny.serving)
    rendering = reference.render(one_observation(text(41, 80)), k=0)
    assert torch.equal(streamed.logits(rendering), reference.model.logits(rendering))
    assert all(parameter.is_meta for parameter in streamed.decoder.parameters())


def test_the_difference_is_a_mean_and_nan_is_no_pass() -> None:
    assert mean_difference({0: -1.0, 2: -2.0}, torch.tensor([-1.5, 9.0, -2.25])) == pytest.approx(0.375)
    assert not mean_difference({0: float("nan")}, torch.tensor([0.0])) <= max(TOLERANCES.values())
