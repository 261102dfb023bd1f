"""`loha sweep`: recorded histories through an endpoint, over a grid of K, compared with the recorded turns."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm
from tyro.conf import Positional

from loha.atomic import atomic_path
from loha.console import out
from loha.errors import LohaError
from loha.layout import parse_k, parse_polling
from loha.progress import note, progress_bar
from loha.rendering import VIEWS, View
from loha.trajectory import read_trajectories
from serving.arm import Arm, grid
from serving.cell import Cell, Question, ask, questions, turn_step
from serving.endpoint import served_model
from serving.measurement import measures_the_same, run_together
from serving.plot import plot_sweep
from serving.summary import ArmSummary, summarize, table

CELLS = "cells.jsonl"
SETTINGS = "settings.json"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `loha sweep`."""

    trajectories: Positional[Path]
    """Canonical JSONL of recorded trajectories (`loha data import`)."""

    out: Path
    """Folder for sweep.json, sweep.md, sweep.png and the finished cells; a run that was stopped goes on from there."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """Of the OpenAI-compatible server."""

    model: str = "auto"
    """Served model; auto asks the server."""

    k: tuple[str, ...] = ("0", "1", "2", "3", "4", "8", "inf")
    """Values of K: how many of the newest observations stay text."""

    polling: tuple[int, ...] = (1,)
    """Values of P: the window moves every P observations."""

    view: tuple[View, ...] = ("latent",)
    """What becomes of older observations: latent, mask, or both for comparison."""

    turns: str = "all"
    """Which assistant turns are asked: last, all, or every:N."""

    limit: int | None = None
    """Use only the first N trajectories."""

    max_tokens: int = 512
    """Longest reply."""

    concurrency: int = 8
    """Trajectories in flight; the turns of one trajectory under one arm go one after the other, as an agent's would."""

    api_key: str = ""
    """Sent as bearer token; OPENAI_API_KEY when left out."""

    timeout_s: float = 600.0
    """Longest wait for one reply."""


def main(options: Options) -> int:
    """Measure a grid of K through an OpenAI-compatible endpoint."""
    arms = _arms(options)
    turn_step(options.turns)
    asked = _questions(options)
    cells = asyncio.run(_run(options, arms, asked))
    wanted = {(q.trajectory.id, q.turn, arm.name) for arm in arms for q in asked}
    rows = summarize(arms, [cell for key, cell in cells.items() if key in wanted])
    _write(options, rows)
    answered = sum(row.calls for row in rows)
    out(table(rows))
    summary = {"command": "sweep", "out": str(options.out), "answered": answered, "errors": sum(r.errors for r in rows)}
    out(json.dumps({**summary, "arms": [asdict(row) for row in rows]}))
    return 0 if answered else 1


def _arms(options: Options) -> list[Arm]:
    for view in options.view:
        if view not in VIEWS:
            raise LohaError(f"--view must be one of {', '.join(VIEWS)}, got {view!r}")
    arms = grid(options.view, [parse_k(k) for k in options.k], [parse_polling(p) for p in options.polling])
    if not arms:
        raise LohaError("the grid is empty: give at least one --k, --polling and --view")
    return arms


def _questions(options: Options) -> list[Question]:
    asked: list[Question] = []
    for count, trajectory in enumerate(read_trajectories(options.trajectories)):
        if options.limit is not None and count >= options.limit:
            break
        asked += questions(trajectory, options.turns)
    if not asked:
        raise LohaError(f"{options.trajectories} holds no assistant turn to ask for: is it empty?")
    return asked


async def _run(options: Options, arms: Sequence[Arm], asked: Sequence[Question]) -> dict[tuple[str, int, str], Cell]:
    key = options.api_key or os.environ.get("OPENAI_API_KEY", "")
    async with httpx.AsyncClient(
        base_url=options.base_url.rstrip("/") + "/",
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=options.timeout_s,
        limits=httpx.Limits(max_connections=options.concurrency),
    ) as client:
        served = await served_model(client, f"{client.base_url}models")
        model = options.model if options.model != "auto" else served.name
        cells = _resume(options, model, served.checkpoint)
        todo = _sequences(arms, asked, cells)
        options.out.mkdir(parents=True, exist_ok=True)
        with (
            (options.out / CELLS).open("a", encoding="utf-8") as log,
            progress_bar("sweep", total=sum(len(part) for _, part in todo), unit="call") as bar,
        ):
            sweep = _Sweep(client, model, options, cells, log, bar)
            await run_together(sweep.sequence(arm, part) for arm, part in todo)
    return cells


class _Sweep:
    """State that the sequences of a running sweep share."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        options: Options,
        cells: dict[tuple[str, int, str], Cell],
        log: Any,
        bar: tqdm,
    ) -> None:
        self.client, self.model, self.options = client, model, options
        self.cells, self.log, self.bar = cells, log, bar
        self.free = asyncio.Semaphore(options.concurrency)

    async def sequence(self, arm: Arm, asked: Sequence[Question]) -> None:
        """Ask the turns of one trajectory under one arm, in order."""
        async with self.free:
            for question in asked:
                cell = await ask(self.client, question, arm, model=self.model, max_tokens=self.options.max_tokens)
                if cell.error is not None:
                    note(f"trajectory {cell.trajectory}, turn {cell.turn}, arm {cell.arm}: {cell.error}")
                self.cells[cell.key] = cell
                self.log.write(cell.to_line() + "\n")
                self.log.flush()
                self.bar.update()


def _sequences(
    arms: Sequence[Arm], asked: Sequence[Question], done: Mapping[tuple[str, int, str], Cell]
) -> list[tuple[Arm, list[Question]]]:
    """Return what is left, trajectory by trajectory, all arms of one next to each other."""
    by_trajectory: dict[str, list[Question]] = {}
    for question in asked:
        by_trajectory.setdefault(question.trajectory.id, []).append(question)
    left = []
    for name, part in by_trajectory.items():
        for arm in arms:
            missing = [q for q in part if (name, q.turn, arm.name) not in done]
            if missing:
                left.append((arm, missing))
    return left


def _resume(options: Options, model: str, checkpoint: str | None) -> dict[tuple[str, int, str], Cell]:
    """Return the answered cells of an earlier run in the same folder; refused ones are asked again.

    Raises:
        LohaError: when the folder holds a sweep of another model, other trajectories or another reply length.
    """
    settings = {
        "model": model,
        "checkpoint": checkpoint,
        "trajectories_sha256": hashlib.sha256(options.trajectories.read_bytes()).hexdigest(),
        "max_tokens": options.max_tokens,
    }
    path = options.out / SETTINGS
    if not measures_the_same(path, settings, kind="sweep"):
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    log = options.out / CELLS
    if not log.is_file():
        return {}
    cells = [_read_cell(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return {cell.key: cell for cell in cells if cell is not None and cell.error is None}


def _read_cell(line: str) -> Cell | None:
    try:
        return Cell(**json.loads(line))
    except (json.JSONDecodeError, TypeError):
        return None  # a line that was cut when the run was stopped


def _write(options: Options, rows: Sequence[ArmSummary]) -> None:
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(options).items()}
    settings.pop("api_key")
    with atomic_path(options.out / "sweep.json") as temporary:
        temporary.write_text(json.dumps({"options": settings, "arms": [asdict(row) for row in rows]}, indent=1) + "\n")
    with atomic_path(options.out / "sweep.md") as temporary:
        temporary.write_text(table(rows) + "\n", encoding="utf-8")
    plot_sweep(rows, options.out / "sweep.png", title=options.trajectories.stem)
