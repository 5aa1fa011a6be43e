"""Host id, number of hosts and JAX runtime of this process, from arguments or the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from skippipe_sched.errors import InputError

from skippipe_jax.cluster.agreement import Host, from_host_0
from skippipe_jax.config import ClusterConfig
from skippipe_jax.config.cluster import AUTO, DISTRIBUTED, INDEPENDENT
from skippipe_jax.connections import jax_runtime
from skippipe_jax.connections.addresses import parse_address
from skippipe_jax.connections.hello import RunIdentity
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys


@dataclass(frozen=True)
class HostPosition:
    """Position of this host in a run of several."""

    index: int
    count: int
    coordinator: tuple[str, int]  # address and port of host 0
    run: RunIdentity = field(
        default_factory=RunIdentity
    )  # identity of the run, the same on all hosts
    keys: Keys = LOOPBACK_ONLY  # keys with which hosts authenticate each other
    extra_hosts: int = 0  # number of extra hosts that may join


def find_position(
    config: ClusterConfig,
    coordinator: str | None,
    hosts: int | None,
    host_id: int | None,
    distributed: bool,
    extra_hosts: int = 0,
) -> HostPosition | None:
    """Find this host's position from the arguments or the environment; None for a single host.

    Raises:
        InputError: for arguments that contradict each other, or a cluster that JAX cannot detect.
    """
    if (coordinator, hosts, host_id) != (None, None, None):
        return _position_from_arguments(coordinator, hosts, host_id, extra_hosts)
    if distributed or _is_launched_with_others():
        address, count, index = jax_runtime.detect(config)
        return HostPosition(index, count, parse_address("detected --coordinator", address))
    return None


def chosen_runtime(config: ClusterConfig, distributed: bool) -> str:
    """Choose the JAX runtime: as configured, else by the environment or ``--distributed``."""
    if config.runtime != AUTO:
        return config.runtime
    return DISTRIBUTED if distributed or _is_launched_with_others() else INDEPENDENT


def require_same_runtime(host: Host, config: ClusterConfig, runtime: str) -> None:
    """Refuse a host whose JAX runtime differs from that of host 0; all hosts call this together.

    Raises:
        InputError: on a host whose runtime differs.
        TimeoutError: the runtime of host 0 has not arrived within ``connect_timeout_s``.
    """
    timeout_s = config.connect_timeout_s
    if runtime != from_host_0(host, "cluster.runtime", lambda: runtime, timeout_s):
        raise InputError(
            "cluster.runtime",
            config.runtime,
            f"selects {runtime} on host {host.index}, and not on host 0",
            f"Set it to {INDEPENDENT} or {DISTRIBUTED} on all hosts",
        )


def _position_from_arguments(
    coordinator: str | None, hosts: int | None, host_id: int | None, extra_hosts: int
) -> HostPosition:
    together = "Give --coordinator HOST:PORT, --hosts N and --host-id I together, or none of them"
    if coordinator is None:
        raise InputError("--coordinator", None, "is required with --hosts or --host-id", together)
    if hosts is None:
        raise InputError("--hosts", None, "is required with --coordinator", together)
    if host_id is None:
        raise InputError("--host-id", None, "is required with --coordinator", together)
    if hosts < 1:
        raise InputError("--hosts", hosts, "must be at least 1", "Give the number of hosts")
    if not 0 <= host_id < hosts + extra_hosts:
        remedy = f"Give each host its own id from 0 to {hosts - 1}"
        raise InputError("--host-id", host_id, f"is out of range for {hosts} hosts", remedy)
    return HostPosition(host_id, hosts, parse_address("--coordinator", coordinator))


def _is_launched_with_others() -> bool:
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or "1"
    # A batch script has tasks as well, but only in a step (srun) do they all run this program.
    if "SLURM_STEP_NODELIST" in os.environ and tasks != "1":
        return True
    addresses = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    return addresses is not None and "," in addresses
