"""How far the logits move because merged weights are rounded once to the checkpoint's dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from loha.decoder import load_decoder
from loha.merge import MergedWeights
from loha.plain_text import plain_encoder
from loha.student_files import StudentFiles
from loha.tokenizer_dir import load_tokenizer

DEFAULT_PROBE = (
    "The failing test is tests/test_paths.py::test_relative. The traceback ends in src/paths.py, line 41:\n"
    "    return Path(base).joinpath(*parts).relative_to(root)\n"
    "ValueError: '/srv/data/a.txt' is not in the subpath of '/srv/app'\n"
    "Let me look at how `root` is computed, then fix it and run the whole suite again.\n"
)
MAX_PROBE_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class RoundingDrift:
    """Logits of the merged decoder in float32 against the same weights after rounding; both computed in float32."""

    dtype: str
    tokens: int
    max_abs_logit: float
    """Largest absolute difference of a logit."""
    mean_abs_logit: float
    kl_nats: float
    """Mean over positions of KL(unrounded || rounded) over the whole vocabulary."""
    top1_agreement: float
    """Share of positions whose most likely token is the same."""

    def sentence(self) -> str:
        """Say it on one line."""
        return (
            f"rounding to {self.dtype} moves logits up to {self.max_abs_logit:.3g} (mean {self.mean_abs_logit:.3g}), "
            f"KL {self.kl_nats:.3g} nats; the top token stays at {self.top1_agreement:.1%} of {self.tokens} positions"
        )


def measure_drift(base: str | Path, files: StudentFiles, *, dtype: torch.dtype, text: str) -> RoundingDrift:
    """Run the merged decoder on a text with exact and with rounded weights, one after the other.

    Args:
        base: folder of the base.
        files: the student.
        dtype: that the weights are rounded to.
        text: any text; its first 512 tokens are used.
    """
    ids = plain_encoder(load_tokenizer(base))(text)[:MAX_PROBE_TOKENS]
    exact_TV = _logits(base, files, ids, rounded=torch.float32)
    rounded_TV = _logits(base, files, ids, rounded=dtype)
    difference = (exact_TV - rounded_TV).abs()
    exact_logp, rounded_logp = exact_TV.log_softmax(-1), rounded_TV.log_softmax(-1)
    return RoundingDrift(
        dtype=str(dtype).removeprefix("torch."),
        tokens=len(ids),
        max_abs_logit=difference.max().item(),
        mean_abs_logit=difference.mean().item(),
        kl_nats=(exact_logp.exp() * (exact_logp - rounded_logp)).sum(-1).mean().item(),
        top1_agreement=(exact_TV.argmax(-1) == rounded_TV.argmax(-1)).double().mean().item(),
    )


@torch.no_grad()
def _logits(base: str | Path, files: StudentFiles, ids: list[int], *, rounded: torch.dtype) -> torch.Tensor:
    merged = MergedWeights(base, files, dtype=rounded)
    decoder = load_decoder(base, dtype=torch.float32, weights=merged)
    return decoder(torch.tensor([ids]), use_cache=False).logits[0].double()
