"""Context manager that makes this process a host of a run for the duration of a block."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

from skippipe_sched.errors import TemporaryError, Terminated, as_input_error

from skippipe_jax import log
from skippipe_jax.cluster.ending import exit_at_once, exit_decision, resume_hint_in_time
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.cluster.position import (
    HostPosition,
    chosen_runtime,
    find_position,
    require_same_runtime,
)
from skippipe_jax.config import ClusterConfig, Config
from skippipe_jax.config.cluster import DISTRIBUTED
from skippipe_jax.config.resume import identity, settings
from skippipe_jax.connections import jax_runtime
from skippipe_jax.connections.hello import RunIdentity
from skippipe_jax.connections.keys import Keys
from skippipe_jax.errors import PeerTimeout


@contextlib.contextmanager
def connect(
    config: Config,
    coordinator: str | None = None,
    num_hosts: int | None = None,
    host_id: int | None = None,
    *,
    detect: bool = False,
    last_addresses: Sequence[str] = (),
    run: RunIdentity | None = None,
    is_joiner: bool = False,
) -> Iterator[Membership]:
    """Make this process a host of a run for a block; enter it before the first use of JAX.

    Hosts come from ``coordinator``, ``num_hosts`` and ``host_id`` where given; else from SLURM (a
    step of several tasks) or a TPU pod (several workers) as JAX detects them, or, with ``detect``,
    from any cluster that JAX detects. Otherwise the membership has one host. Several hosts run JAX
    as ``cluster.runtime`` says: one JAX client each, or connected by `jax.distributed`.

    A block that ends without error leaves the run. With several hosts, an error ends the process:
    with `LOST_HOST_EXIT_CODE` and a message about the lost host if a lost host caused it; else the
    error is printed and sent to the others, and all end as `exit_decision` says. `PeerTimeout`
    ends the process of a single host too: its message is printed and the code is
    `LOST_HOST_EXIT_CODE`.

    Args:
        config: configuration of the run, the same on all hosts.
        coordinator: ``HOST:PORT`` on host 0 that all hosts can reach.
        num_hosts: number of processes in the run.
        host_id: this process's index among them.
        detect: let JAX detect the cluster, even without hints in the environment.
        last_addresses: last known addresses of the run's hosts. If one of them answers, the run is
            alive and has lost this host, which `is_outside` until `Membership.request_admission`.
        run: identity of the run, by which hosts of other runs are rejected; by default as in
            ``config``.
        is_joiner: this host may only join a live run, and its end does not end the others.

    Raises:
        InputError: for arguments that contradict each other.
        TemporaryError: for an address that does not answer, a port that is taken, and hosts that do
            not connect within ``cluster.connect_timeout_s``.
    """
    cluster, extra_hosts = config.cluster, config.join.places
    beside = extra_hosts if is_joiner else 0
    position = find_position(cluster, coordinator, num_hosts, host_id, detect, beside)
    if position is not None:
        run = run or RunIdentity(identity(config), settings(config))
        extra_hosts = cluster.with_ports(position.count, extra_hosts)
        position = replace(position, run=run, keys=Keys.of(cluster), extra_hosts=extra_hosts)
    runtime = chosen_runtime(cluster, detect)
    membership = _join(cluster, position, runtime, last_addresses, is_joiner)
    try:
        yield membership
        membership.leave()
    except BaseException as error:
        _abandon(membership, error, is_joiner)
        raise


def _join(
    config: ClusterConfig,
    position: HostPosition | None,
    runtime: str,
    last_addresses: Sequence[str],
    is_joiner: bool,
) -> Membership:
    if position is None or position.count == 1:
        return Membership(config, 0, 1)
    membership = Membership(config, position.index, position.count, runtime == DISTRIBUTED)
    if last_addresses and not membership.is_distributed:
        membership.enter(position, None, last_addresses)
        if membership.is_outside:
            return membership
        if is_joiner:
            problem = "no host at these addresses has a running job that this host can join"
            raise TemporaryError("join", ", ".join(last_addresses), problem, "Join again later")
        membership = Membership(config, position.index, position.count)
    with jax_runtime.sockets() if membership.is_distributed else nullcontext() as sockets:
        membership.enter(position, sockets)
        try:
            require_same_runtime(membership, config, runtime)
            if sockets is not None:
                jax_runtime.start(
                    config, position.index, position.count, sockets, membership.address
                )
        except BaseException as error:
            _abandon(membership, error)
            raise
    return membership


def _abandon(membership: Membership, error: BaseException, is_joiner: bool = False) -> None:
    """End this process because of its own error, or of the lost host that caused the error.

    It returns on a single host, unless the error is a `PeerTimeout`.
    """
    if isinstance(error, PeerTimeout):
        membership.stop(str(error))
    if membership.count == 1:
        return
    membership.explain(error)
    decision = exit_decision(error, is_training=membership.is_training, joined=is_joiner)
    words = resume_hint_in_time(membership.resume_hint, decision.code)
    if decision.sentence:
        log.error(f"{decision.sentence} {words}".strip())
    else:
        traceback.print_exception(error)
        if words:
            log.error(words)
    if isinstance(error, KeyboardInterrupt):
        by = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
        what = f"was interrupted ({by.name})"
    else:
        ending = as_input_error(error) or error
        what = f"failed: {type(ending).__name__}: {ending}".removesuffix(": ")
    membership.fail(what, decision.code_of_peers)
    # Not by raising: at a normal exit JAX waits for collectives and hosts that are gone.
    exit_at_once(decision.code)
