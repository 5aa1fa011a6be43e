"""The command that generates the secret of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from skippipe_jax.connections.keys import FILE_VARIABLE, SECRET_VARIABLE, make_secret


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Generate the secret with which the hosts of a run authenticate each other and encrypt "
        "their messages. Any host with the secret can join the run."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="new file, readable only by you")


def run(arguments: argparse.Namespace) -> int:
    """Write the secret; return the exit code."""
    make_secret(arguments.file)
    print(
        f"{arguments.file} holds a new secret, which only you may read.\n"
        "Copy it to every host of the run as you would a password, such as by scp -p, and name it "
        "there:\n"
        f"  cluster: {{secret: {arguments.file}}}\n"
        f"in the configuration, or its path in {FILE_VARIABLE}, or what it holds in "
        f"{SECRET_VARIABLE}.\n"
        "Who has it can be a host of the run, read along and end it: keep it out of run_dir, "
        "images and repositories."
    )
    return 0
