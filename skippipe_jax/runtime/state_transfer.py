"""State transfer: hosts receive the states of stages that they newly serve from owners."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from skippipe_jax.cluster.membership import Group
from skippipe_jax.config import Config
from skippipe_jax.connections.threads import DaemonThreads
from skippipe_jax.program.hops import Hop, HopNumbers
from skippipe_jax.runtime.spread import NodeSharding, whole
from skippipe_jax.runtime.stage_functions import functions_of_run
from skippipe_jax.runtime.state import Kept, Origin, StageState, State, shapes_of_state
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.runtime.transport import HostLink

# Interval at which a waiting host checks whether its group still exists.
CHECK_INTERVAL_S = 0.5


@dataclass(frozen=True)
class ArrayTransfer:
    """Transfer of arrays from the host `source` to a node of the host `target`, one by one."""

    source: int
    target: int
    hops: tuple[Hop, ...]

    def send(
        self, links: Mapping[int, HostLink], arrays: Iterable[jax.Array], iteration: int = 0
    ) -> None:
        """Offer the arrays; they must not be donated before the transfer."""
        for hop, array in zip(self.hops, arrays, strict=True):
            links[self.target].send(hop, iteration, whole(array))

    def receive(
        self,
        links: Mapping[int, HostLink],
        shapes: Iterable[jax.ShapeDtypeStruct],
        here: NodeSharding,
        group: Group,
    ) -> list[np.ndarray]:
        """Receive arrays of these shapes on the first device of a node.

        Raises:
            GenerationEnded: if the group ends before all has arrived.
        """
        arrays = []
        for hop, shape in zip(self.hops, shapes, strict=True):
            like = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=here.first)
            arrays.append(links[self.source].receive(hop, 0, like))
        return list(map(np.asarray, wait_for_arrays(arrays, group)))


@dataclass(frozen=True)
class StateTransfer(ArrayTransfer):
    """Transfer of the state of a stage."""

    stage: int


class StateTransfers:
    """Transfers of states between the hosts of a group; equal on all of its hosts."""

    def __init__(self, topology: Topology, config: Config, holders: Sequence[Collection[int]]):
        """Plan the transfers from the owners of each stage's state, which need not serve it.

        With empty `holders`, every host owns the stages that it serves.
        """
        self.topology = topology
        self.numbers = HopNumbers(topology.first_free_hop)
        self._config = config
        self.with_momentum = config.averaging.is_outer
        self.transfers = tuple(self._planned(holders))

    @cached_property
    def shapes(self) -> Sequence[State]:
        """Shapes of the arrays that are sent for each stage."""
        functions = functions_of_run(self._config, len(self.topology.plan.stages))
        return [shapes_of_state(own, with_momentum=self.with_momentum) for own in functions]

    def _planned(self, holders: Sequence[Collection[int]]) -> Iterator[StateTransfer]:
        """Plan a transfer of each stage to each host that serves and lacks it, from owners in turn.

        A stage without owners has no transfer: the hosts that serve it rebuild it.
        """
        host_of, numbers = self.topology.host_of, self.numbers
        for stage, owners in enumerate(holders):
            if not owners:
                continue
            replicas = self.topology.replicas[stage]
            targets = {host_of[node]: node for node in replicas if host_of[node] not in owners}
            # Prefer owners that continue to serve the stage: the others may be about to leave.
            serving = {host_of[node] for node in replicas}
            sources = sorted(owners, key=lambda host, serving=serving: host not in serving)
            for place, (target, node) in enumerate(targets.items()):
                source = sources[place % len(sources)]
                own = self.topology.first_nodes[source]
                leaves = len(jax.tree.leaves(self.shapes[stage]))
                hops = tuple(Hop(number, own, node) for number in numbers.take(leaves))
                yield StateTransfer(source, target, hops, stage)

    @property
    def received_stages(self) -> frozenset[int]:
        """Stages whose state this host receives from others."""
        return frozenset(
            transfer.stage for transfer in self.transfers if transfer.target == self.topology.host
        )

    def give(self, states: Mapping[int, StageState], links: Mapping[int, HostLink]) -> None:
        """Offer to other hosts the arrays that they receive from here; `states` are by stage.

        The arrays must not be donated before the transfer.
        """
        for transfer in self.transfers:
            if transfer.source == self.topology.host:
                given = states[transfer.stage].to_give(with_momentum=self.with_momentum)
                transfer.send(links, jax.tree.leaves(given))

    def origin(self, links: Mapping[int, HostLink], group: Group) -> Origin:
        """Return the origin of the stages that this host receives from others.

        Raises:
            GenerationEnded: when the origin is called, if the group ends before all has arrived.
        """

        def take(stage: int, _: State) -> State:
            host = self.topology.host
            [own] = [of for of in self.transfers if (of.stage, of.target) == (stage, host)]
            leaves, structure = jax.tree.flatten(dict(self.shapes[stage]))
            here = self.topology.spread(own.hops[0].target)
            return structure.unflatten(own.receive(links, leaves, here, group))

        return take


def transfer_states(
    transfers: StateTransfers,
    make: Callable[[Origin | None, Kept, Collection[int]], Mapping[int, StageState]],
    origin: Origin | None,
    kept: Kept,
    links: Mapping[int, HostLink],
    group: Group,
) -> Mapping[int, StageState]:
    """Run all transfers of states; return the states of the local replicas.

    `make` makes the states of some stages, from an origin and from states that are kept. A host
    offers its arrays before it receives any, as two hosts may send to each other.

    Raises:
        GenerationEnded: if the group ends before all has arrived.
    """
    topology, received_stages = transfers.topology, transfers.received_stages
    own = dict(make(origin, kept, set(topology.stage_of) - received_stages))
    of_stages = {stage: state for (stage, _), state in kept.items()}
    of_stages |= {topology.stage_of[node]: state for node, state in own.items()}
    transfers.give(of_stages, links)
    own |= make(transfers.origin(links, group), {}, received_stages)
    return {replica: own[replica] for replica in topology.local_replicas}


def wait_for_arrays(arrays: Sequence[jax.Array], group: Group) -> Sequence[jax.Array]:
    """Wait for the arrays, and raise `GenerationEnded` if the group ends meanwhile."""
    ready = DaemonThreads().submit(jax.block_until_ready, arrays)
    while not wait([ready], CHECK_INTERVAL_S).done:
        group.require_current()
    ready.result()
    return arrays
