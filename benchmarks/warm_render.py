"""What a render costs when its history came before, against template and encode from scratch.

    python benchmarks/warm_render.py --tokenizer DIR --trajectories FILE.jsonl [--k 3]

The history is the first row of a canonical JSONL file. The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from loha.command_line import OneLineParser, run_reporting
from loha.console import out
from loha.layout import Window, parse_k
from loha.render import Renderer
from loha.tokenizer_dir import load_tokenizer
from loha.trajectory import read_trajectories


def best_ms(work: Callable[[], object], repeats: int) -> float:
    """Return the shortest time of one call in milliseconds."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1000 * min(times)


def main() -> None:
    """Measure one history, the two kinds in turns."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--trajectories", required=True)
    parser.add_argument("--k", default="3")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    tokenizer = load_tokenizer(options.tokenizer)
    renderer = Renderer(tokenizer)
    trajectory = next(iter(read_trajectories(options.trajectories)))
    window = Window(k=parse_k(options.k))

    def from_scratch() -> None:
        text = tokenizer.apply_chat_template(trajectory.messages, tools=trajectory.tools, tokenize=False)
        tokenizer(text, add_special_tokens=False)

    def warm() -> int:
        return renderer.render(trajectory.messages, trajectory.tools, window=window).full_text_tokens

    tokens = warm()
    ratios = []
    for _ in range(options.rounds):
        scratch_ms, warm_ms = best_ms(from_scratch, 5), best_ms(warm, 10)
        ratios.append(warm_ms / scratch_ms)
        out(f"{tokens} tokens: from scratch {scratch_ms:.1f} ms, warm {warm_ms:.2f} ms, {ratios[-1]:.2%}")
    out(json.dumps({"tokens": tokens, "k": options.k, "warm_over_scratch": [round(r, 4) for r in ratios]}))


if __name__ == "__main__":
    sys.exit(run_reporting(main))
