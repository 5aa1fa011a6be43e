"""The state of the stages and nodes served here, made in one place wherever it comes from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import PyTree
from tqdm import tqdm

from skippipe_jax.config import StageCut
from skippipe_jax.runtime.stage_functions import Gauge, Gradients, Parameters, StageFunctions
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.storage.layout import Checkpoint
from skippipe_jax.storage.reader import read_arrays

State = Mapping[str, PyTree]
"""What a checkpoint holds of a stage: "parameters" and "optimizer_state"."""

Origin = Callable[[int, State], State]
"""(stage, the shapes of its state) -> its state, or its parameters alone before the first update

In this host's own memory, as NumPy arrays: replicas copy from there.
"""


@dataclass
class StageState:
    """One replica of a stage. Nodes of a stage that share devices may share it."""

    functions: StageFunctions
    parameters: Parameters
    optimizer_state: PyTree
    gradients: Gradients

    def to_save(self) -> dict[str, PyTree]:
        """What a checkpoint holds of a stage."""
        return {"parameters": self.parameters, "optimizer_state": self.optimizer_state}

    def take(self, state: State) -> None:
        """Go on with this."""
        self.parameters, self.optimizer_state = state["parameters"], state["optimizer_state"]


Kept = Mapping[tuple[int, jax.Device], StageState]
"""States that a host has held before, by stage and device."""


@dataclass
class NodeState:
    """What one node holds during an iteration, by microbatch."""

    gauge: Gauge
    saved: dict[int, PyTree] = field(default_factory=dict)
    targets: dict[int, jax.Array] = field(default_factory=dict)


def from_checkpoint(checkpoint: Checkpoint, stage_layers: Sequence[int]) -> Origin:
    """The state that a checkpoint holds, under any cut of the model."""
    return lambda stage, shapes: read_arrays(checkpoint, stage_layers, stage, shapes)


def make_states(
    topology: Topology,
    functions: Sequence[StageFunctions],
    cut: StageCut,
    seed: int,
    origin: Origin | None,
    kept: Kept | None = None,
    stages: Collection[int] | None = None,
) -> dict[int, StageState]:
    """The state of every replica held here, by its name; with `stages`, of these only.

    It is one of those that are `kept`, or a copy of one for another device, or comes from `origin`,
    which is asked once for each stage, or is drawn from `seed`.
    """
    states: dict[int, StageState] = {}
    replicas = [
        node
        for node in topology.own_replicas
        if stages is None or topology.stage_of[node] in stages
    ]
    of_stages = {stage: state for (stage, _), state in (kept or {}).items()}
    for node in replicas:
        state = (kept or {}).get((topology.stage_of[node], topology.device(node)))
        if state is not None:
            # What was added up of an iteration that did not count is forgotten.
            with jax.default_device(topology.device(node)):
                gradients = state.functions.no_gradients(state.parameters)
            state.gradients = jax.device_put(gradients, topology.sharding(node))
            states[node] = state
    served = sorted({topology.stage_of[node] for node in replicas if node not in states})
    shown = tqdm(served, desc="state", unit="stage", disable=None if origin else True, leave=False)
    for stage in shown:
        own = [node for node in replicas if topology.stage_of[node] == stage and node not in states]
        first_layer = cut.blocks(stage).start
        if stage in of_stages:
            read = jax.device_get(of_stages[stage].to_save())
            for node in own:
                states[node] = _placed(functions[stage], read, topology, node)
            continue
        if origin is None:
            for node in own:
                states[node] = _drawn(functions[stage], first_layer, topology, node, seed)
            continue
        shapes = jax.eval_shape(functions[stage].create, jax.random.key(0), first_layer)
        read = origin(stage, {"parameters": shapes[0], "optimizer_state": shapes[1]})
        for node in own:
            states[node] = _placed(functions[stage], read, topology, node)
    return {node: states[node] for node in replicas}


def _drawn(
    functions: StageFunctions, first_layer: int, topology: Topology, node: int, seed: int
) -> StageState:
    with jax.default_device(topology.device(node)):
        created = functions.create(jax.random.key(seed), first_layer)
    return StageState(functions, *jax.device_put(created, topology.sharding(node)))


def _placed(functions: StageFunctions, read: State, topology: Topology, node: int) -> StageState:
    """A replica with its own copy of what was read, since updates write over it.

    What was not read is all that is allocated besides, so a device never holds more than what the
    replicas there go on with.
    """
    copy = jax.device_put(dict(read), topology.sharding(node), may_alias=False)
    parameters = copy["parameters"]
    # Zeros depend on no parameter, so they would not follow them to their device.
    with jax.default_device(topology.device(node)):
        gradients = functions.no_gradients(parameters)
        begun = None if "optimizer_state" in copy else functions.begin(parameters)
    gradients, begun = jax.device_put((gradients, begun), topology.sharding(node))
    optimizer_state = copy["optimizer_state"] if begun is None else begun
    return StageState(functions, parameters, optimizer_state, gradients)


def make_nodes(topology: Topology) -> dict[int, NodeState]:
    """The nodes served here, with nothing in flight."""
    return {
        node: NodeState(gauge=jax.device_put(np.zeros(2, np.int32), topology.sharding(node)))
        for node in topology.nodes
    }
