"""LiteLLM against a running server: extra_body, layouts in the model's name, streams, tools, its exceptions.

    clients/bin/pip install litellm==1.110.2
    clients/bin/python scripts/clients/run_litellm.py --server http://127.0.0.1:8000

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from typing import Any

import litellm
from scripted_model import bash_call

WORDS = "".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(20))
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
COMMAND = '{"command": "ls"}'
CALL = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": COMMAND}}
HISTORY = [
    {"role": "user", "content": "task"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": WORDS},
]
LATENT = {"loha": {"k": 0, "polling": 1}}


def main() -> int:
    """Make the calls and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    server = parser.parse_args().server
    with urllib.request.urlopen(f"{server}/v1/models") as response:
        card = json.load(response)["data"][0]
    name = f"openai/{card['id']}"

    def ask(model: str = name, messages: Any = HISTORY, **more: Any) -> Any:
        settings = {"api_base": f"{server}/v1", "api_key": "none", "max_tokens": 60, "temperature": 0.0} | more
        return litellm.completion(model=model, messages=messages, **settings)

    body = ask(extra_body=LATENT)
    named = ask(f"{name}:k0p1")
    said = {"structured_outputs": {"choice": [bash_call("Let me look.", "ls")]}}  # any weights can say it
    called = ask(extra_body=LATENT | said, tools=[TOOL], max_tokens=200).choices[0].message.tool_calls
    chunks = list(ask(extra_body=LATENT, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    flood = [{"role": "user", "content": WORDS * (card["max_model_len"] // 20)}]
    seen = {
        "extra_body_makes_latents": body.usage.model_dump()["loha"]["latent_tokens"] > 0,
        "name_equals_extra_body": named.choices[0].message.content == body.choices[0].message.content
        and named.usage.model_dump()["loha"]["context_tokens"] == body.usage.model_dump()["loha"]["context_tokens"],
        "stream_equals_whole": streamed == body.choices[0].message.content,
        "tool_call": [(call.function.name, call.function.arguments) for call in called] == [("bash", COMMAND)],
        "overflow": raised(lambda: ask(messages=flood)),
        "impossible_k": raised(lambda: ask(extra_body={"loha": {"k": -1}})),
        "unknown_suffix": raised(lambda: ask(f"{name}:latest")),
    }
    expected = {
        "overflow": "ContextWindowExceededError",
        "impossible_k": "BadRequestError",
        "unknown_suffix": "NotFoundError",
    }
    ok = all(seen[key] == expected.get(key, True) for key in seen)
    sys.stdout.write(json.dumps({"client": "litellm", "ok": ok, **seen}) + "\n")
    return 0 if ok else 1


def raised(ask: Any) -> str:
    """Return the name of LiteLLM's exception."""
    try:
        ask()
    except Exception as error:  # noqa: BLE001  its exceptions share no base class of their own
        return type(error).__name__
    return "none"


if __name__ == "__main__":
    sys.exit(main())
