"""How an array gets from one host to another: by JAX's transfer server, which blocks nobody.

What `receive` returns may still be on its way. Between nodes of one host `jax.device_put` does it.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import Sharding, SingleDeviceSharding
from skippipe_sched.errors import TemporaryError

from skippipe_jax.cluster.agreement import gather
from skippipe_jax.cluster.group import Group
from skippipe_jax.connections.addresses import join_address, parse_address, require_free
from skippipe_jax.connections.severing import sever
from skippipe_jax.program.hops import Hop
from skippipe_jax.runtime.spread import devices_of, parts_of

# What a server copies at a time, and how many copies it makes ahead of the network: with more of
# either it holds several times what it sends, and is no quicker.
PIECE_BYTES = 1 << 20
PARALLEL_COPIES = 2

# The longest that the end of a server may take.
CLOSING_S = 5.0


# What is given after a step is named by the step and this: no training gets so far.
AFTER_A_STEP = 1 << 48


class Reached:
    """The last iteration in which this host has sent anything, over whichever link.

    Iterations and what goes on behind them send from threads of their own.
    """

    def __init__(self, iteration: int):
        """Begin with the iteration before the first in which anything is sent."""
        self.iteration = iteration
        self._lock = threading.Lock()

    def note(self, iteration: int) -> None:
        """Note that something was sent in an iteration."""
        with self._lock:
            self.iteration = max(self.iteration, iteration)


class HostLink:
    """To and from one other host, which pulls what this one offers.

    Each hop of an iteration is sent once and received once.
    """

    def __init__(
        self,
        server: transfer.TransferServer,
        key: bytes,
        address: str,
        key_there: bytes,
        shardings: Mapping[int, Sharding],
        reached: Reached,
        apart: int,
    ):
        """Through our `server` and that at `address`, each for the other host alone.

        What a server sends is named by its key. `shardings[n]` says where arrays come to that are
        whole, of node n of ours. What this host has `reached` all its links know, and that the
        other may be so many iterations `apart`.
        """
        self.server: transfer.TransferServer | None = server
        self.key, self.key_there = key, key_there
        self.address = address
        self.shardings = shardings
        # Made when it is first needed: most hosts exchange nothing with most others.
        self.connection: transfer.TransferConnection | None = None
        self._connecting = threading.Lock()
        # By the number of each hop, the iteration in which it was sent last.
        self._sent: dict[int, int] = {}
        self._reached = reached
        self._apart = apart
        self._expected: list[tuple[Collection[int], int | None]] = []

    def expect(self, numbers: Collection[int], *, after: int = 0, once: bool = False) -> None:
        """Expect the other host to ask for hops of these numbers, sent from here or not.

        It does so in each iteration, whose name comes after `after`; or `once`, in iteration 0.
        """
        self._expected.append((numbers, None if once else after))

    def send(self, hop: Hop, iteration: int, array: jax.Array) -> None:
        """Offer what the hop carries until it is pulled; it must not be donated before that.

        What is cut over a mesh goes in its parts, to one that is equal.
        """
        self._open_server.await_pull(_name(self.key, hop.number, iteration), parts_of(array))
        self._sent[hop.number] = iteration
        if iteration < AFTER_A_STEP:
            # States are handed over in iteration 0, whatever came before.
            self._reached.note(iteration)

    def receive(self, hop: Hop, iteration: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        """Ask for what the hop carries, which may be offered later; it is shaped as `like`.

        It comes whole to a device of the node, or lies as `like` has it.
        """
        with self._connecting:
            if self.connection is None:
                self.connection = self._open_server.connect(self.address)
        here = like.sharding or self.shardings[hop.target]
        shape = here.shard_shape(like.shape)
        wanted = [
            jax.ShapeDtypeStruct(shape, like.dtype, sharding=SingleDeviceSharding(device))
            for device in devices_of(here)
        ]
        parts = self.connection.pull(_name(self.key_there, hop.number, iteration), wanted)
        if len(parts) == 1:
            return parts[0]
        return jax.make_array_from_single_device_arrays(like.shape, here, parts)

    def close(self) -> None:
        """Let go of all that was offered and asked for; what this host still waits for fails.

        Threads end and descriptors are closed, whether the other host lives, hangs or is gone.
        """
        if self.server is None:
            return
        # An ask that nobody answers ends only with its connection.
        own, other = (parse_address("address", at) for at in (self.server.address(), self.address))
        sever([own, other])
        # The same ask holds the server that it came to, with all that is offered there, until what
        # it asks for is offered.
        nothing = jax.device_put(np.zeros(1, np.uint8))
        for number, iteration in self._names():
            self.server.await_pull(_name(self.key, number, iteration), [nothing])
        self.server = self.connection = None

    def _names(self) -> set[tuple[int, int]]:
        """Whatever was offered here and may not have been pulled, or may have been asked for."""
        # The other host may be ahead, and what goes behind the iterations was sent before.
        back = 0 if self._apart == 1 else self._apart
        further, sent = range(-back, self._apart + 1), [*self._sent.items()]
        names = {(number, last + more) for number, last in sent for more in further}
        now = self._reached.iteration
        for numbers, after in self._expected:
            iterations = [0] if after is None else [after + now + more for more in further]
            names |= {(number, name) for number in numbers for name in iterations}
        return {(number, name) for number, name in names if name >= 0}

    @property
    def _open_server(self) -> transfer.TransferServer:
        assert self.server is not None, "is open"
        return self.server


def _wait_until_free(host: str, port: int) -> None:
    """Return when a server that has been let go of listens no more, which another thread ends."""
    until_s = time.monotonic() + CLOSING_S
    while time.monotonic() < until_s:
        try:
            return require_free("cluster.transfer_port", host, port)
        except TemporaryError:
            time.sleep(0.01)


def _name(key: bytes, number: int, iteration: int) -> int:
    """Names of transfers are numbers of 64 bits, which nobody guesses who has not the key."""
    what = struct.pack(">QQ", iteration, number)
    return int.from_bytes(hashlib.blake2b(what, digest_size=8, key=key).digest())


class Transfers:
    """JAX's transfer servers of this process, one for each other host, and where theirs are.

    One server sends, and receives, one array after another, whoever it is for: with one for all,
    a slow link would hold up the quick ones. On a link of its own it keeps the order of offering.
    """

    def __init__(
        self,
        host: int,
        backend: Any,
        requests: Mapping[int, str],
        arrays: str,
    ):
        """Open them, for the client of JAX's `backend` that has this host's devices.

        The server for host h takes requests at `requests[h]`, "IP:PORT", where port 0 means any,
        and arrays on any port of the IP address `arrays`.
        """
        self._host = host
        # Another in each generation of hosts: what was asked for in one means nothing in the next.
        self.key = secrets.token_bytes(16)
        self._opened: list[HostLink] = []
        self.servers = {
            other: transfer.start_transfer_server(
                backend,
                address,
                # JAX ends the process where the port of arrays is a certain one: it is to be at
                # once where it listens and where its connections begin.
                [join_address(arrays, 0)],
                max_num_parallel_copies=PARALLEL_COPIES,
                transfer_size=PIECE_BYTES,
            )
            for other, address in requests.items()
        }
        self.addresses: dict[int, str] = {}
        self.keys: dict[int, bytes] = {}

    @property
    def endpoint(self) -> dict[str, Any]:
        """Where these servers are reached, by host, and the key of what they send: for JSON."""
        reached = {str(other): server.address() for other, server in self.servers.items()}
        return {"key": self.key.hex(), "reached": reached}

    def connect(self, endpoints: Sequence[Mapping[str, Any]]) -> None:
        """Know the `endpoint` of every host, before `links` are made."""
        others = {other: endpoints[other] for other in self.servers}
        here = str(self._host)
        self.addresses = {other: there["reached"][here] for other, there in others.items()}
        self.keys = {other: bytes.fromhex(there["key"]) for other, there in others.items()}

    def links(
        self, shardings: Mapping[int, Sharding], first: int = 0, apart: int = 1
    ) -> dict[int, HostLink]:
        """Make a link to every other host; `shardings` are those of this host's nodes.

        The iterations in which they are used begin with the `first`; hosts are so many `apart` at
        most.
        """
        reached = Reached(first)
        links = {
            other: HostLink(
                server,
                self.key,
                self.addresses[other],
                self.keys[other],
                shardings,
                reached,
                apart,
            )
            for other, server in self.servers.items()
        }
        self._opened += links.values()
        return links

    def close(self) -> None:
        """Close all links, and free their ports."""
        reached = [parse_address("address", server.address()) for server in self.servers.values()]
        self.servers.clear()
        for link in self._opened:
            link.close()
        self._opened.clear()
        for address in reached:
            _wait_until_free(*address)


def open_servers(host: Group) -> Transfers:
    """Open the transfer servers of this host, which does not know those of others yet."""
    backend = jax.local_devices()[0].client
    return Transfers(host.index, backend, host.transfer_addresses(), host.address)


def open_transfers(host: Group) -> Transfers:
    """Open the transfer servers of this host; all hosts call this together."""
    transfers = open_servers(host)
    try:
        told = gather(host, "transfers", lambda: transfers.endpoint, host.timeout_s)
        transfers.connect([told[index] for index in range(host.count)])
    except BaseException:
        transfers.close()
        raise
    return transfers
