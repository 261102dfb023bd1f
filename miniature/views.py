"""Batches of equally shaped renderings: what the miniature's training and evaluation read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from loha.layout import Window
from loha.render import Renderer
from loha.rendering import LatentSettings, View
from miniature.words import VALUES
from miniature.world import TOOLS, Episode, messages_of


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B renderings of the same shape.

    Attributes:
        ids_BT: decoder ids; latent positions hold the placeholder.
        starts: position of each latent segment's start marker, in order.
        bodies_BNO: encoder ids of the N latent observations.
        supervised: positions of the assistant tokens (content, calls, end of turn), in order.
        turns: assistant turn of each supervised position.
    """

    ids_BT: torch.Tensor
    starts: list[int]
    bodies_BNO: torch.Tensor
    supervised: torch.Tensor
    turns: torch.Tensor


class Views:
    """Renders episodes with the one renderer; episodes with equally many pages give equally long renderings."""

    def __init__(self, tokenizer: Any, *, ratio: int = 4) -> None:
        self.tokenizer = tokenizer
        self.ratio = ratio
        self.renderer = Renderer(tokenizer, settings=LatentSettings(ratio=ratio))
        self.value_ids = frozenset(tokenizer.encode(f" {value}", add_special_tokens=False)[0] for value in VALUES)

    def batch(self, episodes: list[Episode], *, k: int | None, view: View = "latent", turn: int | None = None) -> Batch:
        """Return the renderings of episodes that have equally many pages.

        Args:
            episodes: the tasks, with their right solutions as history.
            k: observations that stay text; None is all.
            view: what becomes of the others.
            turn: end with this assistant turn (0-based); default the last.
        """
        stop = None if turn is None else 2 + 2 * turn + 1
        renderings = [
            self.renderer.render(messages_of(episode)[:stop], TOOLS, window=Window(k=k), view=view)
            for episode in episodes
        ]
        first = renderings[0]
        positions = [(span.turn, at) for span in first.assistant_spans for at in range(span.start, span.end)]
        bodies = [[latent.encoder_ids for latent in rendering.latents] for rendering in renderings]
        return Batch(
            ids_BT=torch.tensor([rendering.token_ids for rendering in renderings]),
            starts=[latent.start for latent in first.latents],
            bodies_BNO=torch.tensor(bodies) if first.latents else torch.zeros(len(episodes), 0, 1, dtype=torch.long),
            supervised=torch.tensor([at for _, at in positions]),
            turns=torch.tensor([of for of, _ in positions]),
        )
