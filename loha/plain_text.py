"""Encode untrusted text: whatever it spells, it never yields a control token."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pydantic_core import from_json, to_json
from tokenizers import Encoding, Tokenizer

from loha.errors import LohaError
from loha.messages import clean_text


class PlainEncoder:
    """A tokenizer without its added tokens.

    `split_special_tokens=True` is not enough: it leaves added tokens that are not marked special, such as Qwen's
    `<tool_response>`, as control tokens.

    Args:
        tokenizer: a fast Hugging Face tokenizer.

    Raises:
        LohaError: when the tokenizer has no fast backend.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.added = _without_added_tokens(tokenizer_definition(tokenizer))
        spelled = [token for token, i in self.added.items() if i in self._tokenizer.encode(token).ids]
        # A vocabulary may hold a control token as an ordinary word: cut such a literal after its first character.
        self._cut = (
            re.compile("|".join(f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in spelled)) if spelled else None
        )

    def __call__(self, text: str) -> list[int]:
        """Return the ids of `text`; lone surrogates become U+FFFD."""
        text = clean_text(text)
        if self._cut is None:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        return [i for part in self._cut.split(text) for i in self._tokenizer.encode(part).ids]

    def with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of `text` and the character at which each begins."""
        ids: list[int] = []
        starts: list[int] = []
        offset = 0
        for part in self._cut.split(text) if self._cut else [text]:
            encoding: Encoding = self._tokenizer.encode(part, add_special_tokens=False)
            ids += encoding.ids
            starts += [offset + start for start, _ in encoding.offsets]
            offset += len(part)
        return ids, starts


def plain_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return a function from untrusted text to ids that are never control tokens."""
    return PlainEncoder(tokenizer)


def tokenizer_definition(tokenizer: Any) -> str:
    """Return the tokenizer's definition as JSON, without its passing state (truncation, padding).

    Raises:
        LohaError: when the tokenizer has no fast backend.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise LohaError(
            f"{type(tokenizer).__name__} has no fast tokenizer: a tokenizer.json is needed beside the model"
        )
    if backend.truncation or backend.padding:
        backend = Tokenizer.from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
    return backend.to_str()


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the sha256 of the tokenizer's definition."""
    return hashlib.sha256(tokenizer_definition(tokenizer).encode()).hexdigest()


@lru_cache(maxsize=4)
def _without_added_tokens(definition: str) -> tuple[Tokenizer, dict[str, int]]:
    """Return the tokenizer less its added tokens, and their ids. Cached: building one from 11 MB takes seconds."""
    parts = from_json(definition)
    added = {token["content"]: token["id"] for token in parts["added_tokens"]}
    parts["added_tokens"] = []
    parts["post_processor"] = None
    return Tokenizer.from_str(to_json(parts).decode()), added
