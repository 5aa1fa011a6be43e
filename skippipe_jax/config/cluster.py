"""The section `cluster`: which host serves which node, how hosts run JAX, where they listen."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import Annotated

from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.choices import Choice, require_choices

AUTO, INDEPENDENT, DISTRIBUTED = RUNTIMES = Choice(("auto", "independent", "distributed"))


@dataclass(frozen=True)
class ClusterConfig:
    """Which host serves which node, and when hosts give each other up.

    Attributes:
        host_of_node: the host that serves each node; by default the plan's nodes in order, evenly
            over the hosts.
        runtime: `independent`: every host has a JAX of its own, with its own devices only, and what
            hosts exchange goes by transfer servers. `distributed`: one JAX (`jax.distributed`) has
            the devices of all hosts, so that its collectives can sum over them. `auto` is
            `distributed` under SLURM, on TPU pods and with `--distributed`, else `independent`.
        heartbeat_timeout_s: seconds of silence after which a host is lost.
        connect_timeout_s: seconds in which all hosts must have found each other; also the longest
            that a host which has finished waits for the others to finish.
        bind_address: the IP address of this host on which everything of the run listens: the hub
            (host 0 only), the transfer servers and, where hosts are `distributed`, the CPU's
            collectives. As all hosts share the configuration, each gets its own by the environment
            variable SKIPPIPE_BIND_ADDRESS, which wins. By default, the address by which this host
            and host 0 reach each other.
        transfer_port: with p, the transfer server of host i for host j, of N hosts, listens on the
            ports p + 2(iN + j) (requests) and the next (arrays), so that several hosts may share a
            machine, and a firewall that lets p to p + 2N² - 1 through serves all of them. By
            default, on any free ports.
    """

    host_of_node: tuple[int, ...] | None = None
    runtime: Annotated[str, RUNTIMES] = AUTO
    heartbeat_timeout_s: float = 30.0
    connect_timeout_s: float = 300.0
    bind_address: str | None = None
    transfer_port: int | None = None

    def __post_init__(self) -> None:
        """Refuse timeouts that no host could keep, and what is no runtime, address or port."""
        require_choices(self, "cluster")
        for field in ("heartbeat_timeout_s", "connect_timeout_s"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise InputError(
                    f"cluster.{field}", value, "not a positive time", "give seconds above 0"
                )
        if self.bind_address is not None:
            require_one_interface(self.bind_address, "cluster.bind_address")
        if self.transfer_port is not None:
            fields.integer(self.transfer_port, "cluster.transfer_port", 1, LAST_PORT - 1)


LAST_PORT = (1 << 16) - 1


def require_one_interface(address: str, field: str) -> None:
    """Refuse what is no IP address, or stands for every interface."""
    remedy = "give an IP address of this host, such as 10.0.0.1"
    try:
        stands_for_all = ipaddress.ip_address(address).is_unspecified
    except ValueError as error:
        raise InputError(field, address, "not an IP address", remedy) from error
    if stands_for_all:
        raise InputError(field, address, "no other host can reach such an address", remedy)
