"""One OpenAI-compatible vLLM server as a benchmark sees it: its model, its tokenizer, its counters."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from loha.errors import LohaError

COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generated_tokens": "vllm:generation_tokens_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
    "encoder_tokens": "loha_encoder_source_tokens_total",
    "encoded_observations": "loha_encoded_observations_total",
    "encoded_latents": "loha_encoded_latents_total",
}
"""Short names of the engine's counters, which include what failed, preempted and repeated requests cost."""

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What a server says of its model."""

    name: str
    max_model_len: int | None
    """Longest context with the reply, in positions; None where the server does not say."""
    checkpoint: str | None = None
    """Hash of the served weights; None on servers that `loha serve` did not start."""


class Endpoint:
    """A server under its OpenAI base URL.

    Args:
        base_url: for instance `http://127.0.0.1:8000/v1`.
        api_key: sent as bearer token unless empty.
        timeout_s: longest silence of the server.
        connections: most requests at a time.
    """

    def __init__(self, base_url: str, *, api_key: str = "", timeout_s: float = 600.0, connections: int = 16) -> None:
        self.base_url = base_url.rstrip("/")
        self.client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        )

    @property
    def root(self) -> str:
        """Return the URL under which vLLM's own routes lie."""
        return self.base_url.removesuffix("/v1")

    async def served_model(self) -> ServedModel:
        """Ask for the served model.

        Raises:
            LohaError: when the server gives none.
        """
        return await served_model(self.client, f"{self.base_url}/models")

    async def version(self) -> str | None:
        """Return the server's version where it says."""
        try:
            response = await self.client.get(f"{self.root}/version")
            return str(response.json()["version"]) if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None

    async def tokenize(self, model: str, messages: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """Render and tokenize messages on the server, as full text.

        Args:
            model: served model.
            messages: of the chat.
            more: further fields of the request (`tools`, `add_generation_prompt`, `return_token_strs`).

        Raises:
            LohaError: when the server refuses or has no `/tokenize`.
        """
        url = f"{self.root}/tokenize"
        body = {"model": model, "messages": list(messages), "loha": {"view": "full"}, **more}
        try:
            response = await self.client.post(url, json=body)
        except httpx.TransportError as error:
            raise LohaError(f"no answer from {url} ({type(error).__name__}: {error}); is the server up?") from error
        if response.status_code != 200:
            raise LohaError(f"{url} answered HTTP {response.status_code}: {error_text(response)}")
        return response.json()

    async def counters(self) -> dict[str, float]:
        """Return the engine's counters by their short names; without those that the server does not have."""
        try:
            # With the slash: the route is a mounted application, which would redirect.
            response = await self.client.get(f"{self.root}/metrics/")
        except httpx.TransportError:
            return {}
        if response.status_code != 200:
            return {}
        totals: dict[str, float] = {}
        for name, value in _SAMPLE.findall(response.text):
            totals[name] = totals.get(name, 0.0) + float(value)
        return {short: totals[name] for short, name in COUNTERS.items() if name in totals}


async def served_model(client: httpx.AsyncClient, url: str) -> ServedModel:
    """Return the first model of an OpenAI-compatible server.

    Args:
        client: with credentials.
        url: of the list of models.

    Raises:
        LohaError: when the server gives none.
    """
    try:
        response = await client.get(url)
        response.raise_for_status()
        card = response.json()["data"][0]
        checkpoint = (card.get("loha") or {}).get("checkpoint")
        return ServedModel(name=str(card["id"]), max_model_len=card.get("max_model_len"), checkpoint=checkpoint)
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise LohaError(f"{url} gives no model ({type(error).__name__}: {error}); is the server up?") from error


def error_text(response: httpx.Response) -> str:
    """Return what a refusal says."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:300]
