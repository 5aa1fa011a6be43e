"""Train a LLaMA along the paths of a plan, as one host or as one of many.

python -m skippipe_jax.train --config FILE
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched.errors import loading

from skippipe_jax.arguments import (
    add_cluster_arguments,
    add_config_arguments,
    joined_by,
    run_module,
)

if TYPE_CHECKING:
    from skippipe_jax.config import Config
    from skippipe_jax.training.trainer import Ending

EPILOG = """\
Under SLURM and on TPU pods the hosts find each other; elsewhere start one process on each host with
--coordinator, --hosts and --host-id. python -m skippipe_jax.launch does that on one machine.

exit codes: 0 trained to the end; 2 the input is wrong; 75 another host was lost or late, something
was waited for too long, or the disk is full, a port taken, the folder in use: start it again, with
--resume if the run had begun; 130 and 143 stopped by SIGINT and SIGTERM, after a last checkpoint,
or at once before it trains, or leaving a run to the others that go on with it.
"""

INTERRUPTED = "interrupted at once; what the last checkpoint holds is kept"


def main() -> int:
    """Parse the command line and train; returns the exit code."""
    return run_module("skippipe_jax.train", add_arguments)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Tell a parser of this command."""
    parser.description = (
        "Train a LLaMA over a pipeline in which every microbatch takes its own path."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_config_arguments(parser)
    add_cluster_arguments(parser)
    parser.set_defaults(command=_train, interrupted=INTERRUPTED)


def _train(arguments: argparse.Namespace) -> int:
    from skippipe_jax.config import load_config
    from skippipe_jax.config.differences import summary

    # What is wrong there is said before anything is loaded that takes seconds.
    config = load_config(arguments.config, arguments.set)
    with loading():
        from skippipe_jax.cluster.ending import exit_at_once
        from skippipe_jax.training.trainer import train

    with joined_by(arguments, config) as host:
        host.last_words = lambda: where_to_resume(config)
        if host.index == 0:
            print(summary(config), flush=True)
        ending = train(config, host, resume=arguments.resume, config_folder=arguments.config.parent)
    if ending.has_left:
        print(
            f"host {host.index} has left the run, which goes on from step {ending.step}; "
            "it comes back by --resume"
        )
    elif host.leads:
        _say_how_it_ended(config, ending)
    code = 0 if ending.cut_short_by is None else 128 + ending.cut_short_by
    if host.generation not in (0, 1):
        # Threads may still wait for what hosts that were lost will never send, and an ordinary exit
        # would end them within JAX.
        exit_at_once(code)
    return code


def where_to_resume(config: Config) -> str:
    """The sentence that tells from where a run that ended early can go on."""
    from skippipe_jax.storage.layout import latest_step
    from skippipe_jax.storage.run_folder import is_run

    folder = Path(config.run_dir)
    step = latest_step(folder)
    if step is None and not (is_run(folder) or config.checkpoint.copy_to):
        return f"Start it again: no run has begun in {config.run_dir} yet."
    if step is None:
        # Not without --resume: the folder holds the run already.
        return f"Start it again with --resume: without a checkpoint, {config.run_dir} begins anew."
    return f"Start it again with --resume to go on from step {step} in {config.run_dir}."


def _say_how_it_ended(config: Config, ending: Ending) -> None:
    if ending.cut_short_by is not None:
        name = ending.cut_short_by.name
        print(f"stopped by {name} after step {ending.step}. {where_to_resume(config)}")
    else:
        print(
            f"trained to step {ending.step}; the run is in {config.run_dir}. Its held-out loss: "
            f"python -m skippipe_jax.evaluate --run {config.run_dir}"
        )


if __name__ == "__main__":
    sys.exit(main())
