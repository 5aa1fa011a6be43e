"""What a run would need: memory of a node of each stage, bytes over the links in an iteration.

python -m skippipe_jax.memory --config FILE
"""

from __future__ import annotations

import argparse
import json
import sys

from skippipe_sched.errors import loading

from skippipe_jax.arguments import add_config_arguments, run_module

EPILOG = """\
Nothing is started and no data is read. Of a case that leaves stages or path lengths open, the
choice that looks most promising without a search is taken.

exit codes: 0 printed; 2 the input is wrong.
"""


def main() -> int:
    """Parse the command line and print; returns the exit code."""
    return run_module("skippipe_jax.memory", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = (
        "Say how much memory a node of each stage needs to train by a configuration, and what an "
        "iteration sends over the links."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_config_arguments(parser, resumes=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_memory)


def _memory(arguments: argparse.Namespace) -> int:
    from skippipe_jax.config import load_config

    config = load_config(arguments.config, arguments.set)
    with loading():
        from skippipe_jax.models.estimate import table, to_json, what_is_planned
        from skippipe_jax.models.footprint import traffic
        from skippipe_jax.models.in_flight import short_of_memory
        from skippipe_jax.models.node_memory import least_memory_bytes, memory_of_stages

    case, visits = what_is_planned(config, arguments.config.parent)
    memory = memory_of_stages(config, case, memory_bytes=least_memory_bytes(case))
    sent = traffic(config, case, visits)
    if arguments.json:
        print(json.dumps(to_json(config, case, memory, sent)))
    else:
        print(table(config, case, memory, sent))
    for sentence in short_of_memory(config, case):
        print(f"warning: {sentence}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
