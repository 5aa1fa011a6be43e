"""State transfer: hosts receive the states of stages that they newly serve from owners."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np

from skippipe_jax.cluster.group import Group
from skippipe_jax.config import Config
from skippipe_jax.program.hops import Hop, HopNumbers
from skippipe_jax.runtime.spread import whole
from skippipe_jax.runtime.stage_functions import StageFunctions, functions_of_run
from skippipe_jax.runtime.state import MOMENTUM, Kept, Origin, StageState, State
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.runtime.transport import HostLink

# Interval at which a waiting host checks whether its group still exists.
CHECK_INTERVAL_S = 0.5


class StateTransfer(NamedTuple):
    """Transfer of a stage's state from one host to a node of another, array by array."""

    stage: int
    source: int
    hops: tuple[Hop, ...]


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
        stages = len(self.topology.plan.stages)
        cut = self._config.model.stage_partition(stages)
        return [
            shapes_of_state(functions, cut.blocks(stage).start, with_momentum=self.with_momentum)
            for stage, functions in enumerate(functions_of_run(self._config, stages))
        ]

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
            for place, target in enumerate(targets.values()):
                source = sources[place % len(sources)]
                own = self.topology.first_nodes[source]
                leaves = len(jax.tree.leaves(self.shapes[stage]))
                hops = tuple(Hop(number, own, target) for number in numbers.take(leaves))
                yield StateTransfer(stage, source, hops)

    @property
    def received_stages(self) -> frozenset[int]:
        """Stages whose state this host receives from others."""
        return frozenset(
            transfer.stage
            for transfer in self.transfers
            if self.topology.is_local_node(transfer.hops[0].target)
        )

    def give(self, states: Mapping[int, StageState], links: Mapping[int, HostLink]) -> None:
        """Offer to other hosts the arrays that they receive from here; `states` are by stage.

        The arrays must not be donated before the transfer.
        """
        for stage, source, hops in self.transfers:
            if source == self.topology.host:
                given = states[stage].to_give(with_momentum=self.with_momentum)
                leaves = jax.tree.leaves(given)
                for hop, leaf in zip(hops, leaves, strict=True):
                    links[self.topology.host_of[hop.target]].send(hop, 0, whole(leaf))

    def origin(self, links: Mapping[int, HostLink], group: Group) -> Origin:
        """Return the origin of the stages that this host receives from others.

        Raises:
            GenerationEnded: when the origin is called, if the group ends before all has arrived.
        """

        def take(stage: int, _: State) -> State:
            [own] = [
                transfer
                for transfer in self.transfers
                if transfer.stage == stage and self.topology.is_local_node(transfer.hops[0].target)
            ]
            leaves, structure = jax.tree.flatten(dict(self.shapes[stage]))
            arrays = [
                links[own.source].receive(hop, 0, leaf)
                for hop, leaf in zip(own.hops, leaves, strict=True)
            ]
            return jax.tree.unflatten(
                structure, list(map(np.asarray, wait_for_arrays(arrays, group)))
            )

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


def shapes_of_state(
    functions: StageFunctions, first_layer: int, *, with_momentum: bool = False
) -> State:
    """Return the shapes of a stage's saved state, or `with_momentum` of a transferred one."""
    parameters, optimizer_state, _ = jax.eval_shape(
        functions.create, jax.random.key(0), first_layer
    )
    saved = {"parameters": parameters, "optimizer_state": optimizer_state}
    return {**saved, MOMENTUM: parameters} if with_momentum else saved


def wait_for_arrays(arrays: Sequence[jax.Array], group: Group) -> Sequence[jax.Array]:
    """Wait for the arrays, and raise `GenerationEnded` if the group ends meanwhile."""
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def wait() -> None:
        try:
            jax.block_until_ready(arrays)
        except Exception as error:
            ended.put(error)
        else:
            ended.put(None)

    threading.Thread(target=wait, name="skippipe-transfer", daemon=True).start()
    while True:
        try:
            error = ended.get(timeout=CHECK_INTERVAL_S)
        except queue.Empty:
            group.require_current()
            continue
        if error is not None:
            raise error
        return arrays
