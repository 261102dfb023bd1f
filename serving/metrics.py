"""Prometheus counters of the server, visible on its /metrics.

Encoding happens in the engine's processes and requests are counted in the API processes. prometheus_client joins them
when PROMETHEUS_MULTIPROC_DIR names a folder before its first import; `loha serve` sees to that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from serving.account import Report


@cache
def _counters() -> dict[str, Any]:
    # Imported late: the folder variable must be set before prometheus_client is imported.
    from prometheus_client import Counter, Gauge

    def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Any:
        return Counter(f"loha_{name}", text, labels)

    return {
        "live": Gauge(
            "loha_engine_live",
            "1 when the model that reads latents runs in the engine",
            multiprocess_mode="max",
        ),
        "in_flight": Gauge(
            "loha_requests_in_flight",
            "POST requests whose answers are not finished, rendering included",
            multiprocess_mode="livesum",
        ),
        "observations": counter("encoded_observations", "Observations that went through the encoder"),
        "source": counter("encoder_source_tokens", "Encoder tokens of encoded observations"),
        "latents": counter("encoded_latents", "Latents that the encoder made, markers not counted"),
        "requests": counter("requests", "Answered chat requests", ("view",)),
        "full": counter("request_full_text_tokens", "Tokens of the answered requests' histories as full text"),
        "context": counter("request_context_tokens", "Positions that the decoder read for answered requests"),
        "request_latents": counter("request_latent_tokens", "Latents among the context of answered requests"),
        "new": counter("request_encoder_tokens_new", "Encoder tokens of observations new to the API process"),
    }


def mark_engine_live() -> None:
    """Note that the plugin's model was built in this process."""
    _counters()["live"].set(1)


@contextmanager
def in_flight() -> Iterator[None]:
    """Count a request as in flight while the block runs."""
    gauge = _counters()["in_flight"]
    gauge.inc()
    try:
        yield
    finally:
        gauge.dec()


def count_encoded(*, observations: int, source_tokens: int, latents: int) -> None:
    """Count one call of the encoder; called on one tensor-parallel rank only."""
    counters = _counters()
    counters["observations"].inc(observations)
    counters["source"].inc(source_tokens)
    counters["latents"].inc(latents)


def count_request(report: Report) -> None:
    """Count one answered request."""
    counters = _counters()
    counters["requests"].labels(view=report.options.view).inc()
    counters["full"].inc(report.full_text_tokens)
    counters["context"].inc(report.context_tokens)
    counters["request_latents"].inc(report.latent_tokens)
    counters["new"].inc(report.encoder_tokens_new)
