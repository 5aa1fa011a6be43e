"""The command that measures the cluster and writes a case for the planner."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from skippipe_sched.commands.output_files import require_writable, write
from skippipe_sched.errors import loading

from skippipe_jax import log
from skippipe_jax.cli.arguments import (
    add_cluster_arguments,
    add_config_arguments,
    config_of,
    connect_from_args,
)

EPILOG = """\
Start the command on all hosts like skippipe train, with the same configuration; it uses the
sections model, data and network, and from plan.case or plan.file what cannot be measured:
locations, stages or stage_count, path_length or skip_ratio,
microbatches or microbatches_per_data_node, rules, memory, and the number of nodes.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Measure links between hosts, compute time of each stage on each node, and memory, and "
        "write a case."
    )
    parser.epilog = EPILOG
    add_config_arguments(parser, resumes=False)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("case.yaml"),
        help="case file that host 0 writes; all measurements go to case.measured.json beside it",
    )
    add_cluster_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and write the case on host 0; return the exit code."""
    config = config_of(arguments)
    with loading():
        from skippipe_jax.profiling.case import check_template
        from skippipe_jax.profiling.cluster import measure
        from skippipe_jax.runtime.transport import open_transfers

    start = time.monotonic()
    with connect_from_args(arguments, config) as host:

        def say(text: str) -> None:
            if host.index == 0:
                log.output(f"[{time.monotonic() - start:5.1f} s] {text}")

        check_template(config, host.count)
        if host.index == 0:
            require_writable("--output", arguments.output)
        say(f"{host.count} hosts connected")
        links = open_transfers(host).links()
        say("links opened")
        profile = measure(config, host, links, say)
        if profile is not None:
            write("--output", arguments.output, profile.save)
            say(f"wrote {arguments.output}\n{profile.summary()}")
    return 0
