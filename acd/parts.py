"""Put together what a training run is made of: student, plan, rows, held-out trajectories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, set_seed
from torch.utils.data import DataLoader

from acd.checkpoint import check_checkpoint
from acd.command import student_config
from acd.config import Config
from acd.corpus import Corpus
from acd.encoder_cache import PooledCache
from acd.plan import Plan, limits, make_plan, plan_key, view_rule
from acd.process_group import long_wait
from acd.rows import RowBuilder, StepData, TrainingRow
from acd.run_folder import RunFolder
from acd.targets import open_targets
from acd.views import ViewBuilder
from loha.errors import LohaError
from loha.progress import note
from loha.student import Student
from loha.weight_files import float_dtype


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    student: Student
    plan: Plan
    data: StepData
    total_steps: int
    workers: int

    def steps(self, first: int) -> Iterator[tuple[int, list[TrainingRow]]]:
        """Yield (step, this rank's rows) from step `first` to the end; there is no loader state to restore."""
        loader = DataLoader(
            self.data,
            batch_size=None,
            sampler=range(first, self.total_steps),
            num_workers=self.workers,
            collate_fn=_same,
            worker_init_fn=_share_by_name,
            # Its own generator: making an iterator must not advance the generator that checkpoints save.
            generator=torch.Generator().manual_seed(0),
        )
        return zip(range(first, self.total_steps), loader, strict=True)


def make_accelerator(config: Config) -> Accelerator:
    """Return the accelerator. Precision is the student's own business, so it is told to do nothing about it.

    Raises:
        LohaError: for a tracker or a launch configuration that cannot be used.
    """
    usable = [str(tracker) for tracker in get_available_trackers()]
    for name in config.run.trackers:
        if name not in usable:
            raise LohaError(
                f"run.trackers: {name} is not installed, or no tracker that accelerate knows; usable: {usable}"
            )
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="no",
        log_with=list(config.run.trackers) or None,
        project_dir=config.run.output_dir,
        kwargs_handlers=[
            long_wait(),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ],
    )
    if accelerator.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise LohaError(
            f"accelerate is set up for {accelerator.distributed_type.value}, which this trainer does not use; launch "
            "with one of configs/accelerate/, and shard with model.shard: true"
        )
    set_seed(config.run.seed)
    return accelerator


def load_parts(config: Config, accelerator: Accelerator, folder: RunFolder) -> Parts:
    """Load the student, make or read the plan, and open the targets.

    Raises:
        LohaError: when a part is missing, damaged, or does not belong to the others.
    """
    stands_on = student_config(config)
    corpus = Corpus(config.data.trajectories, limit=config.data.limit)
    student = load_student(config, accelerator.device)
    renderer = student.renderer()
    source = open_targets(config, stands_on, renderer)
    key = plan_key(config, corpus, renderer.fingerprint)
    newest = folder.checkpoints.newest()
    if newest is not None:
        check_checkpoint(newest, key)  # before the plan that it belongs to is replaced
    if accelerator.is_main_process and not _has_plan(folder, key):
        plan = make_plan(config, corpus, stands_on, workers=config.data.workers)
        plan.save(folder.plan)
        for skipped in plan.skipped:
            note(f"trajectory {skipped.trajectory!r} does not train: {skipped.reason}")
    accelerator.wait_for_everyone()
    plan = Plan.load(folder.plan)
    total = min(len(plan.steps), config.run.max_steps or len(plan.steps))
    source.check_holds(corpus, [piece for step in plan.steps[:total] for row in step for piece in row])
    data = StepData(
        plan,
        RowBuilder(corpus, ViewBuilder(renderer, view_rule(config), student=stands_on), source),
        limits(config),
        rank=accelerator.process_index,
        world=accelerator.num_processes,
    )
    return Parts(student, plan, data, total, config.data.workers)


def load_student(config: Config, device: torch.device) -> Student:
    """Load the student for training."""
    student = Student.load(
        config.model.student,
        base=config.model.base,
        lclm=config.model.lclm,
        dtype=float_dtype(config.model.dtype),
        device=device,
    )
    if config.model.checkpointing:
        student.enable_checkpointing(offload=config.model.offload, mlp_chunks=config.model.mlp_chunks)
    if config.model.encoder_cache_gb:
        student.latent_encoder = PooledCache(student.latent_encoder, max_bytes=int(config.model.encoder_cache_gb * 1e9))
    return student


def _has_plan(folder: RunFolder, key: str) -> bool:
    return folder.plan.is_file() and Plan.load(folder.plan).key == key


def _same(rows: list[TrainingRow]) -> list[TrainingRow]:
    return rows


def _share_by_name(worker: int) -> None:
    """Send tensors to the trainer by the name of their shared memory.

    A row is hundreds of tensors, and each would else take two file descriptors on its way, more than the usual limit of
    1,024 in all.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")
