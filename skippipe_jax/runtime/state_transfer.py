"""State transfers between hosts: who sends which arrays to whom, when hosts change or save.

- A host that newly serves a stage receives its state from an owner.
- A host that serves a lost stage receives that from which it rebuilds the stage.
- Diskless hosts (`diskless`) do not reach the folder of the run. If another host has a replica of a
  stage, it saves the stage. Otherwise the leader, which reaches the folder, receives the state
  after a step and keeps it until it is written. All hosts wait for that, so each checkpoint costs
  the bytes of the stage over the bandwidth between the two hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from skippipe_jax.cluster.agreement import barrier
from skippipe_jax.cluster.membership import Group
from skippipe_jax.config import Config
from skippipe_jax.connections.threads import DaemonThreads
from skippipe_jax.consensus.generations import RebuiltStage
from skippipe_jax.program.compiler import Hop
from skippipe_jax.runtime.node_sharding import NodeSharding, whole
from skippipe_jax.runtime.stage_functions import functions_of_run
from skippipe_jax.runtime.stage_rebuild import (
    RecoverySources,
    rebuilt,
    source_arrays,
    source_shapes,
)
from skippipe_jax.runtime.state import Kept, StageState, StateReader, StateTree, shapes_of_state
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.runtime.transport import HostLink

# Interval at which a waiting host checks whether its group still exists.
CHECK_INTERVAL_S = 0.5

Links = Mapping[int, HostLink]
Make = Callable[[StateReader | None, Kept, Collection[int]], Mapping[int, StageState]]


@dataclass(frozen=True, eq=False)
class StateTransfer:
    """Transfer of a stage's state, or of a source of it, from host to host, array by array.

    Attributes:
        stage: the stage.
        source: host that sends the arrays; there are no hops if it is the `target`.
        shapes: their shapes.
        made: how the stage is rebuilt; None if its state is sent.
        number: index of the source in `made.sources`.
    """

    stage: int
    source: int
    target: int
    hops: tuple[Hop, ...]
    shapes: PyTree
    made: RebuiltStage | None = None
    number: int = 0

    @classmethod
    def plan(
        cls,
        topology: Topology,
        use: str,
        stage: int,
        source: int,
        node: int,
        shapes: PyTree,
        made: RebuiltStage | None = None,
        number: int = 0,
    ) -> StateTransfer:
        """Plan a transfer from a host to the host of a node, for a `use`."""
        first, target = topology.first_nodes[source], topology.host_of[node]
        count = 0 if source == target else len(jax.tree.leaves(shapes))
        what = f"{use}: stage {stage} for node {node} from source {number}"
        hops = tuple(Hop(f"{what}: {array}", first, node) for array in range(count))
        return cls(stage, source, target, hops, shapes, made, number)

    def send(self, links: Links, arrays: PyTree, iteration: int) -> None:
        """Offer the arrays; they must not be donated before the transfer."""
        for hop, array in zip(self.hops, jax.tree.leaves(arrays), strict=True):
            links[self.target].send(hop, iteration, whole(array))

    def receive(
        self,
        links: Links,
        group: Group,
        iteration: int,
        here: NodeSharding | None = None,
        *,
        store: Callable[[jax.Array], Any] = np.asarray,
        one_by_one: bool = False,
    ) -> PyTree:
        """Receive the arrays on the first device of a node, and `store` each.

        With `one_by_one`, each is requested once the one before is stored.

        Raises:
            GenerationEnded: if the group ends before all has arrived.
        """
        leaves, structure = jax.tree.flatten(self.shapes)
        likes = (
            jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=here and here.first) for s in leaves
        )
        requests = zip(self.hops, likes, strict=True)
        arrays = (links[self.source].receive(hop, iteration, like) for hop, like in requests)
        requested = arrays if one_by_one else [*arrays]
        return structure.unflatten(store(_arrived(array, group)) for array in requested)


class StateTransfers:
    """Transfers of states at the start of a group; equal on all of its hosts."""

    def __init__(
        self,
        topology: Topology,
        config: Config,
        group: Group,
        kept: Kept,
        remains: RecoverySources,
    ):
        """Plan all transfers; `kept` and `remains` are what this host has of states and sources.

        Owners of a stage's state need not serve the stage. If the group knows no owners, every host
        owns the stages that it serves.
        """
        self.topology, self.group = topology, group
        self.kept, self.remains = kept, remains
        self._config, self._first = config, group.generation.step
        self._with_momentum = config.averaging.is_outer
        self.transfers = (*self._of_states(), *self._of_sources())

    @property
    def hops(self) -> Iterator[Hop]:
        """Hops of the arrays of all transfers."""
        return (hop for transfer in self.transfers for hop in transfer.hops)

    @cached_property
    def _shapes(self) -> Sequence[StateTree]:
        """Shapes of the arrays that are sent for each stage."""
        functions = functions_of_run(self._config, len(self.topology.plan.stages))
        return [shapes_of_state(own, with_momentum=self._with_momentum) for own in functions]

    def _of_states(self) -> Iterator[StateTransfer]:
        """Plan a transfer of each stage to each host that serves and lacks it, from owners in turn.

        A stage without owners has no transfer: the hosts that serve it rebuild it.
        """
        host_of = self.topology.host_of
        for stage, owners in enumerate(self.group.holders):
            if not owners:
                continue
            replicas = self.topology.replicas[stage]
            targets = {host_of[node]: node for node in replicas if host_of[node] not in owners}
            # Prefer owners that continue to serve the stage: the others may be about to leave.
            serving = {host_of[node] for node in replicas}
            sources = sorted(owners, key=lambda host, serving=serving: host not in serving)
            for place, node in enumerate(targets.values()):
                own = stage, sources[place % len(sources)], node, dict(self._shapes[stage])
                yield StateTransfer.plan(self.topology, "start", *own)

    def _of_sources(self) -> Iterator[StateTransfer]:
        """Plan a transfer of every source of each rebuilt stage to each host that serves it."""
        host_of, place = self.topology.host_of, self.group.hosts.index
        for made in self.group.generation.remade:
            targets = {host_of[node]: node for node in self.topology.plan.stages[made.stage]}
            shapes = source_shapes(made, self._shapes[made.stage])
            for node in targets.values():
                for number, source in enumerate(map(place, made.sources)):
                    own = made.stage, source, node, shapes, made, number
                    yield StateTransfer.plan(self.topology, "start", *own)

    def run(self, links: Links, make: Make, others: StateReader | None) -> Mapping[int, StageState]:
        """Run all transfers; return the states of the local replicas.

        `make` makes the states of some stages, from an origin and from states that are kept. Stages
        that are neither sent here nor rebuilt come from the origin `others`. A host sends its
        arrays before it receives any, as two hosts may send to each other. They must not be donated
        before the transfer.

        Raises:
            GenerationEnded: if the group ends before all has arrived.
        """
        topology, host = self.topology, self.topology.host
        sent = [transfer for transfer in self.transfers if transfer.source == host]
        received = {t.stage for t in self.transfers if t.target == host and t.made is None}
        for transfer in sent:
            if transfer.made is not None and transfer.hops:
                here = topology.sharding(transfer.hops[0].source).first
                transfer.send(links, jax.device_put(self._source(transfer), here), self._first)
        # An earlier group, ended during its start, may have rebuilt a stage from other sources.
        anew = {made.stage for made in self.group.generation.remade}
        kept = {of: state for of, state in self.kept.items() if of[0] not in anew}
        origin = self._origin(links, others)
        own = dict(make(origin, kept, set(topology.stage_of) - received))
        of_stages = {stage: state for (stage, _), state in kept.items()}
        of_stages |= {topology.stage_of[node]: state for node, state in own.items()}
        for transfer in sent:
            if transfer.made is None:
                given = of_stages[transfer.stage].to_give(with_momentum=self._with_momentum)
                transfer.send(links, given, self._first)
        own |= make(origin, {}, received)
        return {replica: own[replica] for replica in topology.local_replicas}

    def _origin(self, links: Links, others: StateReader | None) -> StateReader:
        """Return the origin of stages that are sent here or rebuilt, and of all `others`."""

        def read(stage: int, shapes: StateTree) -> StateTree:
            here = stage, self.topology.host
            own = [of for of in self.transfers if (of.stage, of.target) == here]
            if not own:
                assert others is not None, "a remaining host lacks the state of its stage"
                return others(stage, shapes)
            arrays: list[Any] = [
                self._source(transfer)
                if transfer.source == transfer.target
                else transfer.receive(
                    links,
                    self.group,
                    self._first,
                    self.topology.sharding(transfer.hops[0].target),
                )
                for transfer in own
            ]
            made = own[0].made
            return arrays[0] if made is None else rebuilt(made, shapes, arrays, self.remains)

        return read

    def _source(self, transfer: StateTransfer) -> list[np.ndarray]:
        """Return the arrays of this host from which a stage is rebuilt."""
        assert transfer.made is not None, "the stage is not rebuilt"
        return source_arrays(transfer.made, transfer.number, self.kept, self.remains)


class DisklessStages:
    """Stages that a group transfers to its leader for checkpoints; equal on all hosts.

    The leader stores each array beside its own states: in the memory of its machine, if JAX has a
    device for it, else on its device.

    Attributes:
        source_of: the host that sends each of them.
        hops: hops of their arrays.
    """

    def __init__(self, topology: Topology, config: Config, group: Group):
        """Find the stages that only diskless hosts hold."""
        self._topology, self._group = topology, group
        leader = topology.first_nodes[0]
        functions = functions_of_run(config, len(topology.plan.stages))
        self._transfers: list[StateTransfer] = []
        for stage, replicas in enumerate(topology.replicas):
            hosts = [topology.host_of[replica] for replica in replicas]
            if hosts and {*hosts} <= {*group.diskless}:
                own = stage, hosts[0], leader, dict(shapes_of_state(functions[stage]))
                self._transfers.append(StateTransfer.plan(topology, "checkpoint", *own))
        self.source_of = {own.stage: own.source for own in self._transfers}
        self.hops = [hop for own in self._transfers for hop in own.hops]

    def after(
        self, step: int, states: Mapping[int, StageState], links: Links
    ) -> dict[int, dict[str, PyTree]]:
        """Return the states of these stages after a step, on the leader; all hosts call this.

        `states` are those of the local replicas. Hosts other than the leader return no states.

        Raises:
            GenerationEnded: if the group ends before all has arrived.
        """
        if not self._transfers:
            return {}
        received = {}
        for own in self._transfers:
            if own.source == self._topology.host:
                state = states[self._topology.replicas[own.stage][0]].to_save()
                own.send(links, state, step)
            elif own.target == self._topology.host:
                received[own.stage] = own.receive(
                    links, self._group, step, store=beside, one_by_one=True
                )
        # No host may update a state that the leader still receives.
        barrier(self._group, f"given/{step}", self._group.timeout_s)
        return received


def beside(array: jax.Array | np.ndarray) -> jax.Array:
    """Copy an array to the memory of the machine, or to the default device."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and "cpu" not in platforms.split(","):
        return jax.device_put(array)
    return jax.device_put(np.asarray(array), jax.local_devices(backend="cpu")[0])


def _arrived(array: jax.Array, group: Group) -> jax.Array:
    """Wait for an array, and raise `GenerationEnded` if the group ends meanwhile."""
    ready = DaemonThreads().submit(jax.block_until_ready, array)
    while not wait([ready], CHECK_INTERVAL_S).done:
        group.require_current()
    ready.result()
    return array
