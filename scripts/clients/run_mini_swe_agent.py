"""mini-swe-agent, unchanged, against a running server, to completion on a toy repository.

Its own environment, outside this one:

    python -m venv clients && clients/bin/pip install mini-swe-agent==2.4.6 litellm==1.110.2
    loha serve CHECKPOINT --k 1 --polling 1 --max-model-len 16384 &
    clients/bin/python scripts/clients/run_mini_swe_agent.py --server http://127.0.0.1:8000

`mini` runs with its shipped configuration in its local environment; K and P come from the model's name. What the model
says is scripted (see scripted_model.py), since the point is the endpoint and not the weights. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from scripted_model import bash_call, scripted_model

CALC = '''"""Arithmetic on whole numbers, for people who count on their fingers."""


def add(a: int, b: int) -> int:
    """Return the sum of two whole numbers, whatever their signs."""
    return a - b


def double(a: int) -> int:
    """Return twice the number."""
    return add(a, a)
'''
TEST = """from calc import add, double

assert add(2, 3) == 5, f"add(2, 3) gave {add(2, 3)}"
assert double(4) == 8, f"double(4) gave {double(4)}"
"""
SCRIPT = [
    bash_call("Let me look at the repository.", "ls && cat calc.py test_calc.py"),
    bash_call("Let me see the test fail.", "python3 test_calc.py"),
    bash_call("The sum subtracts.", "sed -i 's/return a - b/return a + b/' calc.py && cat calc.py"),
    bash_call("Let me see the test pass.", "python3 test_calc.py && echo all assertions hold"),
    bash_call("Done.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
]


def main() -> int:
    """Run the agent and check what it left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--layout", default="k1p1", help="suffix of the model's name")
    options = parser.parse_args()
    with urllib.request.urlopen(f"{options.server}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder, scripted_model(options.server, SCRIPT) as (url, usages):
        repository = Path(folder) / "toy"
        repository.mkdir()
        (repository / "calc.py").write_text(CALC)
        (repository / "test_calc.py").write_text(TEST)
        result = run_mini(repository, Path(folder), f"{model}:{options.layout}", url)
        fixed = subprocess.run([sys.executable, "test_calc.py"], cwd=repository).returncode == 0
    latents = [usage["loha"]["latent_tokens"] for usage in usages]
    summary = {
        "client": "mini-swe-agent",
        "exit_status": result["info"]["exit_status"],
        "calls": len(usages),
        "latents_per_call": latents,
        "context_per_call": [usage["loha"]["context_tokens"] for usage in usages],
        "full_text_per_call": [usage["loha"]["full_text_tokens"] for usage in usages],
        "repository_fixed": fixed,
    }
    ok = fixed and result["info"]["exit_status"] == "Submitted" and len(usages) == len(SCRIPT) and latents[-1] > 0
    sys.stdout.write(json.dumps({"ok": ok, **summary}) + "\n")
    return 0 if ok else 1


def run_mini(repository: Path, folder: Path, model: str, url: str) -> dict:
    """Run `mini` on the repository and return its trajectory file."""
    output = folder / "trajectory.json"
    # fmt: off
    command = [
        str(Path(sys.executable).with_name("mini")), "--yolo", "--exit-immediately", "--cost-limit", "0",
        "--task", "The test in test_calc.py fails. Mend calc.py.",
        "--model", f"openai/{model}", "--output", str(output),
        "-c", "mini.yaml",
        "-c", f"model.model_kwargs.api_base={url}", "-c", "model.model_kwargs.api_key=none",
        "-c", "model.model_kwargs.max_tokens=600", "-c", "model.cost_tracking=ignore_errors",
    ]
    # fmt: on
    environment = os.environ | {"MSWEA_CONFIGURED": "true", "MSWEA_GLOBAL_CONFIG_DIR": str(folder / "config")}
    subprocess.run(command, cwd=repository, env=environment, stdout=sys.stderr, check=True, timeout=900)
    return json.loads(output.read_text())


if __name__ == "__main__":
    sys.exit(main())
