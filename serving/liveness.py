"""Ask a running server whether latent observations work in it, from the HTTP body to the encoder in the engine.

vLLM logs and ignores a plugin that fails to load, so a healthy server proves nothing.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

import httpx

from serving.endpoint import error_text

_OBSERVATION = "".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(12))


class PluginNotLive(RuntimeError):
    """The server answers, but a part of the plugin does not work; the message names the part."""


class SelfTestFailed(RuntimeError):
    """The server computes something else than its checkpoint says; the message says how far off."""


def check_plugin_live(client: httpx.Client, model: str) -> None:
    """Send one latent request and look for its traces in the answer and in the engine's counters.

    Args:
        client: with the server's base URL and credentials.
        model: name of the served model.

    Raises:
        PluginNotLive: naming what is missing.
    """
    before = read_counter(client, "loha_encoded_observations_total")
    if read_counter(client, "loha_engine_live") < 1:
        raise PluginNotLive("no engine process has built the model that reads latents (loha_engine_live is not 1)")
    response = client.post("/v1/chat/completions", json=probe_request(model))
    if response.status_code != 200:
        raise PluginNotLive(f"a latent request was answered with HTTP {response.status_code}: {error_text(response)}")
    account = (response.json().get("usage") or {}).get("loha")
    if not account:
        raise PluginNotLive("the answer carries no usage.loha: the middleware or the chat renderer is not installed")
    if account["latent_tokens"] < 1:
        raise PluginNotLive(
            f"the chat renderer made no latents of a {len(_OBSERVATION)}-character observation: {account}"
        )
    if read_counter(client, "loha_encoded_observations_total") <= before:
        raise PluginNotLive("the engine did not run the encoder (loha_encoded_observations_total did not rise)")


def read_counter(client: httpx.Client, name: str, labels: str = "", *, timeout_s: float | None = None) -> float:
    """Return the value of a metric on /metrics, summed over its label sets; 0 when it is absent.

    Args:
        client: with the server's base URL.
        name: of the metric.
        labels: text that the label set must contain, for instance `view="latent"`.
        timeout_s: longest silence of the server; the client's own when left out.
    """
    pattern = re.compile(rf"^{re.escape(name)}(?:\{{(?P<labels>[^}}]*)\}})? (?P<value>\S+)$", re.MULTILINE)
    text = client.get("/metrics/", timeout=timeout_s or client.timeout).text
    return sum(float(m["value"]) for m in pattern.finditer(text) if labels in (m["labels"] or ""))


def probe_request(model: str) -> dict[str, Any]:
    """Return a chat request with one latent observation, another each time: a shared encoder cache outlives servers."""
    call = {"id": "probe", "type": "function", "function": {"name": "probe", "arguments": json.dumps({})}}
    return {
        "model": model,
        "messages": [
            {"role": "user", "content": "probe"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "probe", "content": f"{_OBSERVATION}{time.time_ns()}"},
        ],
        "max_tokens": 1,
        "temperature": 0,
        "loha": {"k": 0, "polling": 1, "view": "latent"},
    }
