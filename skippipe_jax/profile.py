"""Measure the cluster, and write a case that the planner takes as it is.

python -m skippipe_jax.profile --config FILE -o case.yaml
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skippipe_sched.errors import InputError, kind_of, loading

from skippipe_jax.arguments import (
    add_cluster_arguments,
    add_config_arguments,
    joined_by,
    run_module,
)

EPILOG = """\
Start it on all hosts like python -m skippipe_jax.train, with the same configuration. Of that it
takes model, data and network; plan.case may say what cannot be measured: locations, stages or
stage_count, path_length or skip_ratio, microbatches or microbatches_per_data_node, rules, and
memory: the most microbatches in flight on a node, or auto.

exit codes: 0 the case is written; 2 the input is wrong; 75 another host was lost or late, the disk
is full or a port taken: start it again.
"""


def main() -> int:
    """Parse the command line and measure; returns the exit code."""
    return run_module("skippipe_jax.profile", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = (
        "Measure the links between hosts, the seconds of each stage on each node and its memory, "
        "and write a case that the planner takes as it is."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_config_arguments(parser, resumes=False)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("case.yaml"),
        help="where host 0 writes the case, and beside it all figures in full, as "
        "case.measured.json (default: %(default)s)",
    )
    add_cluster_arguments(parser)
    parser.set_defaults(command=_profile)


def _profile(arguments: argparse.Namespace) -> int:
    from skippipe_jax.config import load_config

    config = load_config(arguments.config, arguments.set)
    with loading():
        import jax

        from skippipe_jax.profiling.case import check_template
        from skippipe_jax.profiling.cluster import measure
        from skippipe_jax.runtime.topology import sharding_of
        from skippipe_jax.runtime.transport import open_transfers

    start = time.monotonic()
    with joined_by(arguments, config) as host:

        def say(text: str) -> None:
            if host.index == 0:
                print(f"[{time.monotonic() - start:5.1f} s] {text}", flush=True)

        check_template(config, host.count)
        if host.index == 0:
            _make_room(arguments.output)
        say(f"{host.count} hosts have met")
        # Each host stands for a node.
        here = {host.index: sharding_of((jax.local_devices()[0],))}
        links = open_transfers(config, host).links(here)
        say("links are open")
        profile = measure(config, host, links, say)
        if profile is not None:
            with _writing(arguments.output):
                profile.save(arguments.output)
            say(f"{arguments.output} is written\n{profile.summary()}")
    return 0


def _make_room(path: Path) -> None:
    """Make the folder of a file, so that what cannot be written is known at the start."""
    if path.is_dir():
        raise InputError("--output", str(path), "is a folder", "Name a file")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise kind_of(error)(
            "--output", str(path), f"cannot be written: {error.strerror}", "Name another file"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
