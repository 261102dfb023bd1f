"""The launcher's command line and environment, and the questions it asks a server before it says ready."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from loha.errors import LohaError
from serving.launch import Options, check_arguments, server_command, server_environment
from serving.liveness import PluginNotLive, check_plugin_live, read_counter
from serving.options import DEFAULTS_VARIABLE, RequestOptions, resolve_options
from serving.state import CHECKPOINT_VARIABLE, FOLDER_VARIABLE

OPTIONS = Options(checkpoint=Path("models/tiny"), vllm_args=("--api-key", "secret", "--seed=3"))


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_command_line() -> None:
    command = server_command(OPTIONS, on_cpu=True)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert value_of(command, "--tokenizer-mode") == "loha"
    assert value_of(command, "--served-model-name") == "tiny"
    assert value_of(command, "--tool-call-parser") == "hermes" and "--enable-auto-tool-choice" in command
    assert int(value_of(command, "--block-size")) % 32 == 0 and "--enforce-eager" in command
    assert json.loads(value_of(command, "--limit-mm-per-prompt"))["observation"] > 5000
    assert command[-3:] == ["--api-key", "secret", "--seed=3"]  # last, so that they win


@pytest.mark.parametrize("name", ["--port", "--host", "--served-model-name"])
def test_vllm_arguments_that_move_the_server_are_refused(name: str) -> None:
    for words in ((name, "9"), (f"{name}=9",), (name[:-1], "9"), ("--" + name[2:].replace("-", "_"), "9")):
        with pytest.raises(LohaError, match=rf"after -- is not passed on: give the launcher's own {name}"):
            check_arguments(Options(checkpoint=Path("m"), vllm_args=("--seed=3", *words)))


def test_other_vllm_arguments_pass_and_a_body_limit_of_nothing_does_not() -> None:
    check_arguments(OPTIONS)
    check_arguments(
        Options(checkpoint=Path("m"), vllm_args=("--root-path", "/port", "--hf-overrides", "{}", "-pp", "1"))
    )
    with pytest.raises(LohaError, match="--max-body-mib must be at least 1, got 0"):
        check_arguments(Options(checkpoint=Path("m"), max_body_mib=0))


def test_command_line_on_a_gpu_and_without_tools() -> None:
    options = Options(checkpoint=Path("m"), tool_call_parser="none", max_model_len=4096)
    command = server_command(options, on_cpu=False)
    assert not {"--block-size", "--enforce-eager", "--tool-call-parser", "--skip-mm-profiling"} & set(command)
    assert value_of(command, "--max-model-len") == "4096"


def test_environment_carries_the_defaults_and_a_clean_metrics_folder(tmp_path: Path) -> None:
    environment = server_environment(OPTIONS, RequestOptions(), str(tmp_path), "abc")
    assert resolve_options(json.loads(environment[DEFAULTS_VARIABLE])) == RequestOptions()
    assert environment["PROMETHEUS_MULTIPROC_DIR"] == environment[FOLDER_VARIABLE] == str(tmp_path)
    assert environment[CHECKPOINT_VARIABLE] == "abc"
    assert environment["VLLM_CPU_KVCACHE_SPACE"].isdecimal()


def test_the_plugin_imports_nothing_heavy_and_registers_only_when_asked() -> None:
    program = "import sys, serving.plugin; print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


METRICS = """\
# HELP loha_engine_live x
loha_engine_live {live}
loha_encoded_observations_total{{pid="1"}} {encoded}
loha_encoded_observations_total{{pid="2"}} 2.0
loha_encoded_observations_total_created 9.0
"""


def foreign_server(*, live: float = 1, encodes: bool = True, usage: Any = None, status: int = 200) -> httpx.Client:
    """A server that answers as vLLM does, with parts of the plugin missing."""
    encoded = 0

    def handle(request: httpx.Request) -> httpx.Response:
        nonlocal encoded
        if request.url.path.startswith("/metrics"):
            return httpx.Response(200, text=METRICS.format(live=live, encoded=encoded))
        encoded += encodes
        if status != 200:
            return httpx.Response(status, json={"error": {"message": "no tools here"}})
        return httpx.Response(200, json={"usage": {"prompt_tokens": 3} | (usage or {})})

    return httpx.Client(transport=httpx.MockTransport(handle), base_url="http://server")


GOOD = {"loha": {"latent_tokens": 4}}


def test_counters_are_summed_over_processes_and_missing_ones_are_zero() -> None:
    client = foreign_server()
    assert read_counter(client, "loha_encoded_observations_total") == 2.0
    assert read_counter(client, "loha_encoded_observations_total", 'pid="1"') == 0.0
    assert read_counter(client, "loha_other_total") == 0.0


def test_a_live_plugin_passes() -> None:
    check_plugin_live(foreign_server(usage=GOOD), "m")


@pytest.mark.parametrize(
    ("server", "names"),
    [
        ({"live": 0, "usage": GOOD}, "loha_engine_live"),
        ({"usage": {}}, "usage.loha"),
        ({"usage": {"loha": {"latent_tokens": 0}}}, "made no latents"),
        ({"usage": GOOD, "encodes": False}, "did not run the encoder"),
        ({"status": 400}, "HTTP 400: no tools here"),
    ],
)
def test_whatever_is_missing_is_named(server: dict[str, Any], names: str) -> None:
    with pytest.raises(PluginNotLive, match=names):
        check_plugin_live(foreign_server(**server), "m")
