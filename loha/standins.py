"""Keep untrusted text apart from control tokens while a chat template turns both into one string.

Before the template runs, every control-token literal in a content is swapped for one private-use character; after
it, the trusted control tokens are the only ones left, the string is split at them, and the literals are restored.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from loha.errors import LohaError
from loha.sized_cache import SizedCache

BODY_START = "\U000f0f00"
BODY_END = "\U000f0f01"
LATENT = "\U000f0f02"
TURN_START = "\U000f0f03"
MARKS = BODY_START + BODY_END + LATENT + TURN_START

_ESCAPE = "\U000f0f10"
_FIRST = 0xF0000
_MOST = 0xF00
_RESERVED = "\U000f0000-\U000f0fff"
_ESCAPED_SHIFT = 0x10000
REASONING_TAGS = ("<think>", "</think>")


class StandIns:
    """Swaps control-token literals for private-use characters and back.

    Args:
        literals: the texts of all added tokens of the tokenizer.
        cache_bytes: most memory for texts that come again.
    """

    def __init__(self, literals: Iterable[str], *, cache_bytes: int = 64 << 20) -> None:
        # Longest first, so that a token is not taken for a shorter one that begins it.
        self.literals = sorted(set(literals), key=lambda text: (-len(text), text))[:_MOST]
        self._char = {text: chr(_FIRST + index) for index, text in enumerate(self.literals)}
        self._text = {char: text for text, char in self._char.items()}
        self._find = re.compile("|".join(map(re.escape, self.literals)) or r"(?!)")
        self._find_untrusted = re.compile("|".join([*map(re.escape, self.literals), f"[{_RESERVED}]"]))
        reasoning = [re.escape(text) for text in self.literals if text not in REASONING_TAGS]
        self._find_in_assistant = re.compile("|".join([*reasoning, f"[{_RESERVED}]"]))
        self._find_standin = re.compile(f"{_ESCAPE}(.)|[\U000f0000-\U000f0eff]", re.DOTALL)
        self.swap: Callable[..., str] = SizedCache(self._swap, max_bytes=cache_bytes, size=sys.getsizeof)

    def _swap(self, text: str, assistant: bool = False) -> str:
        """Return `text` with literals swapped.

        Args:
            text: untrusted text.
            assistant: reasoning tags in an assistant turn are the model's own tokens and stay.
        """
        return (self._find_in_assistant if assistant else self._find_untrusted).sub(self._stand_in, text)

    def swap_all(self, value: Any) -> Any:
        """Return a JSON-like value with every string swapped, keys included.

        Raises:
            LohaError: when it is nested too deeply.
        """
        try:
            return self._swap_value(value)
        except RecursionError:
            raise LohaError("call arguments, tools or template variables are nested too deeply") from None

    def _swap_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.swap(value)
        if isinstance(value, Mapping):
            return {self.swap(str(key)): self._swap_value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._swap_value(item) for item in value]
        return value

    def restore(self, text: str) -> str:
        """Return `text` with the literals back in place."""
        return self._find_standin.sub(self._original, text)

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Split template output into (piece, is a trusted control token)."""
        parts: list[tuple[str, bool]] = []
        end = 0
        for match in self._find.finditer(rendered):
            if match.start() > end:
                parts.append((rendered[end : match.start()], False))
            parts.append((match.group(), True))
            end = match.end()
        if end < len(rendered):
            parts.append((rendered[end:], False))
        return parts

    def _stand_in(self, match: re.Match[str]) -> str:
        found = match.group()
        return self._char.get(found) or _ESCAPE + chr(ord(found) + _ESCAPED_SHIFT)

    def _original(self, match: re.Match[str]) -> str:
        escaped = match.group(1)
        return chr(ord(escaped) - _ESCAPED_SHIFT) if escaped else self._text.get(match.group(), match.group())
