"""The teacher cache: its bytes, its precision, and every way in which it can be the wrong one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from acd import cache_teacher
from acd.cache_teacher import main, verify_cache, write_cache
from acd.command import student_config
from acd.config import Config
from acd.corpus import Corpus
from acd.loss import Targets
from acd.parts import make_accelerator
from acd.plan import view_rule
from acd.process_group import WAIT
from acd.rows import RowBuilder, TrainingRow
from acd.targets import open_targets
from acd.teacher import top_candidates
from acd.teacher_cache import SHARD_GLOB, Key, TeacherCache, pack_targets, unpack_targets, write_shard
from acd.views import ViewBuilder
from loha.command_line import run_reporting
from loha.errors import LohaError
from loha.student import build_renderer
from tests.acd_world import World, full_disk, make_world
from tests.tiny_models import write_decoder


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
    digest = Corpus(world.trajectories).entry("t000").digest
    with pytest.raises(LohaError, match=r"'t000' was cached with other assistant tokens; run acd.cache_teacher again"):
        cache.read(Key("t000", digest, "0" * 16))
    with pytest.raises(LohaError, match=r"'nobody' is not in the cache; run acd.cache_teacher again"):
        cache.read(Key("nobody", digest, "0" * 16))


def with_other_observations(world: World, folder: Path) -> Path:
    """The same assistant turns after other tool results, as an import of edited logs gives them."""
    lines = [json.loads(line) for line in world.trajectories.read_text().splitlines()]
    for message in (m for line in lines for m in line["messages"] if m["role"] == "tool"):
        message["content"] = "other text\n" + message["content"]
    path = folder / "other.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def row_of(config: Config, number: int) -> TrainingRow:
    """The full-text view of one trajectory as a row, with its cached targets."""
    student = student_config(config)
    renderer = build_renderer(student)
    corpus, views = Corpus(config.data.trajectories), ViewBuilder(renderer, view_rule(config))
    entry = corpus.entries()[number]
    full = next(piece for piece in views.pieces(corpus[entry.id], 0) if piece.view == "full")
    return RowBuilder(corpus, views, open_targets(config, student, renderer)).build((full,))


def test_a_changed_context_is_refused(world: World, tmp_path: Path) -> None:
    other = world.config(data={"trajectories": str(with_other_observations(world, tmp_path))})
    with pytest.raises(LohaError, match=r"'t000' was cached with other contents; run acd.cache_teacher again"):
        row_of(other, 0)
    with pytest.raises(LohaError, match=r"was cached with other contents; run acd.cache_teacher again"):
        verify_cache(other, make_accelerator(other), 5)


def test_old_and_new_shards_side_by_side(world: World, tmp_path: Path) -> None:
    """Whichever sorts last: each set of trajectories reads the targets of its own contexts."""
    both, file = {"cache": str(tmp_path / "both")}, str(with_other_observations(world, tmp_path))
    old, new = world.config(teacher=both), world.config(data={"trajectories": file}, teacher=both)
    assert write(old)["written"] == 2 and write(new)["written"] == 2
    assert len(TeacherCache(both["cache"])) == 8
    alone = world.config(data={"trajectories": file}, teacher={"cache": str(tmp_path / "alone")})
    write(alone)
    for config, reference in ((old, world.config()), (new, alone)):
        assert verify_cache(config, make_accelerator(config), 60)["kl_mean"] < 1e-6
        for number in range(4):
            got, expected = row_of(config, number).anchor.targets, row_of(reference, number).anchor.targets
            assert got is not None and expected is not None
            assert torch.equal(got.ids_NC, expected.ids_NC) and torch.equal(got.logp_NC, expected.logp_NC)


def test_shards_of_an_older_format_are_refused(tmp_path: Path) -> None:
    shard = tmp_path / "shard-00000-0.safetensors"
    parts = [(Key("t", "1" * 16, "0" * 16), pack_targets(random_targets(3, 20, 5)))]
    write_shard(shard, parts, fingerprint={}, vocabulary=20, notes={})
    about = read_about(shard) | {"format": 1, "trajectories": [["t", 0, 3, "0" * 16]]}
    save_file(load_file(shard), shard, metadata={"teacher_cache": json.dumps(about)})
    with pytest.raises(LohaError, match=r"format 1, this version reads 2\); delete it and run acd.cache_teacher again"):
        TeacherCache(tmp_path)


def read_about(shard: Path) -> dict[str, object]:
    with safe_open(shard, framework="np") as file:
        return json.loads(file.metadata()["teacher_cache"])


def test_ranks_that_finish_early_wait_for_the_others(world: World) -> None:
    """As long as those of a training run, not NCCL's ten minutes."""
    for accelerator in (cache_teacher.make_accelerator(), make_accelerator(world.config())):
        assert accelerator.init_handler is not None and accelerator.init_handler.timeout == WAIT
        assert WAIT.total_seconds() >= 3600


