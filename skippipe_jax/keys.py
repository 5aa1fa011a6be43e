"""Make the secret by which the hosts of a run know each other.

python -m skippipe_jax.keys FILE
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from skippipe_jax.arguments import run_module
from skippipe_jax.connections.secret import FILE_VARIABLE, SECRET_VARIABLE, make_secret


def main() -> int:
    """Parse the command line and write a secret; returns the exit code."""
    return run_module("skippipe_jax.keys", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = (
        "Write a new secret for a run, which its hosts show each other that they have. Whoever has "
        "it can be one of them."
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a new file, which only you may read"
    )
    parser.set_defaults(command=_keys)


def _keys(arguments: argparse.Namespace) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
