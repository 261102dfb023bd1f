"""A tiny agent and a tiny LCLM, trained from scratch, so that the whole project runs without a model hub."""

from __future__ import annotations

from pathlib import Path

_WEIGHTS = Path(__file__).parent / "weights"


def base_dir() -> Path:
    """Return the packaged base agent: a Qwen3ForCausalLM folder with tokenizer and chat template."""
    return _WEIGHTS / "base"


def lclm_dir(ratio: int = 4) -> Path:
    """Return the packaged LCLM (decoder/, encoder/, adapter/, model_config.json) of a compression ratio.

    Raises:
        LohaError: no such ratio is packaged.
    """
    from loha.errors import LohaError

    folder = _WEIGHTS / f"lclm-{ratio}x"
    if not folder.is_dir():
        have = ", ".join(sorted(path.name for path in _WEIGHTS.glob("lclm-*x"))) or "none"
        raise LohaError(
            f"no packaged miniature LCLM with ratio {ratio}: have {have}; build one with scripts/build_miniature.py"
        )
    return folder
