"""State of the local stages and nodes, and its creation from all origins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from tqdm import tqdm

from skippipe_jax.config import Config
from skippipe_jax.optim.outer import EncodedPart, Outer, StageFragment, begin_with
from skippipe_jax.optim.rounding import RoundingSeed
from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.runtime.stage_functions import (
    Gauge,
    Gradients,
    Parameters,
    StageFunctions,
    functions_of_run,
)
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.storage.checkpoint import Checkpoint
from skippipe_jax.storage.loading import load_stage_numpy

MOMENTUM = "outer_momentum"
StateTree = Mapping[str, PyTree]
"""State of a stage in a checkpoint: "parameters" and "optimizer_state".

In a transfer between replicas, it also has the momentum of the outer optimizer, if there is one.
"""

StateReader = Callable[[int, StateTree], StateTree]
"""(stage, shapes of its state) -> its state, or only its parameters before the first update

The result is in NumPy arrays, from which each replica copies.
"""


@dataclass
class FragmentInTransit:
    """Fragment that a replica has sent and not applied yet.

    Attributes:
        fragment: number of the fragment.
        sent: parameters of the fragment when it was sent.
        message: message that the replica has sent.
        committed_with: step that is committed only once all hosts have all messages.
        messages: messages of all replicas by their index in the stage; None until all have arrived.
    """

    fragment: int
    sent: StageFragment
    message: EncodedPart
    committed_with: int
    messages: Mapping[int, EncodedPart] | None = None


@dataclass
class StageState:
    """State of one replica of a stage. Nodes of a stage that share devices may share it.

    Attributes:
        draw: seed of the stochastic rounding of updates.
        outer: state of outer averaging; None if the replica averages gradients or has no other.
        under_way: fragments that it has sent and not applied, by the step after which it sent them.
        gathers: whether weights that are sharded over a mesh are gathered once an iteration.
        gathered: the gathered weights of blocks for this iteration, if so.
    """

    functions: StageFunctions
    parameters: Parameters
    optimizer_state: PyTree
    gradients: Gradients
    draw: RoundingSeed
    outer: Outer | None = None
    under_way: dict[int, FragmentInTransit] = field(default_factory=dict)
    gathers: bool = False
    gathered: PyTree | None = None

    @property
    def in_use(self) -> Parameters:
        """Parameters for computation: the blocks' are gathered, if `gathers`."""
        if not self.gathers:
            return self.parameters
        if self.gathered is None:
            self.gathered = self.functions.gather(self.parameters["blocks"])
        return {**self.parameters, "blocks": self.gathered}

    @property
    def model(self) -> Parameters:
        """Parameters of the trained model: the outer ones, if there are any."""
        return self.parameters if self.outer is None else self.outer.anchor

    def to_save(self) -> dict[str, PyTree]:
        """Return the state of the stage for a checkpoint."""
        return {"parameters": self.model, "optimizer_state": self.optimizer_state}

    def to_give(self, *, with_momentum: bool) -> dict[str, PyTree]:
        """Return the state for a transfer to another replica, optionally with outer momentum.

        The momentum is zero if there are no outer parameters yet.
        """
        if not with_momentum:
            return self.to_save()
        if self.outer is None:
            momentum = jax.tree.map(jnp.zeros_like, self.parameters)
        else:
            momentum = self.outer.momentum
        return {**self.to_save(), MOMENTUM: momentum}

    def own_to_save(self) -> dict[str, PyTree]:
        """Return the local state of this replica for a checkpoint, beside that of the stage."""
        assert self.outer is not None, "the replica takes no local steps"
        return {
            "parameters": self.parameters,
            "optimizer_state": self.optimizer_state,
            MOMENTUM: self.outer.momentum,
            "residual": self.outer.residual,
            "under_way": {
                f"{step}": {"sent": own.sent, "message": own.message}
                for step, own in self.under_way.items()
            },
        }


OwnOrigin = Callable[[int, int, StateTree], StateTree]
"""(stage, index of the replica, shapes of the stage's state) -> saved result of `own_to_save`

Its keys in "under_way" are pairs: the step after which a fragment was sent, and its number.
"""

Kept = Mapping[tuple[int, NodeSharding], StageState]
"""States of a host from an earlier generation, by stage and devices."""


@dataclass
class NodeState:
    """State of one node, kept over iterations; the entries are by microbatch."""

    gauge: Gauge
    saved: dict[int, PyTree] = field(default_factory=dict)
    targets: dict[int, jax.Array] = field(default_factory=dict)
    counts: dict[int, jax.Array] = field(default_factory=dict)


def from_checkpoint(checkpoint: Checkpoint, stage_layers: Sequence[int]) -> StateReader:
    """Return the origin of states in a checkpoint, which may have another stage partition."""
    return lambda stage, shapes: load_stage_numpy(checkpoint, stage_layers, stage, shapes)


