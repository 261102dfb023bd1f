"""The teacher cache: its bytes, its precision, and every way in which it can be the wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from acd.cache_teacher import main, verify_cache, write_cache
from acd.config import Config
from acd.loss import Targets
from acd.parts import make_accelerator
from acd.teacher import top_candidates
from acd.teacher_cache import SHARD_GLOB, TeacherCache, pack_targets, unpack_targets, write_shard
from loha.command_line import run_reporting
from loha.errors import LohaError
from tests.acd_world import World, full_disk, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("cache"), trajectories=4)
    write(world.config())
    return world


def write(config: Config) -> dict[str, object]:
    return write_cache(config, make_accelerator(config))


def random_targets(n: int, v: int, c: int, *, sharpness: float = 3.0, seed: int = 0) -> Targets:
    g = torch.Generator().manual_seed(seed)
    return top_candidates(torch.randn(n, 8, generator=g), torch.randn(v, 8, generator=g) * sharpness, c)


def test_bytes_per_position() -> None:
    stored = pack_targets(random_targets(47, 500, 64))
    assert stored.bytes_per_position == 274
    assert {name: (a.dtype.name, a.shape) for name, a in stored.arrays().items()} == {
        "ids_low": ("uint16", (47, 64)),
        "ids_high": ("uint8", (47, 16)),
        "logp": ("float16", (47, 64)),
        "tail": ("float16", (47,)),
    }


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, (1 << 18) - 1), min_size=7, max_size=7), min_size=1, max_size=5))
def test_every_18_bit_id_survives(rows: list[list[int]]) -> None:
    """C = 7 also leaves a byte of high bits partly filled."""
    ids = torch.tensor(rows)
    flat = torch.full(ids.shape, -3.0)
    unpacked = unpack_targets(pack_targets(Targets(ids, flat, flat[:, 0])))
    assert torch.equal(unpacked.ids_NC, ids)


def test_ids_of_19_bits_are_refused() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(LohaError, match="18 bits"):
        pack_targets(Targets(torch.tensor([[1 << 18]]), one, one[:, 0]))


@pytest.mark.parametrize("sharpness", [0.3, 3.0, 12.0])
def test_storage_costs_less_than_a_millionth_of_a_nat(sharpness: float) -> None:
    exact = random_targets(500, 5000, 64, sharpness=sharpness)
    stored = unpack_targets(pack_targets(exact))
    p = torch.cat([exact.logp_NC, exact.tail_N[:, None]], 1).double()
    q = torch.cat([stored.logp_NC, stored.tail_N[:, None]], 1).double()
    kl_N = (p.exp() * torch.where(p > -80, p - q, 0.0)).sum(1)
    torch.testing.assert_close(q.logsumexp(1), torch.zeros(500).double(), atol=1e-6, rtol=0)
    assert float(kl_N.mean()) < 1e-6 and float(kl_N.max()) < 1e-5
    assert float(kl_N.min()) > -1e-6


def test_a_tail_of_nothing_survives() -> None:
    targets = Targets(torch.tensor([[5, 9]]), torch.tensor([[0.0, -200.0]]), torch.tensor([float("-inf")]))
    stored = unpack_targets(pack_targets(targets))
    assert stored.logp_NC.tolist() == [[0.0, -200.0]] and stored.tail_N.tolist() == [float("-inf")]


def test_written_cache_is_what_the_base_predicts(world: World) -> None:
    cache = TeacherCache(world.config().teacher.cache or "")
    index = json.loads((cache.folder / "index.json").read_text())
    assert [s.path.name for s in cache.shards] == list(index["shards"]) and len(cache.shards) == 2
    result = verify_cache(world.config(), make_accelerator(world.config()), 60)
    assert result["positions"] == 60 and result["kl_mean"] < 1e-6 and result["same_top_1"] == 1.0


def test_nothing_is_done_twice(world: World) -> None:
    folder = Path(world.config().teacher.cache or "")
    before = {path: path.stat().st_mtime_ns for path in folder.glob(SHARD_GLOB)}
    assert write(world.config())["written"] == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob(SHARD_GLOB)} == before


def test_more_trajectories_add_shards(world: World, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    few = world.config(data={"limit": 3}, teacher={"cache": cache})
    assert write(few)["written"] == 1
    assert write(world.config(teacher={"cache": cache}))["written"] == 1


def test_candidates_are_clipped_for_tiny_vocabularies(world: World, tmp_path: Path) -> None:
    wide = world.config(teacher={"cache": str(tmp_path / "wide"), "candidates": 100_000})
    assert write(wide)["candidates"] == 271  # of 272 rows
    assert write(wide)["written"] == 0


def test_truncated_shard_is_named_with_its_remedy(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = world.write_config("truncated", teacher={"cache": str(tmp_path / "cache")})
    main(["--config", str(config)])
    shard = sorted((tmp_path / "cache").glob(SHARD_GLOB))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    capsys.readouterr()
    for words in ([], ["--verify", "5"]):
        assert run_reporting(lambda words=words: main(["--config", str(config), *words])) == 2  # type: ignore[misc]
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(lines) == 1 and str(shard) in lines[0] and "delete it and run acd.cache_teacher again" in lines[0]


def test_wrong_tokenizer_is_named_with_both_sides(world: World, tmp_path: Path) -> None:
    fingerprint = TeacherCache(world.config().teacher.cache or "").shards[0].fingerprint
    with pytest.raises(LohaError, match=r"tokenizer differs: .*shard-00000.*") as error:
        TeacherCache(world.config().teacher.cache or "", expected=fingerprint | {"tokenizer": "f" * 64})
    assert "ffffffffffff" in str(error.value) and str(fingerprint["tokenizer"])[:12] in str(error.value)


@pytest.mark.parametrize("part", ["base_weights", "chat_template", "layout_version"])
def test_every_part_of_the_fingerprint_counts(world: World, part: str) -> None:
    fingerprint = TeacherCache(world.config().teacher.cache or "").shards[0].fingerprint
    assert set(fingerprint) == {"base_weights", "tokenizer", "chat_template", "layout_version"}
    with pytest.raises(LohaError, match="differs"):
        TeacherCache(world.config().teacher.cache or "", expected=fingerprint | {part: 77})


def test_changed_trajectory_is_refused(world: World) -> None:
    cache = TeacherCache(world.config().teacher.cache or "")
    with pytest.raises(LohaError, match=r"'t000' was cached with other assistant tokens; run acd.cache_teacher again"):
        cache.read("t000", "0" * 16)
    with pytest.raises(LohaError, match="'nobody' is not in the cache"):
        cache.read("nobody", "0" * 16)


def test_folder_without_cache(tmp_path: Path) -> None:
    with pytest.raises(LohaError, match="holds no teacher cache; write one with"):
        TeacherCache(tmp_path)


def test_shards_of_another_size_are_refused(world: World, tmp_path: Path) -> None:
    for number, c in enumerate((5, 6)):
        parts = [(f"t{number}", "0" * 16, pack_targets(random_targets(3, 20, c)))]
        write_shard(tmp_path / f"shard-{number:05d}-0.safetensors", parts, fingerprint={}, vocabulary=20, notes={})
    with pytest.raises(LohaError, match="holds 6 candidates a position, expected 5"):
        TeacherCache(tmp_path)


def test_a_shard_that_does_not_fit_the_disk(tmp_path: Path) -> None:
    path, parts = tmp_path / "shard-00000-0.safetensors", [("t", "0" * 16, pack_targets(random_targets(300, 20, 5)))]
    with full_disk(after=2000), pytest.raises(LohaError, match=r"cannot be written: .* is there space"):
        write_shard(path, parts, fingerprint={}, vocabulary=20, notes={})
    assert not list(tmp_path.iterdir())


def test_reading_one_trajectory_equals_the_file(world: World) -> None:
    cache = TeacherCache(world.config().teacher.cache or "")
    shard = cache.shards[0]
    arrays = load_file(shard.path)
    for trajectory, place in shard.trajectories.items():
        stored = cache.read_stored(trajectory, place.assistant_hash)
        rows = slice(place.start, place.start + place.length)
        assert all(np.array_equal(stored.arrays()[name], arrays[name][rows]) for name in arrays)
