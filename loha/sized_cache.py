"""A least-recently-used cache that is bounded by the memory that its entries take, not by their number."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")
_ENTRY_BYTES = 200
"""Of the key tuple and the dict's own record."""


class SizedCache(Generic[Value]):
    """A function of texts that remembers its latest results. Safe to call from several threads.

    `functools.lru_cache` counts entries: a few thousand observations may be 1 MB or 10 GB.

    Args:
        function: pure; its arguments are strings and flags.
        max_bytes: of all entries, keys included.
        size: bytes of a result.
    """

    def __init__(self, function: Callable[..., Value], *, max_bytes: int, size: Callable[[Value], int]) -> None:
        self._function = function
        self._size = size
        self._entries: OrderedDict[tuple[str | bool, ...], tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.max_bytes = max_bytes
        self.bytes = 0
        """What the entries take now."""

    def __call__(self, *key: str | bool) -> Value:
        """Return `function(*key)`."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
                return found[0]
        value = self._function(*key)
        size = _ENTRY_BYTES + sum(map(sys.getsizeof, key)) + self._size(value)
        if size <= self.max_bytes:
            with self._lock:
                self._add(key, value, size)
        return value

    def __len__(self) -> int:
        return len(self._entries)

    def _add(self, key: tuple[str | bool, ...], value: Value, size: int) -> None:
        if key in self._entries:  # another thread was faster
            return
        self._entries[key] = (value, size)
        self.bytes += size
        while self.bytes > self.max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.bytes -= freed


def ids_bytes(count: int) -> int:
    """Return the bytes of a tuple of so many token ids: a pointer and an int object each."""
    return 56 + 36 * count
