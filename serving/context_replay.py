"""What an endpoint would read for a recorded trajectory: the context of each call and what the prefix cache then saves.

No server and no model: the renderer alone. `loha bench` measures the same on a running server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loha.accounting import CallRecord
from loha.layout import MARKERS_PER_LATENT_OBSERVATION, Window
from loha.render import FULL_TEXT, Renderer
from loha.rendering import Rendering
from loha.trajectory import Trajectory
from serving.arm import Arm


@dataclass(frozen=True, kw_only=True)
class ReplayedCall:
    """One call of a replay."""

    record: CallRecord
    """As a server that encodes each observation once would report it."""

    encoder_tokens: int
    """Encoder tokens behind all latents of this context: the encoder's work when every call encodes anew."""

    rewritten_from: int | None
    """Where this context departs from the one before; None where it only grows."""


def replay_trajectory(
    renderer: Renderer, trajectory: Trajectory, arms: Sequence[Arm], *, block_size: int, reuse_output: bool = False
) -> list[list[ReplayedCall]]:
    """Return, for each arm, the calls that an agent made: one per assistant turn that has a history before it.

    The prefix cache holds the previous call of the same arm and is never evicted; a prefix is reused in whole blocks,
    and the last position is always computed.

    Args:
        renderer: of the base's tokenizer.
        trajectory: canonical.
        arms: the context layouts; those that agree at a turn are rendered once.
        block_size: tokens per cache block of the engine.
        reuse_output: the keys and values of generated tokens are reused too, all but the last token's. An engine does
            so when the recorded turn renders to the tokens it generated; a replay of recorded turns cannot.
    """
    whole = renderer.render(trajectory.messages, trajectory.tools, window=FULL_TEXT, view="full")
    keys = ContentKeys()
    states = [_ArmState(arm) for arm in arms]
    indices = [index for index, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
    for span, index in zip(whole.assistant_spans, indices, strict=True):
        if index == 0:
            continue
        reply = whole.token_ids[span.start : span.end]
        rendered: dict[tuple[str, int], tuple[Rendering, np.ndarray]] = {}
        observations = len(renderer.rule.find(trajectory.messages[:index]))
        for state in states:
            layout = state.layout(observations)
            if layout not in rendered:
                rendering = _render(renderer, trajectory, index, state.arm)
                rendered[layout] = rendering, keys.of(rendering)
            state.call(*rendered[layout], reply, trajectory.id, block_size=block_size, reuse_output=reuse_output)
    return [state.calls for state in states]


class ContentKeys:
    """Gives each position of a context a key: equal keys mean equal input vectors.

    Text has its token id. A latent has a negative number that stands for its observation's content and its place in it,
    so that contexts compare like the engine's cache keys, which hold a content hash.
    """

    def __init__(self) -> None:
        self._bases: dict[tuple[int, ...], int] = {}
        self._next = 1

    def of(self, rendering: Rendering) -> np.ndarray:
        """Return the keys of a rendering, int64."""
        keys = np.asarray(rendering.token_ids, dtype=np.int64)
        for latent in rendering.latents:
            length = latent.count + MARKERS_PER_LATENT_OBSERVATION
            keys[latent.start : latent.start + length] = -np.arange(length) - self._base(latent.encoder_ids, length)
        return keys

    def _base(self, encoder_ids: tuple[int, ...], length: int) -> int:
        base = self._bases.setdefault(encoder_ids, self._next)
        if base == self._next:
            self._next += length
        return base


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Return how many leading keys two contexts share."""
    shorter = min(len(a), len(b))
    different = np.flatnonzero(a[:shorter] != b[:shorter])
    return int(different[0]) if len(different) else shorter


class _ArmState:
    """One arm of a replay: what its cache holds and what it has encoded."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        self.calls: list[ReplayedCall] = []
        self._held = np.empty(0, dtype=np.int64)
        self._encoded: set[tuple[int, ...]] = set()

    def layout(self, observations: int) -> tuple[str, int]:
        """Return what decides the context of a history besides its messages."""
        old = 0 if self.arm.view == "full" else _window(self.arm).leading_old(observations)
        return (self.arm.view if old else "full"), old

    def call(
        self,
        rendering: Rendering,
        context: np.ndarray,
        reply: Sequence[int],
        trajectory: str,
        *,
        block_size: int,
        reuse_output: bool,
    ) -> None:
        """Add one call."""
        shared = common_prefix(context, self._held)
        new = {latent.encoder_ids for latent in rendering.latents} - self._encoded
        self._encoded |= new
        record = CallRecord(
            full_text_tokens=rendering.full_text_tokens,
            context_tokens=rendering.context_tokens,
            latent_tokens=rendering.latent_tokens,
            encoder_tokens_new=sum(map(len, new)),
            cached_tokens=min(shared, len(context) - 1) // block_size * block_size,
            output_tokens=len(reply),
            k=self.arm.k,
            polling=self.arm.polling,
            view=self.arm.view,
            trajectory=trajectory,
        )
        self.calls.append(
            ReplayedCall(
                record=record,
                encoder_tokens=sum(len(latent.encoder_ids) for latent in rendering.latents),
                rewritten_from=shared if shared < len(self._held) else None,
            )
        )
        self._held = np.concatenate([context, np.asarray(reply[:-1], dtype=np.int64)]) if reuse_output else context


def _window(arm: Arm) -> Window:
    return Window(k=arm.k, polling=arm.polling)


def _render(renderer: Renderer, trajectory: Trajectory, index: int, arm: Arm) -> Rendering:
    return renderer.render(
        trajectory.messages[:index], trajectory.tools, window=_window(arm), view=arm.view, add_generation_prompt=True
    )
