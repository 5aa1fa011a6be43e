"""JAX's distributed runtime: what it detects, its start and end. Not all runs have one.

All that this project takes from `jax._src` is here.
"""

from __future__ import annotations

import math
import os
import tempfile
from typing import Any

import jax
from jax._src import config as jax_config
from jax._src import distributed as jax_distributed
from jax._src import xla_bridge
from jax._src.clusters import ClusterEnv
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from skippipe_sched.errors import InputError

from skippipe_jax.config import ClusterConfig


def detect(config: ClusterConfig) -> tuple[str, int, int]:
    """Find the address of host 0, the number of hosts, and which of them this one is.

    Raises:
        InputError: if JAX detects no cluster.
    """
    try:
        address, count, index, _ = ClusterEnv.auto_detect_unset_distributed_params(
            coordinator_address=os.environ.get("JAX_COORDINATOR_ADDRESS"),
            num_processes=None,
            process_id=None,
            local_device_ids=None,
            cluster_detection_method=None,
            initialization_timeout=math.ceil(config.connect_timeout_s),
        )
        problem = "JAX detects no cluster here"
    except RuntimeError as error:
        address = count = index = None
        problem = f"JAX could not detect the cluster: {error}"
    if address is None or count is None or index is None:
        remedy = "give --coordinator HOST:PORT, --hosts N and --host-id I"
        raise InputError("--distributed", True, problem, remedy)
    return address, count, index


def sockets() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for the unix sockets by which `start` connects; nobody needs it after that."""
    # In /tmp, since the path of a socket may have about 100 bytes only and TMPDIR can be longer.
    return tempfile.TemporaryDirectory(prefix="skippipe-", dir="/tmp")


def start(config: ClusterConfig, index: int, count: int, sockets: str, address: str) -> None:
    """Connect JAX's distributed runtime by way of the links that `Membership` keeps.

    `sockets` is the folder of the unix sockets on which the service and the relay are, `address`
    that on which this host listens.
    """
    # It would catch SIGTERM, so that a host told to end would run on.
    jax.config.update("jax_enable_preemption_service", False)
    # JAX's own loss detection aborts with a stack trace instead of a message: it comes second.
    late = math.ceil(2 * config.heartbeat_timeout_s + 60)
    service = f"unix:{sockets}/service"
    jax.distributed.initialize(
        coordinator_address=service if index == 0 else f"unix:{sockets}/relay",
        coordinator_bind_address=service,
        num_processes=count,
        process_id=index,
        initialization_timeout=math.ceil(config.connect_timeout_s),
        heartbeat_timeout_seconds=late,
        shutdown_timeout_seconds=late,
    )
    if jax_config.cpu_collectives_implementation.value == "gloo":
        _listen_for_collectives_on(address)


def stop() -> None:
    """Part from JAX's runtime on the other hosts, once all of them do."""
    jax.distributed.shutdown()


def _listen_for_collectives_on(address: str) -> None:
    """Give the CPU's collectives this address, where they would take what the host's name means."""

    def make_client() -> Any:
        collectives = _jax.make_gloo_tcp_collectives(
            distributed_client=jax_distributed.global_state.client, hostname=address
        )
        return xla_bridge.make_cpu_client(collectives)

    # In place of JAX's own way to make it, which takes no address.
    xla_bridge.register_backend_factory("cpu", make_client, fail_quietly=False)
