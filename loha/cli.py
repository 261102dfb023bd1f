"""The `loha` command: a table of subcommands, each loaded only when it is asked for."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from loha.command_line import parse_options, run_reporting
from loha.console import err, out

# Strings, so that `loha --help` imports neither torch nor vllm, and `loha` does not depend on `serving`.
COMMANDS: dict[tuple[str, ...], tuple[str, str]] = {
    ("data", "import"): (
        "loha.data_import:main",
        "read trajectories of five scaffolds into one canonical JSONL",
    ),
    ("data", "select"): ("loha.data_select:main", "keep the shortest successful trajectory per instance"),
    ("render",): ("loha.render_command:main", "show what the model reads at a given K"),
    ("encode",): ("loha.encode_command:main", "turn a text into latents with an LCLM checkpoint"),
    ("init",): ("loha.init_student:main", "make a student from a base and an LCLM checkpoint"),
    ("export",): ("loha.export:main", "merge a student into one serving checkpoint"),
    ("serve",): ("serving.launch:main", "start the OpenAI-compatible server with latent observations"),
    ("sweep",): ("serving.sweep:main", "run a grid of K over trajectories through an endpoint"),
    ("bench",): ("serving.bench:main", "replay recorded trajectories as agents would and compare arms"),
    ("plan",): ("acd.plan_command:main", "memory, FLOPs and hours of a training run before it starts"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one subcommand and exit: 0 on success, 2 when the user gave something wrong."""
    args = list(sys.argv[1:] if argv is None else argv)
    words = _match(args)
    if words is None and (not args or args[0] in ("-h", "--help")):
        out(usage())
        sys.exit(0)
    if words is None:
        err(f"error: {_unknown(args)}")
        sys.exit(2)
    target, _ = COMMANDS[words]
    sys.exit(run_main(_load(target), args[len(words) :], prog="loha " + " ".join(words)))


def run_main(function: Callable[[Any], int | None], args: Sequence[str], *, prog: str) -> int:
    """Parse `args` into the options dataclass of `function`, call it, and report user errors in one line.

    Args:
        function: takes one frozen dataclass of options; returns an exit status or None for 0.
        args: the words after the command.
        prog: the command as the user typed it, for `--help`.

    Returns:
        The exit status.
    """
    hints = get_type_hints(function, include_extras=True)
    options_type = next(hint for name, hint in hints.items() if name != "return")
    return run_reporting(lambda: function(parse_options(options_type, args, prog=prog, description=function.__doc__)))


def usage() -> str:
    """Return the list of commands."""
    width = max(len(" ".join(words)) for words in COMMANDS)
    lines = [f"  loha {' '.join(words):<{width}}  {text}" for words, (_, text) in COMMANDS.items()]
    return "usage: loha COMMAND [options]    (loha COMMAND --help explains each option)\n\n" + "\n".join(lines)


def _match(args: Sequence[str]) -> tuple[str, ...] | None:
    for length in (2, 1):
        if tuple(args[:length]) in COMMANDS:
            return tuple(args[:length])
    return None


def _unknown(args: Sequence[str]) -> str:
    """Say that there is no such command, and which one may have been meant."""
    known = [" ".join(words) for words in COMMANDS]
    families = [words for words in known if words.split()[0] == args[0]]
    near = (
        families
        or difflib.get_close_matches(" ".join(args[:2]), known, n=1)
        or difflib.get_close_matches(args[0], known, n=1)
    )
    hint = f"did you mean loha {' or loha '.join(near)}? " if near else ""
    return f"there is no command loha {' '.join(args[:2] if families else args[:1])}; {hint}see loha --help"


def _load(target: str) -> Callable[[Any], int | None]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
