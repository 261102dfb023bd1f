"""Cut latent observations into the items that the engine encodes, schedules and caches.

Encoder windows are independent, so an observation can be cut at window boundaries without changing one latent.
The start marker belongs to the first item and the end marker to the last.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loha.layout import latent_count
from loha.rendering import LatentSettings

FIRST = 1
LAST = 2
COUNTED = 4
"""Set on real items and not on the engine's dummy items, so that profiling runs do not reach the counters."""

MAX_ITEM_LATENTS = 512
"""Aim for the latents of one item: an item is encoded whole as soon as the scheduler reaches its first position."""

CACHE_BYTES = 160 << 20
"""Of the observations that a cutter remembers: a few working sets."""

_ENTRY_BYTES = 900
_TOKEN_BYTES = 40
"""Of an entry without ids (measured), and of an id in the renderer's tuple, which is kept alive, and in the piece."""


@dataclass(frozen=True)
class Piece:
    """One item of the observation modality."""

    token_ids: np.ndarray
    """Encoder ids, int32."""
    flags: int
    length: int
    """Input vectors: latents and the markers that belong to this piece."""
    digest: str
    """Names everything that changes the vectors: ids, flags, encoder, settings, dtype."""


@dataclass(frozen=True)
class PlacedPiece:
    """A piece at its place in one prompt."""

    piece: Piece
    start: int
    """Position of its first vector."""
    prompt_tokens: int
    """Length of the prompt that it was placed in."""


class Cutter:
    """Cuts observations and remembers the pieces of recent ones.

    Args:
        settings: ratio and window of the encoder.
        identity: names the encoder's weights and number format.
    """

    def __init__(self, settings: LatentSettings, identity: str) -> None:
        self.settings = settings
        self._seed = f"{identity}|{settings.ratio}|{settings.window}".encode()
        self._item_tokens = windows_per_item(settings) * settings.window
        self._cache: OrderedDict[int, tuple[Sequence[int], list[Piece]]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def cut(self, encoder_ids: Sequence[int]) -> list[Piece]:
        """Return the pieces of one observation, in order.

        Args:
            encoder_ids: ids of its body; the renderer hands out the same tuple for the same body, so recent
                tuples are recognised by identity and not hashed again.
        """
        with self._lock:
            known = self._cache.get(id(encoder_ids))
            if known is not None and known[0] is encoder_ids:
                self._cache.move_to_end(id(encoder_ids))
                return known[1]
        pieces = self._cut(np.asarray(encoder_ids, dtype=np.int32))
        with self._lock:
            self._remember(encoder_ids, pieces)
        return pieces

    def _remember(self, encoder_ids: Sequence[int], pieces: list[Piece]) -> None:
        replaced = self._cache.pop(id(encoder_ids), None)
        self._cache[id(encoder_ids)] = (encoder_ids, pieces)  # keeps the tuple alive, so its id stays its own
        self._bytes += _entry_bytes(encoder_ids) - (_entry_bytes(replaced[0]) if replaced else 0)
        while self._bytes > CACHE_BYTES:
            _, (oldest, _) = self._cache.popitem(last=False)
            self._bytes -= _entry_bytes(oldest)

    def _cut(self, ids: np.ndarray) -> list[Piece]:
        starts = range(0, len(ids), self._item_tokens)
        return [
            self._piece(ids[start : start + self._item_tokens], first=start == 0, last=start == starts[-1])
            for start in starts
        ]

    def _piece(self, ids: np.ndarray, *, first: bool, last: bool) -> Piece:
        flags = FIRST * first | LAST * last | COUNTED
        latents = latent_count(len(ids), ratio=self.settings.ratio, window=self.settings.window)
        digest = hashlib.blake2b(self._seed + b"|%d|" % flags + ids.tobytes(), digest_size=20).hexdigest()
        return Piece(ids, flags, latents + first + last, digest)


def _entry_bytes(encoder_ids: Sequence[int]) -> int:
    return _ENTRY_BYTES + _TOKEN_BYTES * len(encoder_ids)


def windows_per_item(settings: LatentSettings) -> int:
    """Return how many whole windows one item may hold."""
    return max(1, MAX_ITEM_LATENTS // latent_count(settings.window, ratio=settings.ratio, window=settings.window))


def max_item_length(settings: LatentSettings) -> int:
    """Return the most input vectors that one item can have, both markers included."""
    tokens = windows_per_item(settings) * settings.window
    return latent_count(tokens, ratio=settings.ratio, window=settings.window) + 2
