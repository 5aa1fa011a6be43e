"""The command that writes an initial configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

from skippipe_sched.commands.output_files import write
from skippipe_sched.errors import InputError

from skippipe_jax.cli.arguments import DEFAULT_CONFIG

TEMPLATES = Path(__file__).with_name("templates")
TEXT = "Put your text into the folder text, or set data.path"
NEXT = {
    "one-machine": f"{TEXT}. Then run:\n  skippipe train{{config}}",
    "several-machines": f"{TEXT}.\nGenerate the secret of the run, copy it to all machines, and "
    "start a host on each, with its id I from 0 to N - 1:\n  skippipe keygen secret\n"
    "  skippipe train{config} --coordinator ADDRESS_OF_HOST_0:8476 --hosts N --host-id I",
    "given-model": f"{TEXT}.\nPut the model into the folder model, or set init_from. Install the "
    'extra hf (pip install -e ".[hf]"), then run:\n  skippipe train{config}',
}
"""Next steps to print, for each kind of configuration."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = "Write a commented configuration file to edit."
    about = "for one machine, several, or fine-tuning a given model on one machine"
    parser.add_argument("--kind", choices=NEXT, default=next(iter(NEXT)), help=about)
    about, default = "new file", DEFAULT_CONFIG
    parser.add_argument("--output", type=Path, default=default, metavar="FILE", help=about)


def run(arguments: argparse.Namespace) -> int:
    """Write the file, and print the next steps; return the exit code.

    Raises:
        InputError: if the file exists, or cannot be written.
    """
    output = arguments.output
    if output.exists():
        raise InputError(
            "--output", str(output), "already exists", "Give another path, or remove the file"
        )
    template = (TEMPLATES / f"{arguments.kind}.yaml").read_text(encoding="utf-8")
    write("--output", output, template)
    config = "" if output == DEFAULT_CONFIG else f" --config {output}"
    print(f"wrote {output}\n{NEXT[arguments.kind].format(config=config)}")
    return 0
