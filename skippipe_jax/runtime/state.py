"""The state of the stages and nodes served here, made in one place wherever it comes from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from tqdm import tqdm

from skippipe_jax.config import StageCut
from skippipe_jax.optim.outer import Message, Outer, Part, begin_with
from skippipe_jax.optim.rounding import Draw
from skippipe_jax.runtime.spread import Spread
from skippipe_jax.runtime.stage_functions import (
    Gauge,
    Gradients,
    Parameters,
    StageFunctions,
    where_state_waits,
)
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.storage.checkpoint import Checkpoint
from skippipe_jax.storage.loading import load_stage_numpy

MOMENTUM = "outer_momentum"
State = Mapping[str, PyTree]
"""What a checkpoint holds of a stage: "parameters" and "optimizer_state".

What one replica gives to another has the momentum of the outer optimizer, too, if there is one.
"""

Origin = Callable[[int, State], State]
"""(stage, the shapes of its state) -> its state, or its parameters alone before the first update

In this host's own memory, as NumPy arrays: replicas copy from there.
"""


@dataclass
class UnderWay:
    """A fragment that a replica has sent and not applied yet.

    Attributes:
        fragment: its number.
        sent: the parameters that were sent.
        message: what the replica has sent of its own.
        counts_with: the step that counts only once all hosts have all messages.
        messages: of all replicas, by their places in the stage, once they have come.
    """

    fragment: int
    sent: Part
    message: Message
    counts_with: int
    messages: Mapping[int, Message] | None = None


@dataclass
class StageState:
    """One replica of a stage. Nodes of a stage that share devices may share it.

    Attributes:
        draw: what updates are rounded by that are rounded by chance.
        outer: what a replica keeps that takes steps of its own beside others of its stage.
        under_way: the fragments that it has sent and not applied, by the steps after which it sent
            them.
        gathers: whether weights that are cut over a mesh come together once an iteration.
        gathered: what blocks are computed with in this iteration, if so.
    """

    functions: StageFunctions
    parameters: Parameters
    optimizer_state: PyTree
    gradients: Gradients
    draw: Draw
    outer: Outer | None = None
    under_way: dict[int, UnderWay] = field(default_factory=dict)
    gathers: bool = False
    gathered: PyTree | None = None

    @property
    def in_use(self) -> Parameters:
        """The parameters as operations compute with them."""
        if not self.gathers:
            return self.parameters
        if self.gathered is None:
            self.gathered = self.functions.gather(self.parameters["blocks"])
        return {**self.parameters, "blocks": self.gathered}

    @property
    def model(self) -> Parameters:
        """The parameters that count: the outer ones, where there are any."""
        return self.parameters if self.outer is None else self.outer.anchor

    def to_save(self) -> dict[str, PyTree]:
        """Return what a checkpoint holds of a stage."""
        return {"parameters": self.model, "optimizer_state": self.optimizer_state}

    def to_give(self, *, with_momentum: bool) -> dict[str, PyTree]:
        """Return what another replica goes on with; with the outer momentum, if there is one.

        Without outer parameters the momentum is what it begins with.
        """
        if not with_momentum:
            return self.to_save()
        if self.outer is None:
            momentum = jax.tree.map(jnp.zeros_like, self.parameters)
        else:
            momentum = self.outer.momentum
        return {**self.to_save(), MOMENTUM: momentum}

    def own_to_save(self) -> dict[str, PyTree]:
        """Return what a checkpoint holds of this replica beside what it holds of the stage."""
        assert self.outer is not None, "takes steps of its own"
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


OwnOrigin = Callable[[int, int, State], State]
"""(stage, place among its replicas, shapes of the stage's state) -> what `own_to_save` has saved

Fragments under way are by the step after which they were sent, and their number.
"""

Kept = Mapping[tuple[int, Spread], StageState]
"""States that a host has held before, by stage and where they lie."""


@dataclass
class NodeState:
    """What one node holds during an iteration, by microbatch."""

    gauge: Gauge
    saved: dict[int, PyTree] = field(default_factory=dict)
    targets: dict[int, jax.Array] = field(default_factory=dict)
    counts: dict[int, jax.Array] = field(default_factory=dict)


def from_checkpoint(checkpoint: Checkpoint, stage_layers: Sequence[int]) -> Origin:
    """Read the state that a checkpoint holds, under any cut of the model."""
    return lambda stage, shapes: load_stage_numpy(checkpoint, stage_layers, stage, shapes)


def make_states(
    topology: Topology,
    functions: Sequence[StageFunctions],
    cut: StageCut,
    seed: int,
    origin: Origin | None,
    kept: Kept | None = None,
    stages: Collection[int] | None = None,
    *,
    own_origin: OwnOrigin | None = None,
    step: int = 0,
    with_momentum: bool = False,
) -> dict[int, StageState]:
    """Make the state of every replica held here, by name; with `stages`, of these only.

    It is one of those that are `kept`, or a copy of one for another replica, or comes from
    `origin`, which is asked once for each stage, or is drawn from `seed`. What each replica has of
    its own comes from `own_origin`, as it was after `step`; or replicas that take steps of their
    own begin with the momentum of others (`with_momentum`).
    """
    states: dict[int, StageState] = {}
    replicas = [
        node
        for node in topology.own_replicas
        if stages is None or topology.stage_of[node] in stages
    ]
    of_stages = {stage: state for (stage, _), state in (kept or {}).items()}
    left = dict(kept or {})
    for node in replicas:
        # Where replicas are alone on nodes that share a device, one of them goes on with it.
        state = left.pop((topology.stage_of[node], topology.spread(node)), None)
        if state is not None:
            # What was added up of an iteration that did not count is let go of first, so that there
            # are never gradients beside gradients.
            state.gradients = {}
            with jax.default_device(topology.device(node)):
                gradients = state.functions.no_gradients(state.parameters)
            state.gradients = topology.spread(node).put(gradients)
            state.gathered = None
            states[node] = state
    served = sorted({topology.stage_of[node] for node in replicas if node not in states})
    shown = tqdm(served, desc="state", unit="stage", disable=None if origin else True, leave=False)
    for stage in shown:
        own = [node for node in replicas if topology.stage_of[node] == stage and node not in states]
        draw = np.array([seed, cut.blocks(stage).start], np.uint32)
        if stage in of_stages:
            given = of_stages[stage].to_give(with_momentum=with_momentum)
            read = jax.device_get(given)
            for node in own:
                states[node] = _placed(functions[stage], read, topology, node, draw)
            continue
        if origin is None:
            for node in own:
                states[node] = _drawn(functions[stage], topology, node, draw)
            continue
        shapes = jax.eval_shape(functions[stage].create, jax.random.key(0), 0)
        wanted = {"parameters": shapes[0], "optimizer_state": shapes[1]}
        read = origin(stage, wanted)
        for node in own:
            states[node] = _placed(functions[stage], read, topology, node, draw)
            if own_origin is not None and len(topology.replicas[stage]) > 1:
                place = topology.replicas[stage].index(node)
                of_replica = own_origin(stage, place, wanted)
                _go_on_alone(states[node], of_replica, topology, node, step)
    return {node: states[node] for node in replicas}


def _drawn(functions: StageFunctions, topology: Topology, node: int, draw: Draw) -> StageState:
    seed, first_layer = draw.tolist()
    here = topology.spread(node)
    functions = functions.on(here.mesh)
    with jax.default_device(topology.device(node)):
        parameters, state, gradients = functions.create(jax.random.key(seed), first_layer)
    waits = jax.device_put(state, where_state_waits(functions, state, here))
    return StageState(functions, here.put(parameters), waits, here.put(gradients), draw)


def _placed(
    functions: StageFunctions, read: State, topology: Topology, node: int, draw: Draw
) -> StageState:
    """Place a replica with its own copy of what was read, since updates write over it.

    What was not read is all that is allocated besides, so a device never holds more than what the
    replicas there go on with.
    """
    here = topology.spread(node)
    functions = functions.on(here.mesh)
    shardings = {name: here.of_tree(tree) for name, tree in read.items()}
    if "optimizer_state" in read:
        waits = where_state_waits(functions, read["optimizer_state"], here)
        shardings["optimizer_state"] = waits
    copy = jax.device_put(dict(read), shardings, may_alias=False)
    parameters = copy["parameters"]
    # Zeros depend on no parameter, so they would not follow them to their device.
    with jax.default_device(topology.device(node)):
        gradients = functions.no_gradients(parameters)
        begun = None if "optimizer_state" in copy else functions.begin(parameters)
    gradients = here.put(gradients)
    begun = jax.device_put(begun, where_state_waits(functions, begun, here))
    optimizer_state = copy["optimizer_state"] if begun is None else begun
    state = StageState(functions, parameters, optimizer_state, gradients, draw)
    if MOMENTUM in copy:
        state.outer = begin_with(parameters, copy[MOMENTUM])
    return state


def _go_on_alone(state: StageState, own: State, topology: Topology, node: int, step: int) -> None:
    """Have a replica that has the outer parameters go on as one of its stage has been saved."""
    copy = topology.spread(node).put(dict(own), may_alias=False)
    state.outer = Outer(state.parameters, copy[MOMENTUM], copy["residual"])
    state.parameters, state.optimizer_state = copy["parameters"], copy["optimizer_state"]
    state.under_way = {
        # Messages go round once more, while the next step is made.
        sent_after: UnderWay(fragment, of_step["sent"], of_step["message"], step + 1)
        for (sent_after, fragment), of_step in copy["under_way"].items()
    }


def make_nodes(topology: Topology) -> dict[int, NodeState]:
    """Make the nodes served here, with nothing in flight."""
    return {
        node: NodeState(gauge=jax.device_put(np.zeros(2, np.int32), topology.spread(node).whole))
        for node in topology.nodes
    }
