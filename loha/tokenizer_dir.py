"""Load a tokenizer from a folder, with errors that say what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic_core import from_json

from loha.errors import LohaError
from loha.plain_text import tokenizer_definition


def load_tokenizer(folder: str | Path) -> Any:
    """Return the fast tokenizer in `folder`, with its chat template where it has one.

    Raises:
        LohaError: when the folder is missing or holds no readable tokenizer.json.
    """
    from transformers import PreTrainedTokenizerFast

    path = Path(folder)
    if not path.is_dir():
        raise LohaError(f"{path}: no such tokenizer folder")
    if not (path / "tokenizer.json").is_file():
        raise LohaError(f"{path}: holds no tokenizer.json, expected the folder of a Hugging Face fast tokenizer")
    try:
        # Not AutoTokenizer: it rebuilds some tokenizers from their type, so that two ways of loading the same
        # tokenizer.json would give two fingerprints.
        return PreTrainedTokenizerFast.from_pretrained(str(path))
    except Exception as error:  # tokenizers raises a bare Exception on a damaged file
        raise LohaError(f"{path}: not a readable tokenizer ({type(error).__name__}: {error})") from error


def require_same_tokens(tokenizer: Any, other: Any, *, name: str, other_name: str) -> None:
    """Check that two tokenizers cut text alike and give the same ids to the tokens that both know.

    Either may have added tokens that the other lacks: an LCLM adds its markers. Definitions are not compared word for
    word, since saving a tokenizer again rewrites parts of them that change no id.

    Args:
        tokenizer: a fast tokenizer.
        other: another.
        name: of the first in errors.
        other_name: of the second in errors.

    Raises:
        LohaError: naming both and the first difference.
    """
    (model, added), (other_model, other_added) = _tokens(tokenizer), _tokens(other)
    difference = None
    if model != other_model:
        difference = "another vocabulary or other merges"
    for token in added.keys() & other_added.keys():
        if added[token] != other_added[token]:
            difference = f"{token} is {added[token]} in the first, {other_added[token]} in the second"
    if difference:
        raise LohaError(
            f"{name} and {other_name} have different tokenizers ({difference}), so one was not made from the other"
        )


def _tokens(tokenizer: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what decides the ids of plain text, and the ids of added tokens."""
    parts = from_json(tokenizer_definition(tokenizer))
    model = {key: parts["model"].get(key) for key in ("type", "vocab", "merges")}
    return model, {token["content"]: token["id"] for token in parts["added_tokens"]}
