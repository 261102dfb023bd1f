"""Run the project's own commands one after the other, as a user would type them, with the time each took."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loha.errors import LohaError

BIN = Path(sys.executable).parent
REPOSITORY = Path(__file__).resolve().parent.parent
READY = "ready: "
"""How `loha serve` begins the line that it prints when its server may be used."""


@dataclass
class Story:
    """A numbered run of commands; each prints what it does, and the end prints where the time went."""

    title: str
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of all commands."""

    def __post_init__(self) -> None:
        self.console.rule(f"[bold]{self.title}")

    def step(self, text: str, *command: str | Path, quiet: bool = False) -> str:
        """Run one command from the repository's root and wait for it.

        Args:
            text: what the step is for, in the story's words.
            command: the command; its program is looked up beside the running Python.
            quiet: keep its standard output for the caller instead of the screen.

        Returns:
            Standard output when quiet, else "".

        Raises:
            LohaError: when the command fails; names it.
        """
        return self.together({text: command}, quiet=quiet)[text]

    def together(self, commands: Mapping[str, Sequence[str | Path]], *, quiet: bool = False) -> dict[str, str]:
        """Run commands side by side, as `step` does each; the output of all but the first is shown only when it fails.

        Args:
            commands: by the text of the step.
            quiet: keep all standard output for the caller instead of the screen.

        Returns:
            Standard output by step, "" where it went to the screen.
        """
        began = time.monotonic()
        running = []
        for number, (text, command) in enumerate(commands.items()):
            self._announce(text, command, number)
            pipe = subprocess.PIPE if quiet or number else None
            errors = subprocess.PIPE if number else None
            process = subprocess.Popen(
                resolve(command), cwd=REPOSITORY, text=True, stdout=pipe, stderr=errors, env=os.environ | self.variables
            )
            running.append((text, command, process))
        outputs = {}
        for text, command, process in running:
            output, errors = process.communicate()
            outputs[text] = output or ""
            self.seconds[text] = time.monotonic() - began
            if process.returncode:
                self.console.print(outputs[text] + (errors or ""), markup=False)
                for _, _, other in running:
                    other.kill()
                raise LohaError(f"step failed with exit status {process.returncode}: {shlex.join(map(str, command))}")
        return outputs

    @contextmanager
    def server(self, text: str, *command: str | Path, log: Path, wait_s: float = 300.0) -> Iterator[str]:
        """Start a server on a free port, wait until it says `ready:`, yield its base URL, stop it.

        Args:
            text: what the server is for.
            command: the command, to which `--port N` is added.
            log: file for its output.
            wait_s: seconds to wait for readiness.
        """
        port = free_port()
        command = (*command, "--port", str(port))
        self._announce(text, command)
        began = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as sink:
            process = subprocess.Popen(
                resolve(command),
                cwd=REPOSITORY,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | self.variables,
            )
            try:
                wait_ready(process, log, wait_s)
                self.seconds[text] = time.monotonic() - began
                yield f"http://127.0.0.1:{port}/v1"
            finally:
                stop(process)

    def finish(self) -> None:
        """Print where the time went."""
        table = Table(title="where the time went", title_justify="left")
        table.add_column("step")
        table.add_column("seconds", justify="right")
        for text, seconds in self.seconds.items():
            table.add_row(text, f"{seconds:.0f}")
        table.add_row("all", f"{time.monotonic() - self.started:.0f}", style="bold")
        self.console.print(table)

    def _announce(self, text: str, command: Sequence[str | Path], beside: int = 0) -> None:
        self.console.print(f"\n[bold cyan]{len(self.seconds) + 1 + beside}. {text}[/]")
        self.console.print("   $ " + shlex.join(map(str, command)), style="dim")


def resolve(command: Sequence[str | Path]) -> list[str]:
    """Return the command with its program replaced by the one in the running environment, where there is one."""
    program, *rest = map(str, command)
    local = BIN / program
    return [str(local) if local.exists() else program, *rest]


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                continue


def wait_ready(process: subprocess.Popen[bytes], log: Path, wait_s: float) -> None:
    """Wait until a launcher says in its log that it has checked its server and opened it.

    The server's own /health answers earlier: as soon as the engine runs, whatever the launcher finds out then.

    Raises:
        LohaError: when the process ends first, or not in time; names the log.
    """
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        ended = process.poll()
        lines = log.read_text(errors="replace").splitlines()
        if ended is not None:
            tail = "\n".join(lines[-20:])
            raise LohaError(f"the server stopped with exit status {ended} before it was ready; see {log}\n{tail}")
        if any(line.startswith(READY) for line in lines):
            return
        time.sleep(0.5)
    raise LohaError(f"the server was not ready after {wait_s:.0f} s; see {log}")
