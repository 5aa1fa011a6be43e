"""How an array gets from one host to another: by JAX's transfer server, which blocks nobody.

What `receive` returns may still be on its way. Between nodes of one host `jax.device_put` does it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import transfer
from jax.sharding import Sharding

from skippipe_jax.cluster.agreement import gather
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config
from skippipe_jax.program.hops import NUMBER_BITS, Hop

# What a server copies at a time, and how many copies it makes ahead of the network: with more of
# either it holds several times what it sends, and is no quicker.
PIECE_BYTES = 1 << 20
PARALLEL_COPIES = 2


class HostLink:
    """To and from one other host, which pulls what this one offers.

    Each hop of an iteration is sent once and received once.
    """

    def __init__(
        self, server: transfer.TransferServer, address: str, shardings: Mapping[int, Sharding]
    ):
        """Through our `server` and that at `address`, each for the other host alone.

        `shardings[n]` says how arrays lie on the devices of node n of ours.
        """
        self.server = server
        self.address = address
        self.shardings = shardings
        # Made when it is first needed: most hosts exchange nothing with most others.
        self.connection: transfer.TransferConnection | None = None

    def send(self, hop: Hop, iteration: int, array: jax.Array) -> None:
        """Offer what the hop carries until it is pulled; it must not be donated before that."""
        self.server.await_pull(_name(hop, iteration), [array])

    def receive(self, hop: Hop, iteration: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Ask for what the hop carries, which may be offered later; it is shaped as `like`."""
        if self.connection is None:
            self.connection = self.server.connect(self.address)
        here = self.shardings[hop.target]
        wanted = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=here)
        [array] = self.connection.pull(_name(hop, iteration), [wanted])
        return array


def _name(hop: Hop, iteration: int) -> int:
    """Names of transfers are numbers of 64 bits: the iteration, then the hop within it."""
    return (iteration << NUMBER_BITS) + hop.number


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

    def links(self, shardings: Mapping[int, Sharding]) -> dict[int, HostLink]:
        """A link to every other host; `shardings` are those of this host's nodes."""
        return {
            other: HostLink(server, self.addresses[other], shardings)
            for other, server in self.servers.items()
        }


def open_transfers(config: Config, host: Membership) -> Transfers:
    """The transfer servers of this host; all hosts call this together."""

    def exchange(address: str) -> list[str]:
        told = gather(host, "transfer_server", lambda: address, config.cluster.connect_timeout_s)
        return [told[index] for index in range(host.count)]

    backend = jax.local_devices()[0].client
    return Transfers(host.index, host.count, backend, host.transfer_addresses(), exchange)


def _port_above(address: str, host: int) -> str:
    name, _, port = address.rpartition(":")
    return address if port == "0" else f"{name}:{int(port) + 2 * host}"
