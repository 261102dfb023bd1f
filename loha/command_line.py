"""Command lines: parse them with tyro or argparse, and tell what the user gave wrong in one line."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from loha.console import err
from loha.errors import LohaError

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_RULE = re.compile(r"[─-]{10,}")
_NAME, _EXPLANATION = 4, 8  # how far tyro indents the name of an option, and its help text
_UNWANTED = ("For full helptext", "Argument helptext")


def run_reporting(function: Callable[[], int | None]) -> int:
    """Call a command and return its exit status; user errors become one line on standard error and status 2."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        return function() or 0
    except (LohaError, OSError) as error:
        err("error: " + " ".join(str(error).split("\n")))
        return 2
    except KeyboardInterrupt:
        err("interrupted")
        return 130


def parse_options(kind: type, args: Sequence[str], *, prog: str, description: str | None = None, **more: Any) -> Any:
    """Return the options dataclass that a command line spells.

    Args:
        kind: the dataclass.
        args: the words after the command.
        prog: the command as the user typed it.
        description: for `--help`.
        more: further arguments of `tyro.cli`, such as `default`.

    Raises:
        LohaError: for missing or unknown options and bad values.
        SystemExit: after `--help`.
    """
    import tyro

    notes = io.StringIO()
    try:
        with contextlib.redirect_stderr(notes):
            options = tyro.cli(kind, args=list(args), prog=prog, description=description, **more)
    except SystemExit as end:
        if not end.code:
            raise
        raise LohaError(f"{in_one_line(notes.getvalue())}; see {prog} --help") from None
    sys.stderr.write(notes.getvalue())
    return options


def in_one_line(box: str) -> str:
    """Return what tyro's error says, without its title, frame and help texts.

    Where the output is UTF-8 the title is part of a frame, elsewhere a section of its own.
    """
    sections = [""]
    for line in _ANSI.sub("", box).splitlines():
        text = line.strip("│").rstrip()
        indent = len(text) - len(text.lstrip())
        if _RULE.search(text):
            sections.append("")
        elif text and not line.startswith(("╭", "╰")) and indent < _EXPLANATION:
            # Names of options stand indented on lines of their own; other lines are one text, wrapped.
            comma = indent >= _NAME and sections[-1] and not sections[-1].endswith(":")
            sections[-1] += (", " if comma else " ") + text.strip()
    if not _ANSI.sub("", box).lstrip().startswith("╭"):
        del sections[0]
    told = [section.strip() for section in sections if section and not section.strip().startswith(_UNWANTED)]
    return "; ".join(told).removesuffix(".") or "bad options"


class OneLineParser(argparse.ArgumentParser):
    """An argparse parser that raises instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        """Report what is wrong with the command line.

        Raises:
            LohaError: always.
        """
        raise LohaError(f"{message}; see {self.prog} --help")
