"""Asynchronous transfer of arrays between hosts by JAX's transfer servers.

`HostLink.receive` returns before its array has arrived. Between the nodes of one host, arrays are
copied by `jax.device_put` instead.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import itertools
import mmap
import resource
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import PyTree
from skippipe_sched.errors import TemporaryError
from skippipe_sched.figures.amounts import size_text

from skippipe_jax import log
from skippipe_jax.cluster.agreement import gather
from skippipe_jax.cluster.membership import Group
from skippipe_jax.connections.addresses import join_address, parse_address, require_free, sever
from skippipe_jax.program.compiler import Hop
from skippipe_jax.runtime.node_sharding import devices_of, shards_of

# Bytes that a server copies at a time, and copies that it makes at once. With more of either it
# holds several times the bytes that it sends, and is not faster. With 128 KB, an iteration of two
# processes that share two cores takes half as long again.
SERVER_COPY_BYTES = 1 << 20
PARALLEL_COPIES = 2

# Longest wait for the end of a server.
CLOSING_S = 5.0


class HostLink:
    """Link to and from one other host, which pulls the arrays that this host offers.

    Each hop of an iteration is sent once and received once.
    """

    def __init__(
        self,
        server: transfer.TransferServer,
        key: bytes,
        remote_key: bytes,
        address: str,
        siblings: Mapping[int, HostLink],
        first: int,
        max_lag: int,
    ):
        """Use the local `server` and the remote one at `address`, both for this link alone.

        The keys of the two servers determine the names of their transfers. `siblings` are all links
        of this host, which send from iteration `first` on. The other host may be up to `max_lag`
        iterations away.
        """
        self.server: transfer.TransferServer | None = server
        self.key, self.remote_key = key, remote_key
        self.address = address
        # Opened at its first use: in elastic runs, most pairs of hosts exchange no arrays.
        self.connection: transfer.TransferConnection | None = None
        # The last iteration in which each hop was sent, by its name.
        self._sent: dict[str, int] = {}
        self._siblings, self._first, self._max_lag = siblings, first, max_lag
        self._expected: set[str] = set()

    def expect(self, hop: Hop) -> None:
        """Note that the other host may request a hop in any iteration, even if it is not sent."""
        self._expected.add(hop.name)

    def send(self, hop: Hop, iteration: int, arrays: PyTree) -> None:
        """Offer the arrays of a hop until they are pulled; they must not be donated before that.

        An array that is sharded over a mesh is sent by shards, to an equal mesh.
        """
        parts = [part for array in jax.tree.leaves(arrays) for part in shards_of(array)]
        self._open_server.await_pull(_name(self.key, hop.name, iteration), parts)
        self._sent[hop.name] = iteration

    def receive(self, hop: Hop, iteration: int, like: PyTree) -> PyTree:
        """Request the arrays of a hop, of shapes and dtypes `like`, which may be offered later.

        They have the shardings of `like`, by default on the first device of this host.
        """
        if self.connection is None:
            self.connection = self._open_server.connect(self.address)
        default = SingleDeviceSharding(jax.local_devices()[0])
        leaves, structure = jax.tree.flatten(like)
        shardings = [leaf.sharding or default for leaf in leaves]
        wanted = [
            jax.ShapeDtypeStruct(
                sharding.shard_shape(leaf.shape), leaf.dtype, sharding=SingleDeviceSharding(device)
            )
            for leaf, sharding in zip(leaves, shardings, strict=True)
            for device in devices_of(sharding)
        ]
        parts = iter(self.connection.pull(_name(self.remote_key, hop.name, iteration), wanted))
        return structure.unflatten(
            _joined(leaf.shape, sharding, [*itertools.islice(parts, len(devices_of(sharding)))])
            for leaf, sharding in zip(leaves, shardings, strict=True)
        )

    def close(self) -> None:
        """Release all offered and requested arrays; pending waits of this host fail.

        Threads end and descriptors are closed, whether the other host lives, hangs or has failed.
        """
        if self.server is None:
            return
        # An unanswered pull ends only with its connection.
        own, other = (parse_address("address", at) for at in (self.server.address(), self.address))
        sever([own, other])
        # Such a pull keeps the server alive that has received it, with all offered arrays, until
        # an array is offered under its name.
        nothing = jax.device_put(np.zeros(1, np.uint8))
        for hop, iteration in self._pending():
            self.server.await_pull(_name(self.key, hop, iteration), [nothing])
        self.server = self.connection = None

    def _pending(self) -> set[tuple[str, int]]:
        """Return hop and iteration of all transfers that may be offered or requested now."""
        # The other host may be ahead, and background messages are of earlier iterations.
        back = 0 if self._max_lag == 1 else self._max_lag
        further, sent = range(-back, self._max_lag + 1), [*self._sent.items()]
        pending = {(hop, last + more) for hop, last in sent for more in further}
        links = self._siblings.values()
        now = max([self._first, *(of for link in links for of in [*link._sent.values()])])
        pending |= {(hop, now + more) for hop in self._expected for more in further}
        return {(hop, iteration) for hop, iteration in pending if iteration >= 0}

    @property
    def _open_server(self) -> transfer.TransferServer:
        assert self.server is not None, "the link is closed"
        return self.server


def _joined(shape: Sequence[int], sharding: Sharding, parts: list[jax.Array]) -> jax.Array:
    """Make an array of its shards; a single one is the array."""
    if len(parts) == 1:
        return parts[0]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, parts)


def expect_hops(links: Mapping[int, HostLink], host_of: Sequence[int], hops: Iterable[Hop]) -> None:
    """Note for all `links` which of these hops other hosts may request, as `HostLink.expect` does.

    `host_of` has the host of each node. Hops that this host does not send are ignored.
    """
    for hop in hops:
        if host_of[hop.source] not in links and host_of[hop.target] in links:
            links[host_of[hop.target]].expect(hop)


def _wait_until_free(host: str, port: int) -> None:
    """Wait until a released server, which another thread stops, no longer listens.

    If that thread had not yet begun to watch the server, it stops it only at the next connection.
    """
    until_s = time.monotonic() + CLOSING_S
    while time.monotonic() < until_s:
        try:
            return require_free("cluster.transfer_port", host, port)
        except TemporaryError:
            with suppress(OSError):
                socket.create_connection((host, port), timeout=CLOSING_S).close()
            time.sleep(0.01)


def _name(key: bytes, hop: str, iteration: int) -> int:
    """Return the 64-bit name of a transfer, which cannot be guessed without the key."""
    what = struct.pack(">Q", iteration) + hop.encode()
    return int.from_bytes(hashlib.blake2b(what, digest_size=8, key=key).digest())


class Transfers:
    """JAX's transfer servers of this process, one for each other host, and the remote addresses.

    A server sends, and receives, one array after another for all its peers: a single server would
    delay fast links by slow ones. With one peer, it sends in the order of the offers.
    """

    def __init__(
        self,
        host: int,
        backend: Any,
        requests: Mapping[int, str],
        arrays: str,
        copy_bytes: int = SERVER_COPY_BYTES,
    ):
        """Open the servers for JAX's `backend` client, which has this host's devices.

        The server for host h receives requests at `requests[h]`, "IP:PORT", where port 0 means any,
        and arrays on any port of the IP address `arrays`. It copies `copy_bytes` at a time, as the
        servers of all hosts must.
        """
        self._host = host
        # A new key for each generation, so that requests of an earlier one match no transfer.
        self.key = secrets.token_bytes(16)
        self._opened: list[HostLink] = []
        self.servers = {
            other: transfer.start_transfer_server(
                backend,
                address,
                # Any port: with a fixed one JAX ends the process, as it both listens on it and
                # opens connections from it.
                [join_address(arrays, 0)],
                max_num_parallel_copies=PARALLEL_COPIES,
                transfer_size=copy_bytes,
            )
            for other, address in requests.items()
        }
        self.addresses: dict[int, str] = {}
        self.keys: dict[int, bytes] = {}

    @property
    def endpoint(self) -> dict[str, Any]:
        """Addresses of these servers by host, and the key of their transfers, as JSON values."""
        reached = {str(other): server.address() for other, server in self.servers.items()}
        return {"key": self.key.hex(), "reached": reached}

    def connect(self, endpoints: Sequence[Mapping[str, Any]]) -> None:
        """Store the `endpoint` of every host; call this before `links`."""
        others = {other: endpoints[other] for other in self.servers}
        here = str(self._host)
        self.addresses = {other: there["reached"][here] for other, there in others.items()}
        self.keys = {other: bytes.fromhex(there["key"]) for other, there in others.items()}

    def links(self, first: int = 0, max_lag: int = 1) -> dict[int, HostLink]:
        """Make a link to every other host, for iterations from `first` on.

        Hosts are at most `max_lag` iterations from each other.
        """
        links: dict[int, HostLink] = {}
        for other, server in self.servers.items():
            keys = self.key, self.keys[other]
            links[other] = HostLink(server, *keys, self.addresses[other], links, first, max_lag)
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


def locked_bytes(copy_bytes: int) -> int:
    """Return the most bytes that Linux locks in memory while a server sends them.

    They are those of twice `PARALLEL_COPIES`, each with two more pages.
    """
    return 2 * PARALLEL_COPIES * (copy_bytes + 2 * mmap.PAGESIZE)


@functools.cache
def fitting_copy_bytes(servers: int, processes: int) -> int:
    """Return the bytes that a server copies at a time, within the limit of locked memory.

    Transfers fail beyond that limit, which is for all processes of a user, and is raised first.
    `processes` of them are hosts with so many `servers` each. All hosts must copy as much: if they
    are on several machines, whose limits may differ, this only warns.
    """
    for limit in (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
            break
    limit, sizes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], [SERVER_COPY_BYTES]
    if processes > 1:
        sizes += [SERVER_COPY_BYTES >> halvings for halvings in range(1, 7)]
    for size in sizes:
        if limit == resource.RLIM_INFINITY or servers * processes * locked_bytes(size) <= limit:
            return size
    needed = servers * processes * locked_bytes(sizes[-1])
    log.warning(
        f"a user's processes may lock {size_text(limit)} of memory here, and transfers between "
        f"hosts up to {size_text(needed)}; beyond the limit they fail. Raise it, as by "
        "`ulimit -l unlimited`, or for Docker by `--ulimit memlock=-1`"
    )
    return sizes[-1]


def open_servers(host: Group) -> Transfers:
    """Open the transfer servers of this host, not yet connected to those of other hosts."""
    # Hosts at a loopback address are all on this machine.
    here = host.count if ipaddress.ip_address(host.address).is_loopback else 1
    size = fitting_copy_bytes(host.count - 1, here)
    backend = jax.local_devices()[0].client
    return Transfers(host.index, backend, host.transfer_addresses(), host.address, size)


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
