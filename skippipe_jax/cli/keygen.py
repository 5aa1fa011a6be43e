"""The command that generates the secret of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from skippipe_jax.connections.keys import FILE_VARIABLE, SECRET_VARIABLE, make_secret


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Generate the secret with which hosts of a run authenticate each other and encrypt "
        "messages. Any host with the secret can join the run."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="new file, readable only by you")


def run(arguments: argparse.Namespace) -> int:
    """Write the secret; return the exit code."""
    make_secret(arguments.file)
    print(
        f"wrote a new secret to {arguments.file}, readable only by you.\n"
        "Copy the file to every host of the run, as you would a password (for example, scp -p).\n"
        "Set its path on each host, in the configuration:\n"
        f"  cluster: {{secret: {arguments.file}}}\n"
        f"or in the environment variable {FILE_VARIABLE}; or set {SECRET_VARIABLE} to the secret "
        "itself.\n"
        "Anyone with the secret can join the run, read its messages and stop it: keep it out of "
        "run_dir, images and repositories."
    )
    return 0
