"""Run as a program: stock vLLM on a stock checkpoint, greedy replies to chat histories. No plugin of ours is loaded."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(checkpoint: str, histories: str, replies: str, new_tokens: int) -> None:
    """Read a JSON list of histories and write a JSON list of lists of token ids."""
    os.environ["VLLM_PLUGINS"] = ""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from vllm import LLM, SamplingParams

    engine = LLM(checkpoint, dtype="float32", max_model_len=8192, enforce_eager=True, block_size=32, seed=0)
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    outputs = engine.chat(json.loads(Path(histories).read_text()), sampling, use_tqdm=False)
    # Renamed into place, so that a reader never sees half a file.
    temporary = Path(replies + ".tmp")
    temporary.write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
    temporary.replace(replies)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
