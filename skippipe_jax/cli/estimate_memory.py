"""The command that estimates memory of nodes, and bytes over links in an iteration."""

from __future__ import annotations

import argparse
import json

from skippipe_sched.errors import loading

from skippipe_jax import log
from skippipe_jax.cli.arguments import add_config_arguments, config_of

EPILOG = """\
No host is started and no data is read. If the case leaves stages or path lengths open, the
candidate that looks best without a search is estimated.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Estimate the memory that a node of each stage needs, and the bytes that an iteration "
        "sends over the links."
    )
    parser.epilog = EPILOG
    add_config_arguments(parser, resumes=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the estimate; return the exit code."""
    config = config_of(arguments)
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
        log.warning(sentence)
    return 0
