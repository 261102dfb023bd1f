"""The account of one request: what it asked for, what the renderer made of it, what its answer reports."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any

from loha.layout import format_k
from loha.rendering import Rendering
from serving.options import RequestOptions


@dataclass(frozen=True, kw_only=True)
class Report:
    """Token counts of one rendered request."""

    options: RequestOptions
    observations: int
    full_text_tokens: int
    """Length of the history as full text."""
    context_tokens: int
    """Positions that the decoder reads."""
    latent_tokens: int
    encoder_tokens: int
    """Encoder tokens behind these latents, encoded now or before."""
    encoder_tokens_new: int
    """Encoder tokens of observations that this API process meets for the first time."""

    @classmethod
    def of(cls, rendering: Rendering, options: RequestOptions, encoder_tokens_new: int) -> Report:
        """Return the report of a rendering."""
        return cls(
            options=options,
            observations=rendering.observations,
            full_text_tokens=rendering.full_text_tokens,
            context_tokens=rendering.context_tokens,
            latent_tokens=rendering.latent_tokens,
            encoder_tokens=sum(len(latent.encoder_ids) for latent in rendering.latents),
            encoder_tokens_new=encoder_tokens_new,
        )

    def plus(self, other: Report) -> Report:
        """Return the sums over two renderings of one request."""
        names = [each.name for each in fields(self) if each.name != "options"]
        return replace(other, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def usage(self, cached_tokens: int | None = None) -> dict[str, Any]:
        """Return the `usage.loha` object.

        Args:
            cached_tokens: prompt tokens that the engine took from its prefix cache, where it says so.
        """
        window = self.options.window
        usage: dict[str, Any] = {
            "k": window.k if window.k is not None else format_k(None),
            "polling": window.polling,
            "view": self.options.view,
            "observations": self.observations,
            "full_text_tokens": self.full_text_tokens,
            "context_tokens": self.context_tokens,
            "latent_tokens": self.latent_tokens,
            "encoder_tokens": self.encoder_tokens,
            "encoder_tokens_new": self.encoder_tokens_new,
            "effective_ratio": round(self.full_text_tokens / max(1, self.context_tokens), 4),
        }
        if cached_tokens is not None:
            usage["cached_tokens"] = cached_tokens
        return usage


@dataclass
class RequestAccount:
    """Passed from the middleware, which sees the body, to the renderer, which sees the messages, and back."""

    model_options: dict[str, Any] | None = None
    """What the suffix of the model's name asks for."""

    body_options: Any = None
    """The top-level `loha` value of the request body, unchecked."""

    counted: bool = True
    """Whether the request generates: others neither count as answered nor as meeting observations."""

    report: Report | None = None
    """Set by the renderer."""

    def add(self, report: Report) -> None:
        """Take in the report of a rendering; a request may hold several conversations."""
        self.report = report if self.report is None else self.report.plus(report)

    def layers(self, template_options: Any) -> tuple[Any, Any, Any]:
        """Return what the request asks for, weakest first.

        Args:
            template_options: `loha` among its chat template's arguments.
        """
        return self.model_options, template_options, self.body_options


CURRENT: ContextVar[RequestAccount | None] = ContextVar("loha_request_account", default=None)
"""The account of the request that the running task serves; None outside the middleware."""
