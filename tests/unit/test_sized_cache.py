"""Caches of repeated text stay within their bytes, however large the texts are."""

from __future__ import annotations

import threading
import tracemalloc
from pathlib import Path

from loha.render import Renderer
from loha.sized_cache import SizedCache, ids_bytes
from loha.tokenizer_dir import load_tokenizer


def counted(max_bytes: int) -> tuple[SizedCache[str], list[str]]:
    calls: list[str] = []
    return SizedCache(lambda key: calls.append(key) or key.upper(), max_bytes=max_bytes, size=len), calls


def test_latest_entries_stay_and_the_oldest_go() -> None:
    cache, calls = counted(3 * 1_300)
    for key in ("a" * 500, "b" * 500, "c" * 500, "a" * 500, "d" * 500, "a" * 500, "b" * 500):
        assert cache(key) == key.upper()
    # Each entry takes some 1,250 bytes, so three fit: `a` was used again in time, `b` was not.
    assert [key[0] for key in calls] == ["a", "b", "c", "d", "b"]
    assert len(cache) == 3 and cache.bytes <= cache.max_bytes


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache, calls = counted(10_000)
    for key in ("small", "x" * 20_000, "x" * 20_000, "small"):
        cache(key)
    assert [key[0] for key in calls] == ["s", "x", "x"]
    assert len(cache) == 1


def test_threads_agree_and_keep_the_account() -> None:
    cache, _ = counted(20_000)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for i in range(300):
            key = "k" * ((seed * 7 + i * 13) % 97)
            if cache(key) != key.upper():
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cache.bytes == sum(size for _, size in cache._entries.values()) <= cache.max_bytes


def test_the_size_of_ids_is_what_python_takes() -> None:
    tracemalloc.start()
    ids = tuple(range(1_000, 51_000))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 * taken <= ids_bytes(len(ids)) <= 1.3 * taken


def test_large_observations_do_not_fill_the_memory(shared_data: Path) -> None:
    renderer = Renderer(load_tokenizer(shared_data / "qwen3"), cache_bytes=1 << 20)
    bodies = [f"{number} " + "abcdefgh \n" * 4_000 for number in range(10)]
    tracemalloc.start()
    for body in bodies:
        renderer.render(
            [{"role": "user", "content": "t"}, {"role": "assistant", "content": "a"}, {"role": "tool", "content": body}]
        )
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert left < 2 << 20, "ten observations of 40 KB take 5 MB when all are kept"
