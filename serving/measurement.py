"""What a sweep and a replay benchmark share: clients that run together, and a folder that says what it measures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from loha.errors import LohaError


async def run_together(clients: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first failure stops the others.

    Raises:
        LohaError: of the client that failed.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client)
    except* LohaError as errors:
        raise errors.exceptions[0] from None


def measures_the_same(path: Path, settings: Mapping[str, Any], *, kind: str) -> bool:
    """Tell whether a folder already holds this measurement; False when it holds none yet.

    Args:
        path: the settings file in the folder; it may hold more than is compared.
        settings: that results may only be put together with when they are equal.
        kind: names the measurement in the error.

    Raises:
        LohaError: when the folder holds another one; names the first difference.
    """
    if not path.is_file():
        return False
    before = json.loads(path.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if before.get(name) != value:
            raise LohaError(
                f"{path.parent} holds a {kind} with {name} {before.get(name)!r}, this one has {value!r}: "
                "choose another --out or remove the folder"
            )
    return True
