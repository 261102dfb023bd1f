"""A replay of an idealised agent: how the window's moves rewrite a context and what the prefix cache then saves.

All turns have the same sizes, so the effect of K and P stands alone; a real replay of recorded trajectories is
`loha bench`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loha.accounting import CallRecord
from loha.layout import MARKERS_PER_LATENT_OBSERVATION, Window, latent_count


@dataclass(frozen=True, kw_only=True)
class AgentRun:
    """Sizes of a run. The defaults are those of the papers' mean SWE-bench trajectory."""

    calls: int = 85
    prompt_tokens: int = 5000
    """System prompt with tool schemas, and the task."""

    action_tokens: int = 250
    """Of an assistant turn."""

    observation_tokens: int = 800
    """Of a tool result."""

    ratio: int = 16
    encoder_window: int = 1024

    @property
    def latents(self) -> int:
        """Return the latents of one observation."""
        return latent_count(self.observation_tokens, ratio=self.ratio, window=self.encoder_window)

    def context(self, observations: int, old: int) -> int:
        """Return the context tokens of a call.

        Args:
            observations: in the history.
            old: how many of them, from the oldest on, are latent.
        """
        text = self.action_tokens * observations + self.observation_tokens * (observations - old)
        return self.prompt_tokens + text + (self.latents + MARKERS_PER_LATENT_OBSERVATION) * old


def replay(
    run: AgentRun, window: Window, *, cache_block: int = 1, reuse_output: bool = False, encode_once: bool = True
) -> Iterator[CallRecord]:
    """Yield the record of each call: call number c has c - 1 observations behind it.

    The prefix cache holds the previous call and is never evicted.

    Args:
        run: sizes.
        window: K and P.
        cache_block: tokens per cache block; a prefix is reused in whole blocks.
        reuse_output: the keys and values of generated tokens are reused too, all but the last token's. An engine does
            so where the chat template renders a turn back to the tokens that were generated; off is cautious.
        encode_once: keep latents from call to call; without it every call encodes all old observations, as the paper's
            server does.
    """
    before: int | None = None
    for observations in range(run.calls):
        old = window.leading_old(observations)
        held = 0
        if before is not None:
            held = run.context(observations - 1, before) + (run.action_tokens - 1 if reuse_output else 0)
            if old > before:
                # Up to the first observation that is latent only now, whose call precedes it.
                held = min(held, run.context(before, before) + run.action_tokens)
        yield CallRecord(
            full_text_tokens=run.context(observations, 0),
            context_tokens=run.context(observations, old),
            latent_tokens=run.latents * old,
            encoder_tokens_new=run.observation_tokens * (old - (before or 0) if encode_once else old),
            cached_tokens=held // cache_block * cache_block,
            output_tokens=run.action_tokens,
            k=window.k,
            polling=window.polling,
            view="full" if window.k is None else "latent",
            trajectory="replay",
        )
        before = old
