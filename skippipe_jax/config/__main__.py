"""What a configuration says and what one may say.

python -m skippipe_jax.config --print FILE
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from skippipe_sched.errors import run_command


def main() -> int:
    """Parse the command line and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m skippipe_jax.config")
    add_arguments(parser)
    arguments = parser.parse_args()
    return run_command(lambda: arguments.command(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = "Show a configuration in full, or all that one may say."
    shown = parser.add_mutually_exclusive_group(required=True)
    shown.add_argument(
        "--print", type=Path, metavar="CONFIG", help="a configuration with all defaults, as YAML"
    )
    shown.add_argument(
        "--keys", action="store_true", help="every key with its type, default and meaning"
    )
    shown.add_argument(
        "--schema", action="store_true", help="a JSON schema, by which editors complete and check"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.SUB=VALUE",
        help="override one key of --print; may be given often",
    )
    parser.set_defaults(command=_config)


def _config(arguments: argparse.Namespace) -> int:
    if arguments.keys:
        from skippipe_jax.config.keys import keys_in_words

        print(keys_in_words())
    elif arguments.schema:
        from skippipe_jax.config.schema import to_text

        print(to_text(), end="")
    else:
        from skippipe_jax.config.parsing import load_config, to_yaml

        print(to_yaml(load_config(arguments.print, arguments.set)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
