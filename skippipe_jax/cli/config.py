"""The command that shows a configuration, all keys, or a JSON schema."""

from __future__ import annotations

import argparse
from pathlib import Path

from skippipe_jax.cli.arguments import accept_old_names, add_overrides, required_path

SHOW, KEYS, SCHEMA = "show", "keys", "schema"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Show a configuration with all defaults, list all keys, or print a JSON schema."
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=(SHOW, KEYS, SCHEMA),
        default=SHOW,
        help="show: as YAML, with the file of each value if it extends another; keys: with type, "
        "default and meaning; schema: for editors",
    )
    parser.add_argument("--config", type=Path, help="configuration file to show, YAML")
    add_overrides(parser, "override a key of --config; repeatable")
    accept_old_names(parser, print="--config")
    for former in (KEYS, SCHEMA):
        parser.add_argument(f"--{former}", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Print a configuration, all keys, or the schema; return the exit code."""
    if arguments.keys or arguments.action == KEYS:
        from skippipe_jax.config.describe import describe_keys

        print(describe_keys())
    elif arguments.schema or arguments.action == SCHEMA:
        from skippipe_jax.config.describe import to_text

        print(to_text(), end="")
    else:
        from skippipe_jax.config.parsing import parse_config, read_files, to_yaml

        files = read_files(
            required_path("--config", arguments.config, []), "--config", arguments.set
        )
        with files.naming():
            config = parse_config(files.tree)
        print(files.annotated(to_yaml(config)), end="")
    return 0
