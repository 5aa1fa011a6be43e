"""The command that starts all hosts of a run on this machine, and restarts failed ones."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from skippipe_sched import fields

from skippipe_jax.campaign.restart_policy import (
    FIRST_PAUSE_S,
    FORGOTTEN_S,
    LONGEST_PAUSE_S,
    MOST_FAULTS,
)
from skippipe_jax.cli.arguments import (
    accept_old_names,
    add_config_arguments,
    add_log_level,
    config_of,
)

if TYPE_CHECKING:
    from skippipe_jax.config import Config

NEVER, RESUME, JOIN = "never", "resume", "join"
"""Restart of a failed host: none, with its id, or by joining at addresses of live hosts."""

EPILOG = f"""\
--restart=resume restarts a host that a signal killed or that exited with code 75, with --resume if
the run has begun. After a local error (code 1 and others, and 75 while another host is down), a
host is restarted at most --max-restarts times; every {FORGOTTEN_S / 60:g} min of running time
restore one restart. The pause before a restart is {FIRST_PAUSE_S:g} s; it doubles each time that
the host exits within a minute, to {LONGEST_PAUSE_S:g} s at most. No host is restarted after code 0,
2, 130 or 143, after SIGINT or SIGTERM to this command, or after the end of training.

--restart=join is for hosts that cannot access run_dir: the host joins, as with skippipe join, with
a folder of its own beside run_dir.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.description = (
        "Start all N hosts of a run on this machine. If a host fails during startup, all are "
        "stopped. Later, with cluster.runtime: independent, the run continues without hosts that "
        "a signal kills."
    )
    parser.epilog = EPILOG
    add_config_arguments(parser)
    parser.add_argument("--hosts", type=int, required=True, metavar="N", help="number of hosts")
    about, choices = "restart failed hosts, see below", (NEVER, RESUME, JOIN)
    parser.add_argument("--restart", choices=choices, default=NEVER, help=about)
    about = "maximum restarts of a host after local errors"
    parser.add_argument("--max-restarts", type=int, default=MOST_FAULTS, metavar="N", help=about)
    about = "time for hosts to stop before they are killed"
    parser.add_argument("--kill-after", default="60s", metavar="TIME", help=about)
    parser.add_argument(
        "--respawn", dest="restart", nargs="?", const=RESUME, choices=(RESUME, JOIN),
        help=argparse.SUPPRESS,
    )  # fmt: skip
    accept_old_names(parser, grace="--kill-after")
    add_log_level(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run all hosts until they end; return the exit code.

    Raises:
        InputError: for arguments or a configuration that no host could use.
    """
    from skippipe_jax.connections.addresses import chosen_address, join_address
    from skippipe_jax.connections.keys import Keys
    from skippipe_jax.local.hosts import LocalHosts, free_port, joining, living_addresses

    hosts = fields.integer(arguments.hosts, "--hosts", 1)
    grace_s = fields.duration(arguments.kill_after, "--kill-after")
    # Report errors here once instead of once per host.
    config = config_of(arguments)
    from skippipe_jax.config.parsing import is_run
    from skippipe_jax.storage.run_dir import MEMBERSHIP

    address = chosen_address(config.cluster.bind_address) or "127.0.0.1"
    Keys.of(config.cluster).require_allowed(address)
    coordinator = join_address(address, free_port(address))
    command = [sys.executable, "-m", "skippipe_jax.train", "--config", str(arguments.config)]
    command += [word for override in arguments.set for word in ("--set", override)]
    level = ["--log-level", arguments.log_level]
    host_arguments = [*level, "--coordinator", coordinator, "--hosts", str(hosts), "--host-id"]
    folder, start_s = Path(config.run_dir), time.time()
    # An existing run continues only with --resume; otherwise the hosts reject it.
    is_new = not is_run(folder)
    if is_new:
        _require_nodes(config, hosts)

    def command_of(host: int) -> list[str]:
        live = living_addresses(folder) if arguments.restart == JOIN and is_elastic() else []
        if live:
            return [*joining(live, Path(f"{folder}-joined-{host}"), config.cluster), *level]
        resumes = arguments.resume or (is_new and is_run(folder))
        return [*command, *["--resume"] * resumes, *host_arguments, str(host)]

    def is_elastic() -> bool:
        path = folder / MEMBERSHIP
        return path.exists() and path.stat().st_mtime >= start_s

    restarts = fields.integer(arguments.max_restarts, "--max-restarts", 0)
    max_restarts = None if arguments.restart == NEVER else restarts
    launched = LocalHosts(range(hosts), command_of, grace_s, is_elastic, max_restarts)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: launched.told(number))
    return launched.run()


def _require_nodes(config: Config, hosts: int) -> None:
    """Reject more hosts than a new run has nodes, if the configuration gives their number.

    Otherwise each host would report it after all have started.

    Raises:
        InputError: for hosts without a node, or for a plan or a case that cannot be read.
    """
    from skippipe_sched.problem.case import node_count
    from skippipe_sched.problem.plan import load_plan

    from skippipe_jax.program.compiler import hosts_of_nodes

    case = config.plan.case
    if isinstance(case, str):
        case = fields.load_yaml(Path(case), "case")
    if config.plan.file is not None:
        nodes = len(load_plan(Path(config.plan.file)).case.nodes)
    elif isinstance(case, dict) and "nodes" in case:
        nodes = node_count(case["nodes"])
    else:  # By default each measuring host is a node.
        nodes = len(config.cluster.host_of_node or range(hosts))
    hosts_of_nodes(nodes, hosts, config.cluster.host_of_node)
