"""`loha render`: what the model reads at a given K."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from loha.console import out
from loha.errors import LohaError
from loha.layout import Window, format_k, parse_k, parse_polling
from loha.render import Renderer
from loha.rendering import LatentSettings, Rendering, View
from loha.tokenizer_dir import load_tokenizer
from loha.trajectory import Trajectory, read_trajectories


@dataclass(frozen=True, kw_only=True)
class Options:
    tokenizer: Path
    """Folder with the decoder's tokenizer.json and chat template."""

    trajectory: Path
    """Canonical JSONL of trajectories (`loha data import` writes it)."""

    id: str | None = None
    """Which trajectory; the first when left out."""

    k: str = "3"
    """How many of the newest observations stay text: 0, 1, 2, ... or inf."""

    polling: str = "1"
    """The window moves only every P observations."""

    view: View = "latent"
    """What becomes of older observations: latents, a placeholder line (mask), or full text."""

    encoder_tokenizer: Path | None = None
    """Folder with the encoder's tokenizer; the decoder's when left out."""

    ratio: int = 16
    """Encoder tokens per latent."""

    encoder_window: int = 1024
    """Encoder tokens per independent window."""

    add_generation_prompt: bool = False
    """End with the header of the next assistant turn, as a server does."""

    json: bool = False
    """Print one JSON object instead of the coloured view."""


def main(options: Options) -> None:
    """Show what the model reads at a given K: token ids, latent regions and counts."""
    renderer = _renderer(options)
    window = Window(k=parse_k(options.k), polling=parse_polling(options.polling))
    trajectory = find_trajectory(options.trajectory, options.id)
    rendering = renderer.render(
        trajectory.messages,
        trajectory.tools,
        window=window,
        view=options.view,
        add_generation_prompt=options.add_generation_prompt,
    )
    if options.json:
        out(json.dumps(rendering_json(rendering)))
    else:
        _show(renderer, trajectory, rendering, window)


def find_trajectory(path: Path, trajectory_id: str | None) -> Trajectory:
    """Return the trajectory with this id, or the first.

    Raises:
        LohaError: when there is none.
    """
    for trajectory in read_trajectories(path):
        if trajectory_id in (None, trajectory.id):
            return trajectory
    what = "no trajectory" if trajectory_id is None else f"no trajectory with id {trajectory_id!r}"
    raise LohaError(f"{path}: {what}; `loha data import` writes such files")


def rendering_json(rendering: Rendering) -> dict[str, Any]:
    """Return the rendering as plain JSON data."""
    return {
        "token_ids": rendering.token_ids,
        "segments": [asdict(segment) for segment in rendering.segments],
        "full_text_tokens": rendering.full_text_tokens,
        "context_tokens": rendering.context_tokens,
        "latent_tokens": rendering.latent_tokens,
        "observations": rendering.observations,
        "assistant_spans": [span._asdict() for span in rendering.assistant_spans],
    }


def _renderer(options: Options) -> Renderer:
    encoder = load_tokenizer(options.encoder_tokenizer) if options.encoder_tokenizer else None
    settings = LatentSettings(ratio=options.ratio, window=options.encoder_window)
    return Renderer(load_tokenizer(options.tokenizer), encoder_tokenizer=encoder, settings=settings)


def _show(renderer: Renderer, trajectory: Trajectory, rendering: Rendering, window: Window) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for part in _parts(renderer, rendering):
        console.print(part)
    ratio = rendering.full_text_tokens / max(1, rendering.context_tokens)
    console.print(
        Text(
            f"{trajectory.id}: K={format_k(window.k)} P={window.polling}, {rendering.observations} observations, "
            f"{len(rendering.latents)} of them latent\n"
            f"full text {rendering.full_text_tokens} tokens, context {rendering.context_tokens} "
            f"({rendering.latent_tokens} latents), effective ratio {ratio:.2f}",
            style="bold",
        )
    )


def _parts(renderer: Renderer, rendering: Rendering) -> Iterator[Text]:
    """Yield the history as coloured text: latent observations magenta, text observations cyan, the rest plain."""
    counts = {latent.observation: latent.count for latent in rendering.latents}
    for segment in rendering.segments:
        ids = rendering.token_ids[segment.start : segment.start + segment.length]
        if segment.kind == "latent":
            count = counts[segment.observation] if segment.observation is not None else 0
            body = f"[observation {segment.observation}: {segment.source_tokens} tokens as {count} latents]"
            yield Text(body, style="bold magenta", end="")
        else:
            style = "cyan" if segment.observation is not None else ""
            yield Text(renderer.tokenizer.decode(ids), style=style, end="")
    yield Text("")
