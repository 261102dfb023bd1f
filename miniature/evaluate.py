"""Exact match on held-out trajectories: does the greedy reply quote the right values, at each K?"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from loha.rendering import View
from miniature.training import Reader, view_embeds
from miniature.views import Batch, Views
from miniature.world import Episode, make_episode

K_GRID: tuple[int | None, ...] = (0, 1, 2, 3, 4, 8, None)
"""None is K = inf: full text."""


@dataclass(kw_only=True)
class Score:
    """Counts over quoting turns (the opening turn quotes nothing).

    Attributes:
        turns: turns seen; whole: turns with every token right; quoted: turns with key and both values right.
        by_age: age of the quoted observation -> (quoted right, turns).
    """

    turns: int = 0
    whole: int = 0
    quoted: int = 0
    by_age: dict[int, tuple[int, int]] = field(default_factory=lambda: defaultdict(lambda: (0, 0)))

    def add(self, *, whole: bool, quoted: bool, age: int) -> None:
        """Count one turn."""
        self.turns += 1
        self.whole += whole
        self.quoted += quoted
        right, seen = self.by_age[age]
        self.by_age[age] = (right + quoted, seen + 1)

    def to_json(self) -> dict[str, Any]:
        """Return counts for a report."""
        ages = {str(age): list(counts) for age, counts in sorted(self.by_age.items())}
        return {"turns": self.turns, "quoted": self.quoted, "whole": self.whole, "by_age": ages}


def held_out(seed: int, *, groups: int, rows: int, pages: tuple[int, int] = (12, 16)) -> Iterator[list[Episode]]:
    """Yield groups of equally long episodes from seeds that training never uses."""
    rng = random.Random(f"held-out-{seed}")
    for _ in range(groups):
        count = rng.randint(*pages)
        yield [make_episode(rng, pages=count) for _ in range(rows)]


@torch.no_grad()
def score(
    reader: Reader,
    views: Views,
    groups: list[list[Episode]],
    *,
    k: int | None,
    view: View = "latent",
    decoder: Any = None,
) -> Score:
    """Score greedy replies at one K over the right history of each turn.

    The right history is fed, so all positions of a reply are read from one forward pass: the greedy reply
    equals the right one exactly when the most likely token is right at each of its positions. K = 0 and
    K = inf need one pass per trajectory, other K one per turn, because the window moves.

    Args:
        reader: the model, with its encoder.
        views: renders with the reader's ratio.
        groups: held-out episodes; within a group equally many pages.
        k: observations that stay text; None is all.
        view: "latent", or "mask" for the baseline that drops old observations.
        decoder: another decoder that reads the reader's latents.
    """
    decoder = decoder or reader.decoder
    total = Score()
    for episodes in groups:
        pages = len(episodes[0].pages)
        for turns in (
            [range(1, pages + 1)] if k in (None, 0) else [range(turn, turn + 1) for turn in range(1, pages + 1)]
        ):
            batch = views.batch(episodes, k=k, view=view, turn=turns[-1])
            embeds_BTD = view_embeds(reader, batch, table_VD=decoder.model.embed_tokens.weight)
            hidden_BTD = decoder.model(inputs_embeds=embeds_BTD, use_cache=False).last_hidden_state
            guesses_BJ = decoder.lm_head(hidden_BTD[:, batch.supervised - 1]).argmax(-1)
            _count(total, batch, guesses_BJ, episodes, turns, views.value_ids)
    return total


def _count(
    total: Score, batch: Batch, guesses_BJ: torch.Tensor, episodes: list[Episode], turns: range, values: frozenset[int]
) -> None:
    wanted_BJ = batch.ids_BT[:, batch.supervised]
    for turn in turns:
        here_J = batch.turns == turn
        for row, episode in enumerate(episodes):
            wanted, guesses = wanted_BJ[row, here_J].tolist(), guesses_BJ[row, here_J].tolist()
            pairs = list(zip(wanted, guesses, strict=True))
            quoted = all(want == guess for want, guess in pairs if want in values)
            total.add(whole=wanted == guesses, quoted=quoted, age=episode.ages[turn - 1])


class TextReader:
    """A decoder that reads no latents, as a `Reader`: the base on full text or masked."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder

    def latents(self, bodies_XO: torch.Tensor) -> torch.Tensor:
        """Refuse: there is no encoder."""
        raise AssertionError("a text reader was given latents")

    def markers(self) -> torch.Tensor:
        """Refuse: there are no markers."""
        raise AssertionError("a text reader was given latents")
