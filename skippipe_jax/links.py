"""How an activation or a gradient gets from one node to another.

One interface with two implementations: nodes of one process pass arrays by `jax.device_put`,
nodes of different processes by JAX's transfer server. Neither blocks: what `receive` returns may
still be on its way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from skippipe_jax.program import Compute, Hop, Program


class Link(ABC):
    """A way between nodes. Each hop of an iteration is sent once and received once."""

    @abstractmethod
    def send(self, hop: Hop, iteration: int, array: jax.Array) -> None:
        """Hand over what the hop carries; the caller must not donate it afterwards."""

    @abstractmethod
    def receive(self, hop: Hop, iteration: int) -> jax.Array:
        """What the hop carries, on the device of its target node."""


class WithinProcess(Link):
    """Between devices of this process."""

    def __init__(self, device_of: Mapping[int, jax.Device]):
        """`device_of[n]` is the device of node n, for this process's nodes."""
        self.device_of = device_of
        self.underway: dict[Hop, jax.Array] = {}

    def send(self, hop: Hop, iteration: int, array: jax.Array) -> None:
        """Copy to the device of the target node, if that is another one."""
        self.underway[hop] = jax.device_put(array, self.device_of[hop.target])

    def receive(self, hop: Hop, iteration: int) -> jax.Array:
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
        arrays: Mapping[int, jax.ShapeDtypeStruct],
    ):
        """`address` is the other process's server; `arrays[n]` what arrives at node n of ours."""
        self.server = server
        self.connection = server.connect(address)
        self.arrays = arrays

    def send(self, hop: Hop, iteration: int, array: jax.Array) -> None:
        """Offer the array under the hop's name until the other process has pulled it."""
        self.server.await_pull(self._name(hop, iteration), [array])

    def receive(self, hop: Hop, iteration: int) -> jax.Array:
        """Ask the other process for the array, which it may offer later."""
        [array] = self.connection.pull(self._name(hop, iteration), [self.arrays[hop.target]])
        return array

    def _name(self, hop: Hop, iteration: int) -> int:
        return (iteration << self.HOP_BITS) + hop.number


def open_links(
    program: Program,
    host_of: Sequence[int],
    device_of: Mapping[int, jax.Device],
    activation: jax.ShapeDtypeStruct,
    bind_address: str,
    exchange: Callable[[str], Sequence[str]],
) -> dict[int, Link]:
    """A link to every host that this program exchanges hops with, this one included.

    `device_of` maps this host's nodes, `activation` is what every hop carries, `bind_address` the
    IP address on which this host's transfer server listens. `exchange` tells all hosts a text (the
    server's address) and returns everyone's, by host.
    """
    links: dict[int, Link] = {program.host: WithinProcess(device_of)}
    if max(host_of) == 0:
        return links
    backend = device_of[program.nodes[0]].client
    server = transfer.start_transfer_server(backend, f"{bind_address}:0", [f"{bind_address}:0"])
    addresses = exchange(server.address())
    arrays = {
        node: jax.ShapeDtypeStruct(
            activation.shape, activation.dtype, sharding=SingleDeviceSharding(device)
        )
        for node, device in device_of.items()
    }
    for peer in sorted(peers(program, host_of)):
        links[peer] = BetweenProcesses(server, addresses[peer], arrays)
    return links


def peers(program: Program, host_of: Sequence[int]) -> set[int]:
    """The other hosts that a program exchanges hops with."""
    hops = [
        hop
        for instruction in program.instructions
        if isinstance(instruction, Compute)
        for hop in (instruction.arrives, instruction.leaves)
        if hop is not None
    ]
    return {host_of[node] for hop in hops for node in (hop.source, hop.target)} - {program.host}
