"""Model names that carry the context layout, for clients that can send nothing but a name: `NAME:k8`, `NAME:k3p8`.

A suffix is `k` and K, optionally `p` and P; or a view; or a view, a colon, K and P. What it leaves out stays at the
server's default.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loha.errors import LohaError
from serving.options import resolve_options

LISTED = ("k0", "k1", "k3", "k8", "kinf", "mask", "full")
"""Suffixes that /v1/models names; any other K and P works as well."""

_SUFFIX = re.compile(
    r"(?:(?P<view>latent|mask|full)(?::(?=k)|$))?(?:k(?P<k>[0-9]{1,9}|inf)(?:p(?P<polling>[0-9]{1,9}))?)?"
)
_LAYOUT = re.compile(r"(?:(?:latent|mask|full):)?(?:k|p-?[0-9]).*", re.IGNORECASE | re.DOTALL)
"""What is meant as K or P, possible or not."""

_ALLOWED = "k0, k1, ... or kinf; k3p8 (K=3, P=8); latent, mask or full; mask:k3p8"


class ImpossibleLayout(LohaError):
    """A model name asks for a K or P that cannot be."""


@dataclass(frozen=True)
class NamedLayout:
    """What a model name says."""

    model: str
    """The served name without the suffix."""
    options: dict[str, Any] | None
    """What the suffix asks for, as an options object; None without a suffix."""


def read_model_name(name: str, served: Sequence[str]) -> NamedLayout:
    """Split a model name as a client sent it.

    Args:
        name: of the request.
        served: names that the server serves; a name among them is never split, else the longest that fits counts.

    Returns:
        The name as it is when it has no suffix or belongs to no served model, which vLLM then refuses.

    Raises:
        ImpossibleLayout: when the suffix of a served name gives a K or P that cannot be; says what is allowed.
        LohaError: when the suffix is something else; says what is allowed.
    """
    base = max((known for known in served if name.startswith(known + ":")), key=len, default=None)
    if base is None or name in served:
        return NamedLayout(name, None)
    suffix = name[len(base) + 1 :]
    match = _SUFFIX.fullmatch(suffix)
    if match is None or not suffix:
        raise _refusal(name, base, suffix, "unknown suffix")
    options = {key: value for key, value in match.groupdict().items() if value is not None}
    try:
        resolve_options(options)
    except LohaError as error:
        raise _refusal(name, base, suffix, str(error).partition(";")[0]) from None
    return NamedLayout(base, options)


def _refusal(name: str, base: str, suffix: str, what: str) -> LohaError:
    shown = name if len(name) <= 100 else name[:97] + "..."
    allowed = f"After `{base}:` this server takes {_ALLOWED}"
    if _LAYOUT.fullmatch(suffix):
        return ImpossibleLayout(f"The model name `{shown}` asks for an impossible K or P: {what}. {allowed}")
    return LohaError(f"The model `{shown}` does not exist: {what}. {allowed}")
