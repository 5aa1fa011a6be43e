"""Train a LLaMA along the paths of a plan, as one host or as one of many.

python -m skippipe_jax.train --config FILE
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import jax
from skippipe_sched.errors import run_command

from skippipe_jax.cluster.membership import Membership, joined
from skippipe_jax.config import Config, load_config, to_yaml
from skippipe_jax.storage.layout import latest_step
from skippipe_jax.training.trainer import Ending, train

EPILOG = """\
Under SLURM and on TPU pods the hosts find each other; elsewhere start one process on each host with
--coordinator, --hosts and --host-id. python -m skippipe_jax.launch does that on one machine.

exit codes: 0 trained to the end; 2 the input is wrong; 75 another host was lost, or something was
waited for too long: start it again with --resume; 130 and 143 stopped by SIGINT and SIGTERM after a
last checkpoint.
"""

INTERRUPTED = "interrupted at once; what the last checkpoint holds is kept"


def main() -> int:
    """Parse the command line and train; returns the exit code."""
    arguments = _parser().parse_args()
    return run_command(lambda: _run(arguments), INTERRUPTED)


def add_config_arguments(parser: argparse.ArgumentParser, *, resumes: bool = True) -> None:
    """The arguments that give the configuration, and that a run `resumes` if a command does so."""
    parser.add_argument("--config", type=Path, required=True, help="the configuration, YAML")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.SUB=VALUE",
        help="override one key of the configuration; may be given often",
    )
    if resumes:
        parser.add_argument(
            "--resume",
            action="store_true",
            help="go on from the last checkpoint in run_dir, or in checkpoint.copy_to where there "
            "is no run_dir any more",
        )


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments by which a process finds the other hosts, as `joined_by` reads them."""
    cluster = parser.add_argument_group("many hosts")
    cluster.add_argument("--coordinator", metavar="HOST:PORT", help="where host 0 listens")
    cluster.add_argument("--hosts", type=int, metavar="N", help="how many hosts there are")
    cluster.add_argument("--host-id", type=int, metavar="I", help="which of them this is, from 0")
    cluster.add_argument(
        "--distributed",
        action="store_true",
        help="let JAX find the cluster (for TPU pods whose environment does not name the others)",
    )


def joined_by(arguments: argparse.Namespace, config: Config) -> AbstractContextManager[Membership]:
    """Keep compiled programs as `config` says, and be one of the hosts that `arguments` name."""
    if config.compilation_cache is not None:
        _keep_programs(os.path.expanduser(config.compilation_cache))
    return joined(
        config.cluster,
        arguments.coordinator,
        arguments.hosts,
        arguments.host_id,
        arguments.distributed,
    )


def _keep_programs(cache: str) -> None:
    """Let JAX keep compiled programs in a folder; one that cannot be used costs time only."""
    try:
        os.makedirs(cache, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            jax.config.update("jax_compilation_cache_dir", cache)
            # All of them: a run has many that compile quickly.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    except OSError as error:
        print(
            f"warning: compilation_cache = {cache!r}: cannot be used: {error.strerror}. Programs "
            "are compiled anew in every run",
            file=sys.stderr,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m skippipe_jax.train",
        description="Train a LLaMA over a pipeline in which every microbatch takes its own path.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_arguments(parser)
    add_cluster_arguments(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.set)
    with joined_by(arguments, config) as host:
        host.last_words = lambda: where_to_resume(config)
        if host.index == 0:
            print(to_yaml(config), flush=True)
        ending = train(config, host, resume=arguments.resume, config_folder=arguments.config.parent)
    if host.index == 0:
        _say_how_it_ended(config, ending)
    return 0 if ending.cut_short_by is None else 128 + ending.cut_short_by


def where_to_resume(config: Config) -> str:
    """The sentence that tells from where a run that ended early can go on."""
    step = latest_step(Path(config.run_dir))
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
