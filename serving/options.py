"""What one request asks of the context layout: K, polling, view, kept tools."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loha.errors import LohaError, shown
from loha.layout import Window, format_k, parse_k, parse_polling
from loha.rendering import VIEWS, View

DEFAULTS_VARIABLE = "LOHA_SERVING_DEFAULTS"
"""Environment variable by which the launcher hands the server's defaults to the API processes (a JSON object)."""

KEYS = ("k", "polling", "view", "keep_tools")
ALLOWED = (
    'loha takes {"k": 0, 1, 2, ... or "inf", "polling": 1, 2, ..., '
    '"view": "latent", "mask" or "full", "keep_tools": [tool names]}'
)


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The resolved choice of one request."""

    window: Window = field(default_factory=Window)
    """Which observations stay text."""

    view: View = "latent"
    """What becomes of the others."""

    keep_tools: frozenset[str] = frozenset()
    """Tools whose observations always stay text."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that `resolve_options` reads back to this."""
        return {
            "k": format_k(None) if self.window.k is None else self.window.k,
            "polling": self.window.polling,
            "view": self.view,
            "keep_tools": sorted(self.keep_tools),
        }


def resolve_options(*layers: Any) -> RequestOptions:
    """Merge option objects, later ones winning key by key, and check the result.

    Args:
        layers: `{"k": ..., "polling": ..., "view": ..., "keep_tools": ...}` objects as they came from JSON, or None.
            A null value counts as not given.

    Raises:
        LohaError: for an unknown key or an impossible value; says what is allowed.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        if layer is None:
            continue
        if not isinstance(layer, Mapping):
            raise LohaError(f"loha must be an object, got {type(layer).__name__}; {ALLOWED}")
        unknown = [key for key in layer if key not in KEYS]
        if unknown:
            raise LohaError(f"unknown key {shown(unknown[0])} in loha; {ALLOWED}")
        merged.update({key: value for key, value in layer.items() if value is not None})
    try:
        window = Window(k=parse_k(merged.get("k", 3)), polling=parse_polling(merged.get("polling", 1)))
    except LohaError as error:
        raise LohaError(f"{error}; {ALLOWED}") from None
    return RequestOptions(
        window=window,
        view=_view(merged.get("view", "latent")),
        keep_tools=_keep_tools(merged.get("keep_tools", ())),
    )


def server_defaults() -> dict[str, Any]:
    """Return the options object that the launcher set for this server, or {}.

    Raises:
        LohaError: when the variable holds something else.
    """
    text = os.environ.get(DEFAULTS_VARIABLE, "")
    if not text:
        return {}
    try:
        return resolve_options(json.loads(text)).to_json()
    except (json.JSONDecodeError, LohaError) as error:
        raise LohaError(f"{DEFAULTS_VARIABLE} is not a valid options object: {error}") from error


def _view(value: Any) -> View:
    for view in VIEWS:
        if value == view:
            return view
    raise LohaError(f"view must be one of {', '.join(VIEWS)}, got {shown(value)}; {ALLOWED}")


def _keep_tools(value: Any) -> frozenset[str]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise LohaError(f"keep_tools must be a list of tool names, got {shown(value)}; {ALLOWED}")
    return frozenset(value)
