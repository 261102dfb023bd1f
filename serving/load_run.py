"""The load itself: rounds of slices, one arm at a time, and the log from which a stopped benchmark goes on.

Arms take turns in slices of time and do not share the server, because an arm's throughput is a property of a server
under that arm's load: its batches, its KV cache, its queue. Every round runs all arms and begins with another one, so
slow drift of the machine falls on all of them, and the engine's counters of a slice belong to one arm.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tqdm import tqdm

from loha.errors import LohaError
from loha.progress import progress_bar
from serving.endpoint import Endpoint
from serving.load_arm import LoadArm, order
from serving.load_summary import Slice
from serving.measurement import run_together
from serving.replay import ReplayedRun, RunRequest, replay_run
from serving.reply_plan import PlannedRun
from serving.run_tag import run_tag

RUNS = "runs.jsonl"
SLICES = "slices.jsonl"
WARM_UP_CALLS = 2


class Log:
    """Finished runs and slices, in memory and in the folder, one line each.

    Args:
        folder: of the benchmark; created.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.runs: list[ReplayedRun] = _read(folder / RUNS, ReplayedRun.from_line)
        self.slices: list[Slice] = _read(folder / SLICES, lambda line: Slice(**json.loads(line)))
        self._folder = folder
        self._files: dict[str, IO[str]] = {}

    def __enter__(self) -> Log:
        self._files = {name: _open_whole(self._folder / name) for name in (RUNS, SLICES)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def add_run(self, run: ReplayedRun) -> None:
        """Keep a finished run."""
        self.runs.append(run)
        self._write(RUNS, run.to_line())

    def add_slice(self, stretch: Slice) -> None:
        """Keep a finished stretch of load."""
        self.slices.append(stretch)
        self._write(SLICES, json.dumps(asdict(stretch)))

    def _write(self, name: str, line: str) -> None:
        self._files[name].write(line + "\n")
        self._files[name].flush()


@dataclass(kw_only=True)
class LoadRun:
    """A benchmark under way."""

    endpoints: Mapping[str, Endpoint]
    models: Mapping[str, str]
    """Served model of each endpoint."""
    arms: Sequence[LoadArm]
    instances: Sequence[PlannedRun]
    """Runs of every slice, in order."""
    rounds: int
    concurrency: int
    tool_time: str
    started: float
    """Seconds since the epoch: part of every run's tag."""
    _sequence: int = 0

    async def measure(self, log: Log) -> None:
        """Run what the log does not hold yet.

        Raises:
            LohaError: when a server refuses or fails; finished runs stay in the log.
        """
        done = {run.key for run in log.runs}
        slices = [
            (arm, number, todo)
            for number in range(self.rounds)
            for arm in order(self.arms, number)
            if (todo := [request for request in self._requests(arm, number) if request.key not in done])
        ]
        if not slices:
            return
        await self._warm_up({arm.name: arm for arm, _, _ in slices}.values())
        total = sum(len(request.planned.replies) for _, _, todo in slices for request in todo)
        with progress_bar("bench", total=total, unit="call") as bar:
            for arm, number, todo in slices:
                bar.set_postfix_str(f"round {number + 1}/{self.rounds}, {arm.name}")
                await self._slice(arm, number, todo, log, bar)

    async def _slice(self, arm: LoadArm, number: int, todo: Sequence[RunRequest], log: Log, bar: tqdm) -> None:
        """Load the server with the runs of one arm, `concurrency` at a time."""
        endpoint = self.endpoints[arm.base_url]
        before = await endpoint.counters()
        waiting: Iterator[RunRequest] = iter(todo)
        finished = 0
        start = time.perf_counter()

        async def agent() -> None:
            nonlocal finished
            for request in waiting:
                run = await replay_run(
                    endpoint, self.models[arm.base_url], request, tool_time=self.tool_time, done=bar.update
                )
                log.add_run(run)
                finished += 1

        try:
            await run_together(agent() for _ in range(self.concurrency))
        finally:
            seconds = time.perf_counter() - start
            with suppress(asyncio.CancelledError):
                after = await endpoint.counters()
                log.add_slice(
                    Slice(
                        arm=arm.name,
                        round=number,
                        seconds=seconds,
                        runs=finished,
                        whole=finished == len(self.instances),
                        counters={name: after[name] - before[name] for name in after if name in before},
                    )
                )

    async def _warm_up(self, arms: Any) -> None:
        """Send the first calls of a run in every arm, unmeasured: the first request of a server pays for others."""
        for arm in arms:
            request = next(self._requests(arm, 0))
            run = await replay_run(
                self.endpoints[arm.base_url],
                self.models[arm.base_url],
                request,
                tool_time="none",
                calls=WARM_UP_CALLS,
            )
            details = run.calls[-1].usage.get("prompt_tokens_details") or {}
            if len(run.calls) == WARM_UP_CALLS and details.get("cached_tokens") is None:
                raise LohaError(
                    f"{arm.base_url} does not say how many tokens its prefix cache held; start it with "
                    "--enable-prefix-caching --enable-prompt-tokens-details"
                )

    def _requests(self, arm: LoadArm, number: int) -> Iterator[RunRequest]:
        copies: Counter[str] = Counter()
        for planned in self.instances:
            name = planned.trajectory.id
            self._sequence += 1
            tag = run_tag(self.started, self._sequence)
            yield RunRequest(planned=planned, arm=arm, round=number, copy=copies[name], tag=tag)
            copies[name] += 1


def _read(path: Path, parse: Callable[[str], Any]) -> list[Any]:
    """Return the entries of a log; the last one may have been cut when the benchmark was stopped."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()
    try:
        return [parse(line) for line in lines]
    except (ValueError, TypeError, KeyError) as error:
        raise LohaError(
            f"{path}: not the log of a benchmark of this version ({error}); choose another --out or remove the folder"
        ) from error


def _open_whole(path: Path) -> IO[str]:
    """Open a log to append to it, a line that was cut taken away."""
    file = path.open("a+", encoding="utf-8")
    file.seek(0)
    text = file.read()
    file.truncate(len(text[: text.rfind("\n") + 1].encode()))
    return file
