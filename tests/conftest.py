"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real test data, named by LOHA_SHARED_DATA; tests that need it are skipped elsewhere."""
    folder = os.environ.get("LOHA_SHARED_DATA", "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("LOHA_SHARED_DATA does not name the shared data folder")
    return Path(folder)
