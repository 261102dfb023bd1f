"""Load a tokenizer from a folder, with errors that say what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loha.errors import LohaError


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
