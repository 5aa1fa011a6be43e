"""Replicas of this host: the sums of their gradients, and their updates."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.runtime.reduction import sum_of_trees, sum_over_nodes
from skippipe_jax.runtime.stage_functions import Totals, sum_of_squares
from skippipe_jax.runtime.state import StageState
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.runtime.totals import add_up, sum_by_collective


@dataclass(frozen=True, eq=False)
class Replicas:
    """Replicas that this host holds, by their names.

    Attributes:
        states: state of each replica.
        notes_norms: whether the norms of stages are recorded.
    """

    topology: Topology
    states: Mapping[int, StageState]
    notes_norms: bool = False

    def stage_of(self, replica: int) -> int:
        """Return the stage of a replica."""
        return self.topology.stage_of[replica]

    @property
    def stages(self) -> list[int]:
        """Stages with a local replica, in order."""
        return sorted({self.stage_of(replica) for replica in self.states})

    def owned_stages(self, diskless: Collection[int] = ()) -> dict[int, dict[str, PyTree]]:
        """Return the states that this host saves: of stages whose first replica it holds.

        Replicas on diskless hosts (`diskless`) are ignored.
        """
        host_of = self.topology.host_of
        counted = [
            [replica for replica in replicas if host_of[replica] not in diskless]
            for replicas in self.topology.replicas
        ]
        return {
            stage: self.states[replicas[0]].to_save()
            for stage, replicas in enumerate(counted)
            if replicas and replicas[0] in self.states
        }

    def sum_by_collective(self, stage: int) -> None:
        """Sum the gradients of the replicas of a stage; all hosts with a replica call this."""
        if len(self.topology.replicas[stage]) == 1:
            return
        own = [replica for replica in self.topology.replicas[stage] if replica in self.states]
        given: dict[NodeSharding, list[PyTree]] = {}
        for replica in own:
            given.setdefault(self.topology.sharding(replica), []).append(self.to_sum(replica))
        local = {
            here: trees[0] if len(trees) == 1 else sum_of_trees(trees)
            for here, trees in given.items()
        }
        shardings = dict.fromkeys(map(self.topology.sharding, self.topology.replicas[stage]))
        summed = sum_over_nodes(tuple(shardings), local)
        taken: set[NodeSharding] = set()
        for replica in own:
            here = self.topology.sharding(replica)
            # Each replica needs its own array, as its update donates it.
            own_sum = _copied(summed[here]) if here in taken else summed[here]
            self.states[replica].gradients = own_sum
            taken.add(here)

    def to_sum(self, replica: int) -> PyTree:
        """Remove and return the gradients of a replica, which has none until they are summed."""
        state = self.states[replica]
        gradients, state.gradients = state.gradients, {}
        return gradients

    def squared_norms(self, stage: int) -> list[Totals]:
        """Return totals with the squared norm of a stage's gradients, if this host adds it.

        That is the host with the first replica of the stage.
        """
        counted = self.topology.replicas[stage][:1]
        own = [self.states[replica] for replica in counted if replica in self.states]
        return [state.functions.squared_norm(state.gradients) for state in own]

    def squared_norms_of_blocks(self) -> dict[int, Float[Array, ""]]:
        """Return squared norms of the summed gradients of blocks, by stage.

        Only stages whose first replica is local are included, and none if norms are not recorded.
        Embedding and head, which only the data stage has, are excluded.
        """
        return {
            stage: _squared_norm(self.states[replicas[0]].gradients["blocks"])
            for stage, replicas in enumerate(self.topology.replicas)
            if self.notes_norms and replicas and replicas[0] in self.states
        }

    def update(self, totals: Totals) -> None:
        """Update all local replicas, by the totals of all hosts."""
        for replica, state in self.states.items():
            state.gathered = None
            state.parameters, state.optimizer_state, state.gradients = state.functions.update(
                state.parameters,
                state.optimizer_state,
                state.gradients,
                jax.device_put(totals, self.topology.sharding(replica).whole),
                state.draw,
            )


def open_collectives(replicas: Replicas) -> None:
    """Sum the gradients, which are zeros, over every group of devices that training sums over.

    All processes must join the first sum of a group within 30 seconds (a limit of Gloo that JAX
    does not let one change), and compiling the stages can take longer. Call this on all hosts at
    about the same time.
    """
    topology = replicas.topology
    for stage in replicas.stages:
        if stage not in topology.rings:
            replicas.sum_by_collective(stage)
            jax.block_until_ready([state.gradients for state in replicas.states.values()])
    if topology.in_one_jax:
        local = add_up(topology, [], False, {})
        jax.block_until_ready(sum_by_collective(topology, local))


_squared_norm = jax.jit(sum_of_squares)


@jax.jit
def _copied(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)
