"""One real server for all end-to-end tests, and what its replies are compared with."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_server*.py"]
else:
    from histories import growing
    from live_server import NEW_TOKENS, Reference, Server, quiet_environment, running_server
    from tiny_checkpoint import TinyCheckpoint, build

    from loha.reference import ReferenceModel


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A tiny serving checkpoint."""
    return build(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def reference(tiny: TinyCheckpoint) -> Reference:
    """The reference on it."""
    return Reference(ReferenceModel.from_checkpoint(tiny.serving))


@pytest.fixture(scope="session")
def full_text_histories() -> list[list[dict[str, Any]]]:
    """What stock vLLM is asked."""
    return growing(10, seed=1000)


@pytest.fixture(scope="session")
def server(tiny: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`loha serve` on the tiny checkpoint."""
    with running_server(tiny.serving, tmp_path_factory.mktemp("server") / "server.log") as running:
        yield running


@pytest.fixture(scope="session")
def stock_replies(
    server: Server,
    tiny: TinyCheckpoint,
    full_text_histories: list[Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[list[int]]:
    """Greedy replies of stock vLLM, serving the merged decoder alone, to the full-text histories."""
    folder = tmp_path_factory.mktemp("stock")
    (folder / "histories.json").write_text(json.dumps(full_text_histories))
    program = str(Path(__file__).with_name("stock_vllm.py"))
    paths = [str(tiny.decoder_only), str(folder / "histories.json"), str(folder / "replies.json")]
    done = subprocess.run(
        [sys.executable, program, *paths, str(NEW_TOKENS)], env=quiet_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "replies.json").read_text())
