"""What the commands of this package share: `--config F` and overrides of any key."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from acd.config import Config, load_config
from loha.command_line import OneLineParser
from loha.student import encoder_folder
from loha.student_files import StudentConfig, read_student_config


def command_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows `--config`; a command adds its own options."""
    parser = OneLineParser(
        prog=prog,
        description=description,
        epilog="Any key of the configuration can be overridden: --optimizer.lr-patch 5e-5 --run.output-dir runs/b",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, help="YAML file; examples are in configs/")
    return parser


def parse_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """Return the command's own options and the configuration with overrides applied."""
    options, overrides = parser.parse_known_args(argv)
    return options, load_config(options.config, overrides, prog=parser.prog)


def student_config(config: Config) -> StudentConfig:
    """Return what the student stands on, with the places that the configuration overrides."""
    student = read_student_config(config.model.student)
    return dataclasses.replace(
        student,
        base=config.model.base or student.base,
        encoder=str(encoder_folder(config.model.lclm)) if config.model.lclm else student.encoder,
    )