def shapes_of_state(functions: StageFunctions, *, with_momentum: bool = False) -> StateTree:
    """Return the shapes of a stage's saved state, or `with_momentum` of a transferred one."""
    parameters, optimizer_state, _ = jax.eval_shape(functions.create, jax.random.key(0), 0)
    saved = {"parameters": parameters, "optimizer_state": optimizer_state}
    return {**saved, MOMENTUM: parameters} if with_momentum else saved


def make_states(
    config: Config,
    topology: Topology,
    origin: StateReader | None = None,
    kept: Kept | None = None,
    stages: Collection[int] | None = None,
    own_origin: OwnOrigin | None = None,
    step: int = 0,
) -> dict[int, StageState]:
    """Make the state of every local replica, by its name; with `stages`, of these only.

    The state is taken from `kept`, or copied from a `kept` state of another replica, or read from
    `origin`, which is called once for each stage, or initialized from the seed. In `outer` mode the
    local state of each replica, as after `step`, is read from `own_origin`, and a copy of another
    replica includes the outer momentum.
    """
    count = len(topology.plan.stages)
    functions, cut = functions_of_run(config, count), config.model.stage_partition(count)
    states: dict[int, StageState] = {}
    replicas = [
        node
        for node in topology.local_replicas
        if stages is None or topology.stage_of[node] in stages
    ]
    of_stages = {stage: state for (stage, _), state in (kept or {}).items()}
    remaining = dict(kept or {})
    for node in replicas:
        # If several replicas of a stage lie on one device, only one of them takes the kept state.
        state = remaining.pop((topology.stage_of[node], topology.sharding(node)), None)
        if state is not None:
            # Release the gradients of an iteration that was not committed first, so that two sets
            # of gradients are never in memory.
            state.gradients = {}
            with jax.default_device(topology.device(node)):
                gradients = state.functions.no_gradients(state.parameters)
            state.gradients = topology.sharding(node).put(gradients)
            state.gathered = None
            states[node] = state
    served = sorted({topology.stage_of[node] for node in replicas if node not in states})
    shown = tqdm(served, desc="state", unit="stage", disable=None if origin else True, leave=False)
    for stage in shown:
        own = [node for node in replicas if topology.stage_of[node] == stage and node not in states]
        draw = np.array([config.seed, cut.blocks(stage).start], np.uint32)
        read: StateTree = {}
        if stage in of_stages:
            given = of_stages[stage].to_give(with_momentum=config.averaging.is_outer)
            read = jax.device_get(given)
        elif origin is not None:
            read = origin(stage, shapes_of_state(functions[stage]))
        for node in own:
            states[node] = _made(functions[stage], read, topology, node, draw)
            if not read:
                # Drawn once: the program that draws takes long to compile for another device.
                read = {"parameters": states[node].parameters}
            if own_origin is None or stage in of_stages or len(topology.replicas[stage]) == 1:
                continue
            place = topology.replicas[stage].index(node)
            of_replica = own_origin(stage, place, shapes_of_state(functions[stage]))
            _restore_local_state(states[node], of_replica, topology, node, step)
    return {node: states[node] for node in replicas}


def _made(
    functions: StageFunctions, read: StateTree, topology: Topology, node: int, draw: RoundingSeed
) -> StageState:
    """Make a replica with a separate copy of the read state, as updates donate it.

    What was not read is initialized. Nothing else is allocated, so a device never holds more than
    the states of its replicas.
    """
    here = topology.sharding(node)
    functions = functions.on(here.mesh)
    others = {name: tree for name, tree in read.items() if name != "optimizer_state"}
    copy, optimizer_state = here.put(others, may_alias=False), read.get("optimizer_state")
    is_read = optimizer_state is not None
    # Zeros do not depend on the parameters, so JAX would not place them on their device.
    with jax.default_device(topology.device(node)):
        if "parameters" not in copy:
            seed, first_layer = draw.tolist()
            copy["parameters"] = here.put(functions.initialize(jax.random.key(seed), first_layer))
        parameters = copy["parameters"]
        gradients = here.put(functions.no_gradients(parameters))
        if not is_read:
            optimizer_state = functions.begin(parameters)
    waits = here.of_tree(optimizer_state, functions.state_memory)
    optimizer_state = jax.device_put(optimizer_state, waits, may_alias=False if is_read else None)
    state = StageState(functions, parameters, optimizer_state, gradients, draw)
    if MOMENTUM in copy:
        state.outer = begin_with(parameters, copy[MOMENTUM])
    return state


def _restore_local_state(
    state: StageState, own: StateTree, topology: Topology, node: int, step: int
) -> None:
    """Restore the saved local state of a replica that has the outer parameters."""
    copy = topology.sharding(node).put(dict(own), may_alias=False)
    state.outer = Outer(state.parameters, copy[MOMENTUM], copy["residual"])
    state.parameters, state.optimizer_state = copy["parameters"], copy["optimizer_state"]
    state.under_way = {
        # Messages are sent again, during the next step.
        sent_after: FragmentInTransit(fragment, of_step["sent"], of_step["message"], step + 1)
        for (sent_after, fragment), of_step in copy["under_way"].items()
    }
