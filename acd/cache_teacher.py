"""Write the teacher cache: the base's top candidates at every assistant position of the full-text views.

    python -m acd.cache_teacher --config F                          # one process
    accelerate launch -m acd.cache_teacher --config F               # one process per device, shards shared out
    python -m acd.cache_teacher --config F --verify 1000            # recompute so many random positions and compare

Finished shards are never done again, so a killed run goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from acd.command import command_parser, parse_command, student_config
from acd.config import Config
from acd.corpus import Corpus, Entry
from acd.loss import Targets
from acd.process_group import long_wait
from acd.teacher import candidates_for, top_candidates
from acd.teacher_cache import (
    INDEX_NAME,
    SHARD_GLOB,
    Key,
    TeacherCache,
    check_shard,
    pack_targets,
    read_shard_info,
    write_index,
    write_shard,
)
from acd.views import Example, full_view
from loha.atomic import check_writable, recover
from loha.attention import Pieces
from loha.command_line import run_reporting
from loha.console import out
from loha.decoder import load_decoder
from loha.encoder import use_packed_attention
from loha.errors import LohaError
from loha.fingerprint import Fingerprint, weights_hash
from loha.lclm import load_config
from loha.progress import progress_bar
from loha.render import Renderer
from loha.student import build_renderer
from loha.student_files import StudentConfig
from loha.tokenizer_dir import load_tokenizer, require_same_tokens
from loha.weight_files import float_dtype

_SHARED_PARTS = ("tokenizer", "chat_template", "layout_version")
VERIFY_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-3}
"""Mean KL in nats that a verification accepts: fp16 storage costs 1e-7, another bfloat16 kernel up to 5e-4."""


@dataclass(frozen=True)
class Shard:
    """Trajectories that are written together."""

    path: Path
    entries: tuple[Entry, ...]


class Teacher:
    """The frozen model that gives the targets.

    Args:
        folder: Hugging Face checkpoint.
        dtype: of weights and activations; the checkpoint's own by default.
        device: where it computes.
        candidates: log-probabilities kept per position.
        chunk: positions whose logits exist at one time.
    """

    def __init__(
        self, folder: str, *, dtype: torch.dtype | None, device: torch.device, candidates: int, chunk: int
    ) -> None:
        self.model = load_decoder(folder, dtype=dtype, device=device)
        use_packed_attention(self.model)
        self.device = device
        self.chunk = chunk
        self.head_VD: Tensor = self.model.lm_head.weight.requires_grad_(False)
        self.candidates = candidates_for(len(self.head_VD), candidates)

    @torch.no_grad()
    def targets(self, example: Example) -> Targets:
        """Return the targets at the assistant positions of a full-text view."""
        length = len(example.token_ids)
        pieces = Pieces.of([length], self.device)
        hidden_TD = self.model.model(
            input_ids=torch.tensor([example.token_ids], device=self.device),
            position_ids=pieces.position_ids(),
            attention_mask=None,
            use_cache=False,
            pieces=pieces,
        ).last_hidden_state[0]
        states_N = torch.tensor(example.states, device=self.device)
        return top_candidates(hidden_TD[states_N], self.head_VD, self.candidates, chunk=self.chunk)


def teacher_fingerprint(teacher_folder: str, renderer: Renderer) -> Fingerprint:
    """Return what a cache depends on. Encoder settings are not among it: the full-text view has no latents."""
    parts = renderer.fingerprint
    return {"base_weights": weights_hash(teacher_folder)} | {name: parts[name] for name in _SHARED_PARTS}


def shards_of(corpus: Corpus, folder: Path, per_shard: int) -> list[Shard]:
    """Return the shards of a corpus; each name carries a hash of its trajectories, so a change makes a new shard."""
    shards = []
    for number, entries in enumerate(batches(corpus.entries(), per_shard)):
        digest = hashlib.sha256(json.dumps([(entry.id, entry.digest) for entry in entries]).encode()).hexdigest()[:12]
        shards.append(Shard(folder / f"shard-{number:05d}-{digest}.safetensors", entries))
    return shards


def batches(entries: Sequence[Entry], size: int) -> list[tuple[Entry, ...]]:
    """Cut a list into runs of `size`."""
    return [tuple(entries[start : start + size]) for start in range(0, len(entries), size)]


def make_accelerator() -> Accelerator:
    """Return the accelerator of a command that shares shards out."""
    return Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[long_wait()])


def write_cache(config: Config, accelerator: Accelerator) -> dict[str, Any]:
    """Write the missing shards, shared out over the processes, and return the index.

    Raises:
        LohaError: when the folder holds a damaged shard or a cache of something else, or the teacher has other tokens
            than the base.
    """
    folder = cache_folder(config)
    check_writable(folder / INDEX_NAME)
    corpus = Corpus(config.data.trajectories, limit=config.data.limit)
    student = student_config(config)
    renderer = build_renderer(student)
    source = teacher_folder(config, student, renderer)
    fingerprint = teacher_fingerprint(source, renderer)
    if accelerator.is_main_process:
        recover(folder)
    accelerator.wait_for_everyone()
    missing = missing_shards(config, corpus, folder, fingerprint)
    mine = missing[accelerator.process_index :: accelerator.num_processes]
    if mine:
        teacher = _load_teacher(config, source, accelerator.device)
        _write_shards(mine, corpus, renderer, teacher, fingerprint, show=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        return write_index(folder) | {"written": len(missing)}
    return {}


def missing_shards(config: Config, corpus: Corpus, folder: Path, fingerprint: Fingerprint) -> list[Shard]:
    """Return the shards that are still to be written, after checking those that exist."""
    present = {path: read_shard_info(path) for path in sorted(folder.glob(SHARD_GLOB))}
    for info in present.values():
        check_shard(info, fingerprint, candidates=min(config.teacher.candidates, info.vocabulary - 1))
    return [s for s in shards_of(corpus, folder, config.teacher.trajectories_per_shard) if s.path not in present]


def teacher_folder(config: Config, student: StudentConfig, renderer: Renderer) -> str:
    """Return the checkpoint that teaches: the base, or another model whose ids mean the same tokens.

    Raises:
        LohaError: when it cuts text otherwise than the base, or has ids that the base's head lacks.
    """
    source = config.teacher.model or student.base
    if source != student.base:
        require_same_tokens(
            load_tokenizer(source),
            renderer.tokenizer,
            name=f"teacher.model {source}",
            other_name=f"the base {student.base}",
        )
        rows, limit = load_config(source).vocab_size, load_config(student.base).vocab_size
        if rows > limit:
            raise LohaError(
                f"teacher.model {source} has {rows} token ids, the base {student.base} only {limit}; choose a teacher "
                "of the base's vocabulary"
            )
    return source


def cache_folder(config: Config) -> Path:
    """Return where the distillation targets go.

    Raises:
        LohaError: when the configuration names no folder.
    """
    if not config.teacher.cache:
        raise LohaError("teacher.cache is missing: name a folder for the teacher cache")
    return Path(config.teacher.cache)


def verify_cache(config: Config, accelerator: Accelerator, positions: int) -> dict[str, Any]:
    """Recompute random positions and compare them with the cache.

    Args:
        config: of the run.
        accelerator: names the device.
        positions: how many, spread over random trajectories.

    Returns:
        Mean and largest KL(recomputed || cached) in nats, share of equal top-1 ids, positions compared.

    Raises:
        LohaError: when the mean is above what storage and kernels explain.
    """
    corpus = Corpus(config.data.trajectories, limit=config.data.limit)
    student = student_config(config)
    renderer = build_renderer(student)
    source = teacher_folder(config, student, renderer)
    cache = TeacherCache(cache_folder(config), expected=teacher_fingerprint(source, renderer))
    teacher = _load_teacher(config, source, accelerator.device)
    kl, same_top = _compare(corpus, renderer, cache, teacher, positions)
    result = {
        "positions": len(kl),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "same_top_1": float(same_top.double().mean()),
    }
    limit = VERIFY_LIMITS.get(teacher.model.dtype, 1e-3)
    if result["kl_mean"] > limit:
        raise LohaError(
            f"{cache.folder}: recomputed positions differ by {result['kl_mean']:.2e} nats on average, expected at most "
            f"{limit:.0e}; delete the folder and write the cache again"
        )
    return result


def _compare(
    corpus: Corpus, renderer: Renderer, cache: TeacherCache, teacher: Teacher, positions: int
) -> tuple[Tensor, Tensor]:
    """Return KL and top-1 agreement of random positions, from as many trajectories as possible."""
    rng = random.Random(0)
    entries = corpus.entries()
    rng.shuffle(entries)
    share = max(1, -(-positions // len(entries)))
    kl, same, left = [], [], positions
    for entry in entries:
        if left <= 0:
            break
        example = full_view(renderer, corpus[entry.id])
        picked = sorted(rng.sample(range(len(example.states)), min(share, left, len(example.states))))
        index_N = torch.tensor(picked)
        stored = cache.read(Key(entry.id, entry.digest, example.assistant_hash)).select(index_N)
        fresh = teacher.targets(example).to(torch.device("cpu")).select(index_N)
        kl.append(_kl_between(fresh, stored))
        same.append(fresh.ids_NC[:, 0] == stored.ids_NC[:, 0])
        left -= len(picked)
    return torch.cat(kl), torch.cat(same)


def _kl_between(p: Targets, q: Targets) -> Tensor:
    """Return KL(p||q) over the ids that both hold and one bucket for the rest."""
    match_NCC = p.ids_NC[:, :, None] == q.ids_NC[:, None, :]
    in_q_NC, in_p_NC = match_NCC.any(2), match_NCC.any(1)
    shared_q_NC = torch.where(match_NCC, q.logp_NC[:, None, :], float("-inf")).amax(2)
    p_NB = torch.cat([p.logp_NC.masked_fill(~in_q_NC, float("-inf")), _rest(p, ~in_q_NC)], 1).double()
    q_NB = torch.cat([shared_q_NC, _rest(q, ~in_p_NC)], 1).double()
    return (p_NB.exp() * torch.where(p_NB > -80, p_NB - q_NB, 0.0)).sum(1)


def _rest(targets: Targets, outside_NC: Tensor) -> Tensor:
    """Return [N, 1], the log of the mass on the tail and on the candidates marked."""
    outside = targets.logp_NC.masked_fill(~outside_NC, float("-inf"))
    return torch.cat([outside, targets.tail_N[:, None]], 1).logsumexp(1, keepdim=True)


def _write_shards(
    shards: Sequence[Shard],
    corpus: Corpus,
    renderer: Renderer,
    teacher: Teacher,
    fingerprint: Fingerprint,
    *,
    show: bool,
) -> None:
    notes = {"dtype": str(teacher.model.dtype), "torch": torch.__version__, "device": teacher.device.type}
    bar = progress_bar("teacher cache", total=sum(len(shard.entries) for shard in shards), unit="trajectory")
    bar.disable = not show
    with bar:
        for shard in shards:
            parts = []
            for entry in shard.entries:
                example = full_view(renderer, corpus[entry.id])
                key = Key(entry.id, entry.digest, example.assistant_hash)
                parts.append((key, pack_targets(teacher.targets(example))))
                bar.update()
            write_shard(shard.path, parts, fingerprint=fingerprint, vocabulary=len(teacher.head_VD), notes=notes)


def _load_teacher(config: Config, source: str, device: torch.device) -> Teacher:
    return Teacher(
        source,
        dtype=float_dtype(config.model.dtype),
        device=device,
        candidates=config.teacher.candidates,
        chunk=config.loss.chunk,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Write the teacher cache of a run, or compare random positions of it with fresh predictions."""
    parser = command_parser("python -m acd.cache_teacher", main.__doc__)
    parser.add_argument("--verify", type=int, metavar="N", help="recompute N random positions instead of writing")
    options, config = parse_command(parser, argv)
    accelerator = make_accelerator()
    if options.verify is not None:
        if options.verify < 1:
            raise LohaError(f"--verify must be at least 1, got {options.verify}")
        result = verify_cache(config, accelerator, options.verify)
    else:
        index = write_cache(config, accelerator)
        result = {key: value for key, value in index.items() if key not in ("shards", "fingerprint")}
    if accelerator.is_main_process:
        out(json.dumps(result))


if __name__ == "__main__":
    sys.exit(run_reporting(main))