def test_a_teacher_of_another_tokenizer_is_refused(world: World, tmp_path: Path) -> None:
    teacher = write_decoder(tmp_path / "teacher", seed=7)
    definition = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = definition["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (teacher / "tokenizer.json").write_text(json.dumps(definition))
    config = with_teacher(world, tmp_path, teacher)
    with pytest.raises(LohaError, match=rf"teacher.model {teacher} and the base .* have different tokenizers"):
        write(config)
    assert not (tmp_path / "other").exists()


def test_another_teacher_of_the_same_tokens(world: World, tmp_path: Path) -> None:
    config = with_teacher(world, tmp_path, write_decoder(tmp_path / "teacher", seed=7))
    assert write(config)["written"] == 2
    assert verify_cache(config, make_accelerator(config), 20)["kl_mean"] < 1e-6


def test_ids_beyond_the_head_are_refused(world: World, tmp_path: Path) -> None:
    """Before hours of writing, and on reading a cache that was written all the same."""
    config = with_teacher(world, tmp_path, write_decoder(tmp_path / "teacher", seed=7, rows=300))
    with pytest.raises(LohaError, match=r"has 300 token ids, the base .* only 272"):
        write(config)
    copy = tmp_path / "copy"
    copy.mkdir()
    for shard in Path(world.config().teacher.cache or "").glob(SHARD_GLOB):
        about = read_about(shard) | {"vocabulary": 300}
        save_file(load_file(shard), copy / shard.name, metadata={"teacher_cache": json.dumps(about)})
    with pytest.raises(LohaError, match=r"shard-00000-.*: its teacher has 300 token ids, the student's head only 272"):
        row_of(world.config(teacher={"cache": str(copy)}), 0)


def with_teacher(world: World, folder: Path, teacher: Path) -> Config:
    anchor = str(world.config().teacher.cache)
    return world.config(teacher={"model": str(teacher), "cache": str(folder / "other"), "anchor_cache": anchor})


def test_folder_without_cache(tmp_path: Path) -> None:
    with pytest.raises(LohaError, match="holds no teacher cache; write one with"):
        TeacherCache(tmp_path)


def test_shards_of_another_size_are_refused(world: World, tmp_path: Path) -> None:
    for number, c in enumerate((5, 6)):
        parts = [(Key(f"t{number}", "1" * 16, "0" * 16), pack_targets(random_targets(3, 20, c)))]
        write_shard(tmp_path / f"shard-{number:05d}-0.safetensors", parts, fingerprint={}, vocabulary=20, notes={})
    with pytest.raises(LohaError, match="holds 6 candidates a position, expected 5"):
        TeacherCache(tmp_path)


def test_a_shard_that_does_not_fit_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000-0.safetensors"
    parts = [(Key("t", "1" * 16, "0" * 16), pack_targets(random_targets(300, 20, 5)))]
    with full_disk(after=2000), pytest.raises(LohaError, match=r"cannot be written: .* is there space"):
        write_shard(path, parts, fingerprint={}, vocabulary=20, notes={})
    assert not list(tmp_path.iterdir())


def test_reading_one_trajectory_equals_the_file(world: World) -> None:
    cache = TeacherCache(world.config().teacher.cache or "")
    shard = cache.shards[0]
    arrays = load_file(shard.path)
    for key, place in shard.trajectories.items():
        stored = cache.read_stored(key)
        rows = slice(place.start, place.start + place.length)
        assert all(np.array_equal(stored.arrays()[name], arrays[name][rows]) for name in arrays)
