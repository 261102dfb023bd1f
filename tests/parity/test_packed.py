"""Packed equals separate, live equals cached, and read-back questions change nothing but their own term."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from acd.cache_teacher import write_cache
from acd.config import Config, LossConfig
from acd.corpus import Corpus
from acd.packing import Piece, Row
from acd.parts import load_student, make_accelerator
from acd.plan import view_rule
from acd.rows import RowBuilder, TargetSource
from acd.step import AcdModel
from acd.targets import open_targets
from acd.train import _backward, _weights
from acd.views import ViewBuilder
from tests.acd_world import World, make_world
from tests.tolerances import PACKED_GRADIENT, PACKED_LOSS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("packed"), trajectories=3)
    write_cache(world.config(), make_accelerator(world.config()))
    return world


@pytest.fixture(scope="module")
def model(world: World) -> AcdModel:
    return AcdModel(
        load_student(world.config(model={"checkpointing": False}), CPU), LossConfig(chunk=50), candidates=64
    )


def builder(world: World, model: AcdModel, config: Config, *, live: bool = False) -> RowBuilder:
    corpus = Corpus(config.data.trajectories)
    views = ViewBuilder(model.student.renderer(), view_rule(config))
    source = TargetSource() if live else open_targets(config, model.student.config, model.student.renderer())
    return RowBuilder(corpus, views, source)


def pieces(rows: RowBuilder, epoch: int = 0) -> list[Piece]:
    return [p for entry in rows.corpus.entries() for p in rows.views.pieces(rows.corpus[entry.id], epoch)]


def run(model: AcdModel, rows: RowBuilder, packed: list[Row]) -> tuple[Tensor, dict[str, Tensor]]:
    """Sums of the terms over rows, and the gradients of their sum."""
    model.zero_grad()
    total = torch.zeros(3, dtype=torch.float64)
    for row in packed:
        sums = model(rows.build(row))
        sums.sum().backward()
        total += sums.detach().double()
    return total, {name: p.grad.clone() for name, p in model.student.trainable().items() if p.grad is not None}


def assert_same(a: tuple[Tensor, dict[str, Tensor]], b: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=PACKED_LOSS, atol=0)
    assert a[1].keys() == b[1].keys()
    for name, grad in b[1].items():
        scale = float(grad.abs().max())
        torch.testing.assert_close(a[1][name], grad, atol=PACKED_GRADIENT * max(1.0, scale), rtol=0)


@pytest.mark.parametrize("training", [True, False])
def test_packed_equals_separate(world: World, model: AcdModel, training: bool) -> None:
    """One row with six pieces, two rows with mixed views, and six rows give the same losses and gradients."""
    rows = builder(world, model, world.config(readback={"share": 0.2}))
    all_pieces = pieces(rows)
    assert {p.view for p in all_pieces} == {"latent", "full"} and any(p.answers for p in all_pieces)
    model.train(training)
    separate = run(model, rows, [(piece,) for piece in all_pieces])
    assert_same(run(model, rows, [tuple(all_pieces)]), separate)
    assert_same(run(model, rows, [tuple(all_pieces[::2]), tuple(all_pieces[1::2])]), separate)


def test_eight_rows_of_one_piece_equal_one_row_of_eight(world: World, model: AcdModel) -> None:
    """Accumulation over eight micro-steps, with a step's own counts as divisors, gives the gradient of one."""
    config = world.config(run={"epochs": 2})
    rows = builder(world, model, config)
    eight = (pieces(rows) + pieces(rows, epoch=1))[:8]
    assert len(eight) == 8
    steps = []
    for packed in ([tuple(eight)], [(piece,) for piece in eight]):
        model.zero_grad()
        built = [rows.build(row) for row in packed]
        counts = tuple(sum(column) for column in zip(*(row.counts() for row in built), strict=True))
        accelerator = make_accelerator(config)
        sums = _backward(model.train(), built, accelerator, _weights(counts, config, accelerator))
        steps.append((sums, {n: p.grad.clone() for n, p in model.student.trainable().items() if p.grad is not None}))
    assert_same(steps[1], steps[0])


def test_checkpointing_changes_nothing(world: World, model: AcdModel) -> None:
    rows = builder(world, model, world.config())
    row = [tuple(pieces(rows)[:4])]
    plain = run(model.train(), rows, row)
    student = load_student(world.config(model={"mlp_chunks": 3}), CPU)
    assert_same(run(AcdModel(student, model.loss, candidates=64).train(), rows, row), plain)


def test_live_teacher_equals_cache(world: World, model: AcdModel) -> None:
    """Up to the cache's fp16; also where a latent view is without its full-text view."""
    cached, live = (builder(world, model, world.config(), live=live) for live in (False, True))
    row: list[Row] = [tuple(p for p in pieces(cached) if p.trajectory != "t001" or p.view == "latent")]
    a, b = run(model, cached, row), run(model, live, row)
    torch.testing.assert_close(a[0], b[0], rtol=1e-3, atol=1e-3)
    for name, grad in b[1].items():
        torch.testing.assert_close(a[1][name], grad, atol=2e-3 * float(grad.abs().max()), rtol=0)


def test_read_back_does_not_disturb_assistant_positions(world: World, model: AcdModel) -> None:
    asking = builder(world, model, world.config(readback={"share": 0.3}))
    silent = builder(world, model, world.config(readback={"share": 0.0}))
    with torch.no_grad():
        with_questions, without = (
            [model(rows.build((piece,))) for piece in pieces(rows) if piece.view == "latent"]
            for rows in (asking, silent)
        )
    for a, b in zip(with_questions, without, strict=True):
        torch.testing.assert_close(a[0], b[0], rtol=1e-6, atol=0)
        assert a[1] > 0 and b[1] == 0


def test_only_the_latent_view_reaches_the_adapter(world: World, model: AcdModel) -> None:
    rows = builder(world, model, world.config())
    by_view = {view: [(p,) for p in pieces(rows) if p.view == view] for view in ("latent", "full")}
    _, full = run(model, rows, by_view["full"])
    _, latent = run(model, rows, by_view["latent"])
    adapter = [name for name in latent if name.startswith("adapter.")]
    assert adapter and all((full[name] == 0).all() for name in adapter), "present, for DDP, and zero"
    assert all((latent[name] != 0).any() for name in adapter)
    assert all((full[name] != 0).any() for name in full if name.startswith("gains."))


def test_a_rank_without_rows_has_zero_gradients(model: AcdModel) -> None:
    model.zero_grad()
    sums = model(None)
    sums.sum().backward()
    assert sums.tolist() == [0, 0, 0]
    grads = [p.grad for p in model.student.trainable().values()]
    assert all(grad is not None and (grad == 0).all() for grad in grads)


def test_the_base_has_no_loss(world: World, model: AcdModel) -> None:
    """With patch and gains off, the anchor of the cached base against itself is what fp16 storage costs."""
    rows = builder(world, model, world.config())
    full = [p for p in pieces(rows) if p.view == "full"]
    row = rows.build(tuple(full))
    with model.student.patch_disabled():
        anchor = model(row)[2]
    assert float(anchor) / len(row.anchor) < 1e-5
