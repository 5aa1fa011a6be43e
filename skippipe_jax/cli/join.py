"""The command that joins a running training, replacing a failed host or as an extra one."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched.errors import InputError, loading

from skippipe_jax import log
from skippipe_jax.cli.arguments import add_addresses, add_log_level, add_overrides
from skippipe_jax.cli.serve import hold_stages

if TYPE_CHECKING:
    from skippipe_jax.training.trainer import RunResult

EPILOG = """\
This host replaces the first failed host whose training text it has; one without data nodes needs no
text. If none has failed, it joins as one of join.places extra hosts, if faster steps make up for
the state transfer within join.horizon. If the run is full, it waits for cluster.rejoin_s.
"""

INTERRUPTED = "interrupted; the run continues without this host"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Join a run in place of a failed host or as an extra host, or a service as a host of "
        "stages. This machine needs neither configuration nor run folder."
    )
    parser.epilog = EPILOG
    add_addresses(parser)
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder for downloads (default: ./ and the name of the run folder)",
    )
    about = "join as an extra host even if the transfer costs more time than it saves"
    parser.add_argument("--anyway", action="store_true", help=about)
    add_overrides(parser, "override a key on this host, such as data.path; repeatable")
    add_log_level(parser)
    parser.set_defaults(interrupted=INTERRUPTED)


def run(arguments: argparse.Namespace) -> int:
    """Join a run and train, or a service and hold stages; return the exit code."""
    with loading():
        from skippipe_jax.cluster.ending import exit_at_once
        from skippipe_jax.connections.addresses import parse_address
        from skippipe_jax.serving.stage_host import SERVICE_THERE
        from skippipe_jax.training.elastic.joining import joined_by_address
        from skippipe_jax.training.trainer import Trainer

    for address in arguments.address:
        parse_address("ADDRESS", address)
    request = arguments.address, arguments.run_dir, arguments.set
    with ExitStack() as stack:
        try:
            joined = stack.enter_context(joined_by_address(*request, anyway=arguments.anyway))
        except InputError as error:
            if error.problem != SERVICE_THERE:
                raise
            known = error.value in arguments.address
            address = str(error.value) if known else arguments.address[0]
            return hold_stages(address, arguments.set)
        config, host = joined
        host.resume_hint = lambda: "Join again if the run continues."
        result = Trainer(config, host=host, resume=True, config_folder=Path(config.run_dir)).run()
    log.output(result_message(Path(config.run_dir), host.leader_named, result))
    # Threads may still wait for messages from failed hosts, and an ordinary exit would end them
    # within JAX.
    exit_at_once(result.exit_code)


def result_message(local_folder: Path, leader: str, result: RunResult) -> str:
    """Return a sentence on how a run ended, for a host that joined it.

    `local_folder` is the run directory of this host, `leader` the last leader with its address.
    """
    from skippipe_jax.config.parsing import saved_config
    from skippipe_jax.storage.recording import TIMELINES
    from skippipe_jax.training.session import PROFILE

    if result.left_run:
        return (
            f"this host left; the run continues from step {result.step}. Rejoin with skippipe join"
        )
    where = f"on {leader}, in {saved_config(local_folder, 'run_dir').run_dir}"
    paths = [local_folder / name for name in (TIMELINES, PROFILE)]
    recorded = [str(path) for path in paths if path.exists()]
    local_files = f". Recorded by this host: {', '.join(recorded)}" if recorded else ""
    if result.stopped_by is not None:
        return (
            f"{result.stop_message}: all hosts stop after step {result.step}. The checkpoint is "
            f"{where}. After the run is resumed there, this host can join again{local_files}"
        )
    return f"finished {result.step} steps; the run is {where}{local_files}"
