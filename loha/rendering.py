"""What a rendering is: token ids, latent regions and assistant spans of one history, and how latents are counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from loha.errors import LohaError

View = Literal["latent", "mask", "full"]
VIEWS: tuple[View, ...] = ("latent", "mask", "full")


@dataclass(frozen=True, kw_only=True)
class LatentSettings:
    """How the encoder turns tokens into latents."""

    ratio: int = 16
    """Encoder tokens per latent."""

    window: int = 1024
    """Encoder tokens per independent window."""

    def __post_init__(self) -> None:
        if self.ratio < 1 or self.window < 1:
            raise LohaError(
                f"compression ratio and encoder window must be at least 1, got {self.ratio} and {self.window}"
            )


@dataclass(frozen=True)
class Segment:
    """A run of positions: text, or one latent observation with its two markers."""

    kind: Literal["text", "latent"]
    start: int
    length: int
    observation: int | None = None
    """0-based index among the observations of the history; None for all other text."""
    source_tokens: int = 0
    """Latent: encoder tokens of the body. Text of an observation: its length. Other text: its length."""


class AssistantSpan(NamedTuple):
    """Positions [start, end) of what the assistant wrote in one turn (0-based), end-of-turn token included."""

    turn: int
    start: int
    end: int


@dataclass(frozen=True)
class LatentObservation:
    """One observation that the decoder reads as latents."""

    observation: int
    encoder_ids: tuple[int, ...]
    count: int
    """Latents, without the two markers."""
    start: int
    """Position of the start marker; latents follow at start+1 .. start+count, then the end marker."""


@dataclass(frozen=True)
class Rendering:
    """What the decoder reads for one history."""

    token_ids: list[int]
    """Decoder ids; every position of a latent segment holds the placeholder id."""
    segments: list[Segment]
    assistant_spans: list[AssistantSpan]
    latents: list[LatentObservation]
    observations: int
    """How many observations the history has."""
    full_text_tokens: int
    """Length of the same history as full text."""

    @property
    def context_tokens(self) -> int:
        """Positions that the decoder reads."""
        return len(self.token_ids)

    @property
    def latent_tokens(self) -> int:
        """Latents among them, markers not counted."""
        return sum(latent.count for latent in self.latents)
