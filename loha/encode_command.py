"""`loha encode`: turn a text into latents with an LCLM checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from loha.atomic import atomic_path, check_writable
from loha.console import out
from loha.encoder import LatentEncoder
from loha.errors import LohaError
from loha.lclm import Lclm, load_lclm
from loha.plain_text import plain_encoder
from loha.weight_files import save_tensors


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `loha encode`."""

    lclm: Path
    """Folder of the LCLM checkpoint (or a parent of checkpoint_<n> folders)."""

    text: Path
    """UTF-8 file with the body of one observation; bytes that are not UTF-8 become U+FFFD."""

    out: Path
    """Safetensors file to write, with the key `latents`."""


def main(options: Options) -> None:
    """Write the float32 latents of a text: one row per compression-ratio tokens."""
    if options.out.is_dir():
        raise LohaError(f"--out {options.out}: is a folder, expected the name of a safetensors file to write")
    check_writable(options.out)
    if not options.text.is_file():
        raise LohaError(f"--text {options.text}: no such file")
    lclm = load_lclm(options.lclm)
    text = options.text.read_bytes().decode("utf-8", errors="replace")
    latents_LD = encode_text(lclm, text, name=str(options.text))
    with atomic_path(options.out) as temporary:
        save_tensors({"latents": latents_LD}, temporary)
    out(f"{options.out}: {latents_LD.shape[0]} latents of width {latents_LD.shape[1]}")


@torch.no_grad()
def encode_text(lclm: Lclm, text: str, *, name: str = "the text") -> torch.Tensor:
    """Return the latents of a text.

    Args:
        lclm: a loaded checkpoint.
        text: untrusted; literals of control tokens in it are plain text.
        name: what to call it in an error.

    Returns:
        float32 `[count, D]`.

    Raises:
        LohaError: when the text is empty.
    """
    ids = plain_encoder(lclm.encoder_tokenizer)(text)
    if not ids:
        raise LohaError(f"{name} is empty: an empty body stays text and has no latents")
    (pooled_LE,) = LatentEncoder(lclm.encoder, lclm.settings)([torch.tensor(ids)])
    return lclm.adapter(pooled_LE).float().contiguous()
