"""How an array gets from one node to another.

One interface with two implementations: nodes of one process pass arrays by `jax.device_put`,
nodes of different processes by JAX's transfer server. Neither blocks: what `receive` returns may
still be on its way.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from skippipe_jax.program.compiler import Hop

# What a server copies at a time, and how many copies it makes ahead of the network: with more of
# either it holds several times what it sends, and is no quicker.
PIECE_BYTES = 1 << 20
PARALLEL_COPIES = 2


class Link(ABC):
    """A way between nodes. Each hop of an iteration is sent once and received once."""

    @abstractmethod
    def send(self, hop: Hop, iteration: int, array: jax.Array) -> None:
        """Hand over what the hop carries; the caller must not donate it afterwards."""

    @abstractmethod
    def receive(self, hop: Hop, iteration: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        """What the hop carries, on the device of its target node; its shape is that of `like`."""


class WithinProcess(Link):
    """Between devices of this process."""

    def __init__(self, device_of: Mapping[int, jax.Device]):
        """`device_of[n]` is the device of node n, for this process's nodes."""
        self.device_of = device_of
        self.underway: dict[Hop, jax.Array] = {}

    def send(self, hop: Hop, iteration: int, array: jax.Array) -> None:
        """Copy to the device of the target node, if that is another one."""
        self.underway[hop] = jax.device_put(array, self.device_of[hop.target])

    def receive(self, hop: Hop, iteration: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Take what `send` copied."""
        return self.underway.pop(hop)


class BetweenProcesses(Link):
    """To and from one other process, which pulls what this one offers."""

    # Names of transfers are numbers of 64 bits: the iteration, then the hop within it.
    HOP_BITS = 24

    def __init__(
        self,
        server: transfer.TransferServer,
        address: str,
        device_of: Mapping[int, jax.Device],
    ):
        """Through our `server` and that at `address`, each for the other process alone.

        `device_of[n]` is the device of node n of ours.
        """
        self.server = server
        self.address = address
        self.device_of = device_of
        # Made when it is first needed: most hosts exchange nothing with most others.
        self.connection: transfer.TransferConnection | None = None

    def send(self, hop: Hop, iteration: int, array: jax.Array) -> None:
        """Offer the array under the hop's name until the other process has pulled it."""
        self.server.await_pull(self._name(hop, iteration), [array])

    def receive(self, hop: Hop, iteration: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Ask the other process for the array, which it may offer later."""
        if self.connection is None:
            self.connection = self.server.connect(self.address)
        here = SingleDeviceSharding(self.device_of[hop.target])
        wanted = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=here)
        [array] = self.connection.pull(self._name(hop, iteration), [wanted])
        return array

    def _name(self, hop: Hop, iteration: int) -> int:
        return (iteration << self.HOP_BITS) + hop.number


class Transfers:
    """JAX's transfer servers of this process, one for each other host, and where theirs are.

    One server sends, and receives, one array after another, whoever it is for: with one for all,
    a slow link would hold up the quick ones. On a link of its own it keeps the order of offering.
    """

    def __init__(
        self,
        host: int,
        hosts: int,
        backend: Any,
        listen_on: Sequence[str],
        exchange: Callable[[str], Sequence[str]],
    ):
        """All hosts call this together, for the client of JAX's `backend` that has their devices.

        `listen_on` are the addresses, "IP:PORT", on which this host's servers take requests and
        send arrays. Port 0 means any; other ports are those for host 0, and the server for host h
        has those 2h above. `exchange` tells all hosts a text (where these servers are reached) and
        returns everyone's, by host.
        """
        self.host = host
        self.servers = {
            other: transfer.start_transfer_server(
                backend,
                _port_above(listen_on[0], other),
                [_port_above(listen_on[1], other)],
                max_num_parallel_copies=PARALLEL_COPIES,
                transfer_size=PIECE_BYTES,
            )
            for other in range(hosts)
            if other != host
        }
        here = json.dumps({other: server.address() for other, server in self.servers.items()})
        told = exchange(here) if hosts > 1 else []
        self.addresses = {other: json.loads(told[other])[str(host)] for other in self.servers}

    def links(self, device_of: Mapping[int, jax.Device]) -> dict[int, Link]:
        """A link to every host, this one included; `device_of` maps this host's nodes."""
        return {
            self.host: WithinProcess(device_of),
            **{
                other: BetweenProcesses(server, self.addresses[other], device_of)
                for other, server in self.servers.items()
            },
        }


def _port_above(address: str, host: int) -> str:
    name, _, port = address.rpartition(":")
    return address if port == "0" else f"{name}:{int(port) + 2 * host}"


def open_links(
    host: int,
    hosts: int,
    device_of: Mapping[int, jax.Device],
    listen_on: Sequence[str],
    exchange: Callable[[str], Sequence[str]],
) -> dict[int, Link]:
    """A link from this host to every host of the run, itself included (see `Transfers`)."""
    backend = next(iter(device_of.values())).client
    return Transfers(host, hosts, backend, listen_on, exchange).links(device_of)
