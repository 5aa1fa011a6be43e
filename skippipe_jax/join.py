"""Join a run that trains, in the place of a host that it has lost or as one more.

python -m skippipe_jax.join ADDRESS
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched.errors import loading

from skippipe_jax.arguments import add_overrides, run_module

if TYPE_CHECKING:
    from skippipe_jax.training.trainer import Ending

EPILOG = """\
All that it needs comes from the other hosts: configuration, plans, tokenizer, and the state of its
stages. It takes the place of the first host that is lost, of those whose text it has: a place with
no data node needs none. Where none is lost it comes as one more, to one of join.places, if that
pays within join.horizon. If no place is free it waits, for cluster.rejoin_s.

exit codes: 0 trained to the end; 2 the input is wrong; 75 no host tells of a run, no place was free
in time, it did not pay to come, or others were lost or late: join again; 130 interrupted, and the
others go on; 143 stopped by SIGTERM, leaving the run to the others that go on with it, or stopped
with all of them.
"""

INTERRUPTED = "interrupted; the run goes on without this host"


def main() -> int:
    """Parse the command line, join and train; returns the exit code."""
    return run_module("skippipe_jax.join", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = (
        "Join a run from a machine that has nothing of it: in the place of a host that is lost, or "
        "as one more."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "address",
        metavar="ADDRESS",
        nargs="+",
        help="HOST:PORT where a host of the run listens, such as --coordinator; of several, the "
        "first that answers is asked",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="where to keep what is fetched (default: here, named after the run's own folder); "
        "what is there of this run already is not fetched again",
    )
    add_overrides(parser, "what differs on this host, such as data.path; may be given often")
    parser.set_defaults(command=_join, interrupted=INTERRUPTED)


def _join(arguments: argparse.Namespace) -> int:
    with loading():
        from skippipe_jax.cluster.ending import exit_at_once
        from skippipe_jax.connections.addresses import parse_address
        from skippipe_jax.training.joining import joined_by_address
        from skippipe_jax.training.trainer import train

    for address in arguments.address:
        parse_address("ADDRESS", address)
    given = arguments.address, arguments.run_dir, arguments.set
    with joined_by_address(*given) as (config, host):
        host.last_words = lambda: "Join again, if the run goes on."
        ending = train(config, host, resume=True, config_folder=Path(config.run_dir))
    _say_how_it_ended(ending)
    # Threads may still wait for what hosts that were lost will never send, and an ordinary exit
    # would end them within JAX.
    exit_at_once(0 if ending.cut_short_by is None else 128 + ending.cut_short_by)


def _say_how_it_ended(ending: Ending) -> None:
    if ending.has_left:
        print(
            f"this host has left the run, which goes on from step {ending.step}; it can join again"
        )
    elif ending.cut_short_by is not None:
        print(f"the run was stopped by {ending.cut_short_by.name} after step {ending.step}")
    else:
        print(f"the run is trained to step {ending.step}; what it has saved is in its own folder")


if __name__ == "__main__":
    sys.exit(main())
