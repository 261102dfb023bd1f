"""Training loops of the miniature: induction warm-up, the agent, the LCLM."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from miniature.models import WIDTH, TinyLclm
from miniature.views import Batch, Views
from miniature.words import KEYS, VALUES
from miniature.world import draw_pages, make_episode

Log = Callable[[int, int, dict[str, float]], None]
"""Called with (step, steps, metrics) after each step."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One stretch of training.

    Attributes:
        steps: most optimizer steps.
        target: end when the token accuracy, averaged over 20 steps, reaches this; look-ups appear suddenly, and when
            depends on the seed.
        rounds: a phase that has not reached its target starts again from where it is, with a fresh optimizer and the
            peak learning rate, so many times in all. Look-ups formed early in a round more often than late in one.
        batch: trajectories (or warm-up sequences) per step.
        pages: fewest and most observations per trajectory.
        lr: peak learning rate; linear warm-up over 30 steps, cosine to a tenth.
    """

    steps: int
    batch: int
    pages: tuple[int, int] = (12, 16)
    lr: float = 2e-3
    target: float = 2.0
    rounds: int = 1


def run_phase(
    modules: list[nn.Module],
    phase: Phase,
    loss_of: Callable[[], tuple[torch.Tensor, dict[str, float]]],
    log: Log,
    *,
    slow: frozenset[nn.Parameter] = frozenset(),
) -> None:
    """Run a phase until its target is reached, or all its rounds are done; arguments as in `_run_round`."""
    for _ in range(phase.rounds):
        if _run_round(modules, phase, loss_of, log, slow):
            break


def _run_round(
    modules: list[nn.Module],
    phase: Phase,
    loss_of: Callable[[], tuple[torch.Tensor, dict[str, float]]],
    log: Log,
    slow: frozenset[nn.Parameter],
) -> bool:
    """Run AdamW for one round of a phase and return whether the target was reached.

    Args:
        modules: what trains.
        phase: steps and learning rate.
        loss_of: draws a batch and returns its mean loss and metrics.
        log: progress.
        slow: parameters that train at a tenth of the learning rate.
    """
    params = [parameter for module in modules for parameter in module.parameters()]
    groups = [
        {"params": [p for p in params if p not in slow], "scale": 1.0},
        {"params": [p for p in params if p in slow], "scale": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=phase.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    recent: deque[float] = deque(maxlen=20)
    for step in range(phase.steps):
        rate = phase.lr * min(1.0, (step + 1) / 30) * (0.55 + 0.45 * math.cos(math.pi * step / phase.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        loss, metrics = loss_of()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        recent.append(metrics["token_accuracy"])
        done = len(recent) == recent.maxlen and sum(recent) / len(recent) >= phase.target
        log(step + 1, step + 1 if done else phase.steps, {"loss": float(loss.detach()), **metrics})
        if done:
            return True
    return False


def train_recall(
    decoder: Any,
    tokenizer: Any,
    phase: Phase,
    rng: random.Random,
    log: Log,
    *,
    facts: int,
    length: int,
    plans: float,
) -> None:
    """Warm up recall: lists of lines drawn again and again from a few facts, on pages or in a plan.

    A fact is `key value value` or `step number:key`; the loss is on what follows a key or a number seen before.
    Trained on trajectories alone, recall does not appear in any reasonable time. A second loss, through a linear
    probe that is thrown away, asks the first layer's output for the ids one and two positions back; with it the
    look-up (find the earlier occurrence, say what followed) forms within some 200 to 500 steps, without it not in 400.

    Args:
        decoder: the base under training.
        tokenizer: its tokenizer.
        phase: steps, batch, learning rate.
        rng: draws facts and lines.
        log: progress.
        facts: most facts per sequence (fewest is 2).
        length: tokens per sequence.
        plans: share of sequences that are plans; the rest are pages.
    """
    vocabulary = _Vocabulary.of(tokenizer)
    probe = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    first: dict[str, torch.Tensor] = {}
    hook = decoder.model.layers[0].register_forward_hook(
        lambda module, args, output: first.update(hidden=output if torch.is_tensor(output) else output[0])
    )

    def loss_of() -> tuple[torch.Tensor, dict[str, float]]:
        rows, marks = zip(*(_facts(rng, vocabulary, facts, length, plans) for _ in range(phase.batch)), strict=True)
        ids_BT = torch.tensor(rows)
        known_BT = torch.tensor(marks)[:, 1:]
        hidden_BTD = decoder.model(input_ids=ids_BT, use_cache=False).last_hidden_state
        logits_JV = decoder.lm_head(hidden_BTD[:, :-1][known_BT])
        wanted_J = ids_BT[:, 1:][known_BT]
        accuracy = float((logits_JV.argmax(-1) == wanted_J).float().mean())
        look_back = _look_back_loss(probe, first["hidden"], ids_BT, decoder.model.embed_tokens.weight)
        recall = F.cross_entropy(logits_JV, wanted_J)
        return recall + look_back, {"recall": float(recall.detach()), "token_accuracy": accuracy}

    run_phase([decoder, probe], phase, loss_of, log)
    hook.remove()


@dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    """Ids that facts are made of."""

    keys: list[int]
    values: list[int]
    numbers: list[int]
    step: int
    newline: int

    @classmethod
    def of(cls, tokenizer: Any) -> _Vocabulary:
        ids = tokenizer.convert_tokens_to_ids
        step, newline = ids(["step", "Ċ"])
        return cls(
            keys=ids(KEYS),
            values=ids(["Ġ" + value for value in VALUES]),
            numbers=ids([f"Ġ{number}:" for number in range(32)]),
            step=step,
            newline=newline,
        )


def _facts(
    rng: random.Random, words: _Vocabulary, facts: int, length: int, plans: float
) -> tuple[list[int], list[bool]]:
    """Return `length` ids of lines drawn with replacement from a few facts, and which ids follow from earlier lines."""
    count = rng.randint(2, facts)
    follows = [False, True, True, False]
    if rng.random() < plans:
        numbers = rng.sample(words.numbers, min(count, len(words.numbers)))
        table = {n: [words.step, n, rng.choice(words.keys), words.newline] for n in numbers}
        follows = [False, False, True, False]
    else:
        keys = rng.sample(words.keys, count)
        table = {key: [key, rng.choice(words.values), rng.choice(words.values), words.newline] for key in keys}
    seen: set[int] = set()
    ids: list[int] = []
    known: list[bool] = []
    while len(ids) < length:
        fact = rng.choice(list(table))
        ids += table[fact]
        known += [fact in seen and mark for mark in follows]
        seen.add(fact)
    return ids[:length], known[:length]


def _look_back_loss(
    probe: nn.Linear, hidden_BTD: torch.Tensor, ids_BT: torch.Tensor, table_VD: torch.Tensor, sample: int = 24
) -> torch.Tensor:
    """Return the loss of naming the ids one and two positions back, at `sample` random positions."""
    at = torch.randperm(ids_BT.shape[1] - 2)[:sample] + 2
    one_BSD, two_BSD = probe(F.rms_norm(hidden_BTD[:, at], (hidden_BTD.shape[-1],))).chunk(2, dim=-1)
    one = F.cross_entropy((one_BSD @ table_VD.T).flatten(0, 1), ids_BT[:, at - 1].flatten())
    two = F.cross_entropy((two_BSD @ table_VD.T).flatten(0, 1), ids_BT[:, at - 2].flatten())
    return one + two


def train_agent(decoder: Any, views: Views, phase: Phase, rng: random.Random, log: Log) -> None:
    """Train the base on full-text trajectories, loss on assistant tokens."""

    def loss_of() -> tuple[torch.Tensor, dict[str, float]]:
        pages = rng.randint(*phase.pages)
        batch = views.batch([make_episode(rng, pages=pages) for _ in range(phase.batch)], k=None)
        return supervised_loss(decoder, decoder.model.embed_tokens(batch.ids_BT), batch.ids_BT, batch.supervised)

    run_phase([decoder], phase, loss_of, log)


def train_reconstruction(lclm: TinyLclm, views: Views, phase: Phase, rng: random.Random, log: Log) -> None:
    """Train encoder and adapter alone until each latent holds the tokens of its group.

    A linear probe per place in the group names the token there, through the decoder's frozen embedding table;
    the probes are thrown away. `phase.batch` counts pages.
    """
    table_VD = lclm.decoder.model.embed_tokens.weight.detach()
    probe = nn.Linear(WIDTH, lclm.ratio * WIDTH, bias=False)

    def loss_of() -> tuple[torch.Tensor, dict[str, float]]:
        bodies_BO = torch.tensor(
            [views.tokenizer.encode(page, add_special_tokens=False) for page in draw_pages(rng, phase.batch)]
        )
        latents_BLD = lclm.latents(bodies_BO)
        size = bodies_BO.shape[1]
        guesses_BOD = probe(latents_BLD).unflatten(-1, (lclm.ratio, WIDTH)).flatten(1, 2)[:, :size]
        logits_BOV = guesses_BOD @ table_VD.T
        loss = F.cross_entropy(logits_BOV.flatten(0, 1), bodies_BO.flatten())
        return loss, {"token_accuracy": float((logits_BOV.argmax(-1) == bodies_BO).float().mean())}

    run_phase([lclm.encoder, lclm.adapter, probe], phase, loss_of, log)


def train_reading(
    lclm: TinyLclm, views: Views, phase: Phase, rng: random.Random, log: Log, *, queries: int = 40
) -> None:
    """Train all of an LCLM on bare pages followed by lines to recall: many look-ups per position.

    Most pages are latents, some text, each between the tool-response tokens; no line is asked for twice, so that
    earlier answers do not help; the loss is on the values. `phase.pages` bounds the pages per sequence. It must
    start with one or two: with ten the look-up did not appear in 250 steps.
    """

    def loss_of() -> tuple[torch.Tensor, dict[str, float]]:
        latent = [rng.random() < 0.85 for _ in range(rng.randint(*phase.pages))]
        batch = _reading_batch(views, rng, phase.batch, latent, queries)
        return supervised_loss(lclm.decoder, view_embeds(lclm, batch), batch.ids_BT, batch.supervised)

    run_phase([lclm], phase, loss_of, log, slow=frozenset([lclm.decoder.model.embed_tokens.weight]))


def _reading_batch(views: Views, rng: random.Random, rows: int, latent: list[bool], queries: int) -> Batch:
    encode = views.renderer.plain_ids
    opening, closing, newline = views.tokenizer.convert_tokens_to_ids(["<tool_response>", "</tool_response>", "Ċ"])
    ids: list[list[int]] = []
    bodies: list[list[int]] = []
    starts: list[int] = []
    for _ in range(rows):
        pages = make_episode(rng, pages=len(latent)).pages
        row: list[int] = []
        starts = []
        for page, as_latent in zip(pages, latent, strict=True):
            body = encode(page)
            row += [opening, newline]
            if as_latent:
                starts.append(len(row))
                bodies.append(body)
                row += [views.renderer.placeholder_id] * (-(-len(body) // views.ratio) + 2)
            else:
                row += body
            row += [newline, closing]
        begin = len(row)
        lines = [line for page in pages for line in page.split("\n")]
        for line in rng.sample(lines, min(queries, len(lines))):
            row += [*encode(line), newline]
        ids.append(row)
    values = [at for at in range(begin, len(ids[0])) if (at - begin) % 4 in (1, 2)]
    size = len(bodies[0]) if bodies else 1
    return Batch(
        ids_BT=torch.tensor(ids),
        starts=starts,
        bodies_BNO=torch.tensor(bodies, dtype=torch.long).reshape(rows, len(starts), size),
        supervised=torch.tensor(values),
        turns=torch.zeros(len(values), dtype=torch.long),
    )


def train_lclm(
    lclm: TinyLclm, views: Views, phase: Phase, rng: random.Random, log: Log, *, full_share: float, mixed_share: float
) -> None:
    """Train decoder, encoder and adapter to read latents.

    Args:
        lclm: the decoder starts as the base.
        views: renders them.
        phase: steps, batch, pages, learning rate.
        rng: draws tasks and views.
        log: progress.
        full_share: share of steps on full text.
        mixed_share: share of steps in which only a random number of the oldest observations is latent; the
            rest has all of them latent (K=0).
    """

    def loss_of() -> tuple[torch.Tensor, dict[str, float]]:
        pages = rng.randint(*phase.pages)
        draw = rng.random()
        kind = "text" if draw < full_share else "mixed" if draw < full_share + mixed_share else "latent"
        k = {"text": None, "mixed": rng.randrange(1, pages), "latent": 0}[kind]
        batch = views.batch([make_episode(rng, pages=pages) for _ in range(phase.batch)], k=k)
        embeds = view_embeds(lclm, batch)
        loss, metrics = supervised_loss(lclm.decoder, embeds, batch.ids_BT, batch.supervised)
        return loss, {**metrics, f"token_accuracy/{kind}": metrics["token_accuracy"]}

    # The student keeps the base's embedding, so what the LCLM learns there is lost to the reading patch.
    run_phase([lclm], phase, loss_of, log, slow=frozenset([lclm.decoder.model.embed_tokens.weight]))


class Reader(Protocol):
    """A decoder with what turns observations into its input vectors: an LCLM, or text alone (`evaluate.TextReader`)."""

    decoder: Any

    def latents(self, bodies_XO: torch.Tensor) -> torch.Tensor:
        """Return `[X, L, D]` latents of equally long bodies."""

    def markers(self) -> torch.Tensor:
        """Return the `[2, D]` start and end marker."""


def view_embeds(reader: Reader, batch: Batch, table_VD: torch.Tensor | None = None) -> torch.Tensor:
    """Return `[B, T, D]` input vectors of a batch: text rows, markers, latents.

    Args:
        reader: encodes the bodies and owns the markers.
        batch: the renderings.
        table_VD: embedding of the text; the reader's decoder's own when left out.
    """
    table_VD = reader.decoder.model.embed_tokens.weight if table_VD is None else table_VD
    embeds_BTD = F.embedding(batch.ids_BT, table_VD)
    rows, observations, _ = batch.bodies_BNO.shape
    if not observations:
        return embeds_BTD
    latents_XLD = reader.latents(batch.bodies_BNO.flatten(0, 1))
    count = latents_XLD.shape[1]
    start_XLD, end_XLD = (marker.expand(rows * observations, 1, -1) for marker in reader.markers())
    segments = torch.cat([start_XLD, latents_XLD, end_XLD], dim=1).reshape(rows, observations * (count + 2), -1)
    where = torch.cat([torch.arange(start, start + count + 2) for start in batch.starts])
    return embeds_BTD.index_copy(1, where, segments)


def supervised_loss(
    decoder: Any, embeds_BTD: torch.Tensor, ids_BT: torch.Tensor, target_J: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the mean negative log-likelihood (nats) of the ids at `target_J`, and their greedy accuracy."""
    hidden_BTD = decoder.model(inputs_embeds=embeds_BTD, use_cache=False).last_hidden_state
    logits_BJV = decoder.lm_head(hidden_BTD[:, target_J - 1])
    wanted_BJ = ids_BT[:, target_J]
    loss = F.cross_entropy(logits_BJV.flatten(0, 1), wanted_BJ.flatten())
    return loss, {"token_accuracy": float((logits_BJV.argmax(-1) == wanted_BJ).float().mean())}
