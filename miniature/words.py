"""The miniature's language: compound words, each one token, long enough that a page is a real observation."""

from __future__ import annotations

_KEY_HEADS = "amber birch cedar coral delta ember fjord glass heron ivory lotus maple ocean pearl quartz raven"
_KEY_TAILS = "bridge candle fabric garden harbor ladder market needle"
_VALUE_HEADS = "bright copper frozen golden hollow silver velvet woolen"
_VALUE_TAILS = "anchor basket compass dragon engine falcon goblet helmet"

KEYS = [head + tail for head in _KEY_HEADS.split() for tail in _KEY_TAILS.split()]
"""128 names; on a page and in a quote a key follows a newline, a colon or a quotation mark, never a space."""

VALUES = [head + tail for head in _VALUE_HEADS.split() for tail in _VALUE_TAILS.split()]
"""64 values; always written after a space."""
