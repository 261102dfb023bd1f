"""A short form of `benchmarks/hostile_requests.py`: the same kinds of requests, smaller bodies."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from live_server import Server


def script() -> ModuleType:
    """Return the benchmark as a module."""
    path = Path(__file__).parents[2] / "benchmarks" / "hostile_requests.py"
    spec = importlib.util.spec_from_file_location("hostile_requests", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_hostile_requests_break_nothing_and_leak_nothing(server: Server) -> None:
    hostile = script()
    base_url = str(server.client.base_url).rstrip("/")
    report = asyncio.run(hostile.attack(hostile.Options(base_url=base_url, requests=100, megabytes=1)))
    assert report.failures == []
    assert report.honest_distinct == 8 and report.honest == 25
    statuses = {status for counts in report.statuses.values() for status in counts}
    assert {"200", "400", "cut"} <= statuses
    assert len(report.statuses) == 11
    assert set(report.routes) == set(hostile.ROUTES)
    assert all({"200", "400"} <= counts.keys() for counts in report.routes.values()), report.routes
