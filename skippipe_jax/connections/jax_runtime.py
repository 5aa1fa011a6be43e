"""JAX's distributed runtime: cluster detection, start and shutdown. Not all runs use it.

This is the only module that uses `jax._src`.
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
    """Detect the address of host 0, the number of hosts, and this host's id.

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
        problem = "JAX did not detect a cluster"
    except (RuntimeError, ValueError) as error:  # The latter: variables that are no numbers.
        address = count = index = None
        problem = f"JAX could not detect the cluster: {error}"
    if address is None or count is None or index is None:
        remedy = "Set --coordinator HOST:PORT, --hosts N and --host-id I"
        raise InputError("--distributed", True, problem, remedy)
    return address, count, index


def sockets() -> tempfile.TemporaryDirectory[str]:
    """Create a directory for the unix sockets of `start`; it may be removed after that."""
    # In /tmp: a socket path is limited to about 100 bytes, and TMPDIR can be longer.
    return tempfile.TemporaryDirectory(prefix="skippipe-", dir="/tmp")


def start(config: ClusterConfig, index: int, count: int, sockets: str, address: str) -> None:
    """Start JAX's distributed runtime, which connects through the port of host 0.

    `sockets` is the directory of the unix sockets of the service and the relay. `address` is the
    address on which this host listens.
    """
    # The service would catch SIGTERM, and the host would not end.
    jax.config.update("jax_enable_preemption_service", False)
    # JAX's failure detection aborts with a stack trace, so ours has to detect a loss first.
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
    """Shut down JAX's runtime together with all other hosts."""
    jax.distributed.shutdown()


def _listen_for_collectives_on(address: str) -> None:
    """Make the CPU collectives listen on `address`, not on what the host name resolves to."""

    def make_client() -> Any:
        collectives = _jax.make_gloo_tcp_collectives(
            distributed_client=jax_distributed.global_state.client, hostname=address
        )
        return xla_bridge.make_cpu_client(collectives)

    # This replaces JAX's own factory, which takes no address.
    xla_bridge.register_backend_factory("cpu", make_client, fail_quietly=False)
