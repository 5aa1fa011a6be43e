"""The state of a host's nodes, and one iteration of its program after another.

`Executor.run` takes one of two ways. Where nothing has to be waited for, in one process, everything
is dispatched in the program's order at once: the device runs a node's operations in that order
because each call takes the gauge that the call before it returned. Otherwise
`skippipe_jax.runtime.live` starts every operation when its input has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree
from skippipe_sched.problem.links import GIBIBYTE
from skippipe_sched.problem.plan import Operation, Plan
from skippipe_sched.timing.averaging import best_ring

from skippipe_jax.config import ModelConfig, NetworkConfig, OptimizerConfig
from skippipe_jax.config.recipe import AVERAGED
from skippipe_jax.data.batches import Batch
from skippipe_jax.models.document_mask import marked_tokens
from skippipe_jax.models.llama import parameter_count, stage_shapes
from skippipe_jax.optim.local_updates import numbers, with_mean
from skippipe_jax.program.compiler import Compute, Program
from skippipe_jax.program.schedule import stage_shares
from skippipe_jax.runtime.reduction import sum_over_devices
from skippipe_jax.runtime.ring import Ring
from skippipe_jax.runtime.stage_functions import (
    STOP,
    TOTALS,
    Gauge,
    Gradients,
    Parameters,
    StageFunctions,
    Totals,
    stage_functions,
)
from skippipe_jax.runtime.transport import Link

# `network.averaging: auto` takes the collective where no link between replicas is slower.
FAST_LINK = GIBIBYTE


@dataclass
class StageState:
    """One replica of a stage. Nodes of a stage that share a device may share it."""

    functions: StageFunctions
    parameters: Parameters
    optimizer_state: PyTree
    gradients: Gradients

    def to_save(self) -> dict[str, PyTree]:
        """What a checkpoint holds of a stage."""
        return {"parameters": self.parameters, "optimizer_state": self.optimizer_state}

    def restore(self, saved: dict[str, PyTree]) -> None:
        """Take over what a checkpoint holds."""
        self.parameters, self.optimizer_state = saved["parameters"], saved["optimizer_state"]


@dataclass
class NodeState:
    """What one node holds during an iteration, by microbatch."""

    gauge: Gauge
    saved: dict[int, PyTree] = field(default_factory=dict)
    targets: dict[int, jax.Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Of one iteration, still being computed: the totals over all nodes, and this host's gauges.

    `busy_s` is how long each node computed, where that was watched.
    """

    totals: Totals
    gauges: dict[int, Gauge]
    busy_s: Float[Array, " nodes"] | None


def devices_of_nodes(plan: Plan, host_of: Sequence[int]) -> tuple[jax.Device, ...]:
    """The device of each node: those of a host in turn over the devices of its process."""
    devices_of_host: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        devices_of_host.setdefault(device.process_index, []).append(device)
    served = dict.fromkeys(devices_of_host, 0)
    devices = []
    for node in range(len(plan.case.nodes)):
        host = host_of[node]
        devices.append(devices_of_host[host][served[host] % len(devices_of_host[host])])
        served[host] += 1
    return tuple(devices)


def functions_of_stages(
    plan: Plan, model: ModelConfig, optimizer: OptimizerConfig, steps: int, microbatch_tokens: int
) -> list[StageFunctions]:
    """The jitted functions of each stage; stages of one shape share them."""
    layers = model.layers_of_stages(len(plan.stages))
    return [
        stage_functions(model, optimizer, steps, stage == 0, count, microbatch_tokens)
        for stage, count in enumerate(layers)
    ]


class Executor:
    """Runs the program of one host over the nodes that it serves."""

    def __init__(
        self,
        plan: Plan,
        program: Program,
        devices: Sequence[jax.Device],
        functions: Sequence[StageFunctions],
        links: Mapping[int, Link],
        host_of: Sequence[int],
        model: ModelConfig,
        seed: int,
        activation: jax.ShapeDtypeStruct,
        network: NetworkConfig | None = None,
        *,
        scales_skipped: bool = False,
        average_parameters_every: int | None = None,
    ):
        """Create the parameters of the stages served here, drawn from `seed`.

        `devices[n]` and `host_of[n]` are the device and the host of node n, `functions[s]` those
        of stage s, `links[h]` the way to host h, `activation` what stages give to each other. With
        `scales_skipped`, inner stages make up for the microbatches that skip them (see `scaled`).
        With `average_parameters_every`, replicas average parameters and not gradients (see
        `local_updates`).
        """
        self.scales_skipped = scales_skipped
        self.follow(plan, program)
        self.devices = devices
        self.links = links
        self.host_of = host_of
        self.network = network or NetworkConfig()
        self.stage_of = plan.stage_of
        # Whether each dispatch bears the name of its operation, for JAX's profiler.
        self.names_dispatches = False
        self.activation = activation
        travelling = self.network.activation_dtype or activation.dtype
        self.travelling = jax.ShapeDtypeStruct(activation.shape, travelling)
        self.average_parameters_every = average_parameters_every
        # A replica is named after the first of its nodes.
        self.replica_of = self._replicas_of_nodes()
        self.replicas = [
            tuple(dict.fromkeys(self.replica_of[node] for node in nodes)) for nodes in plan.stages
        ]
        layers = model.layers_of_stages(len(plan.stages))
        self.states: dict[int, StageState] = {}
        for node in program.nodes:
            stage = self.stage_of[node]
            if self.replica_of[node] not in self.states:
                with jax.default_device(devices[node]):
                    created = functions[stage].create(jax.random.key(seed), sum(layers[:stage]))
                created = jax.device_put(created, devices[node])
                self.states[self.replica_of[node]] = StageState(functions[stage], *created)
        self.nodes = {
            node: NodeState(gauge=self.put(np.zeros(2, np.int32), node)) for node in program.nodes
        }
        averaged = AVERAGED if self.updates_locally else 1
        shapes = stage_shapes(model, len(layers))
        self.rings = self._rings([averaged * parameter_count(own) for own in shapes])
        # One device of each host sums what all hosts need to know.
        first_node_of_host = {host: node for node, host in reversed(list(enumerate(host_of)))}
        self.first_nodes = [node for _, node in sorted(first_node_of_host.items())]
        self.host_devices = [devices[node] for node in self.first_nodes]
        self.host_device = self.host_devices[program.host]

    @property
    def updates_locally(self) -> bool:
        """Whether replicas average parameters, every so many iterations, and not gradients."""
        return self.average_parameters_every is not None

    def averages_parameters(self, iteration: int) -> bool:
        """Whether replicas average parameters after the update of an iteration, from 0 on."""
        every = self.average_parameters_every
        return every is not None and (iteration + 1) % every == 0

    def _replicas_of_nodes(self) -> dict[int, int]:
        """The replica that each node holds: its own, or with others of the stage on its device."""
        if self.updates_locally:
            return {node: node for node in range(len(self.devices))}
        first: dict[tuple[int, jax.Device], int] = {}
        return {
            node: first.setdefault((stage, self.devices[node]), node)
            for stage, nodes in enumerate(self.plan.stages)
            for node in nodes
        }

    def follow(self, plan: Plan, program: Program) -> None:
        """Run the next iterations by this plan of the run; all have one placement.

        `program` is this host's, one of those that were compiled together.
        """
        self.plan = plan
        self.program = program
        shares = stage_shares(plan)
        self.shares = [share if self.scales_skipped else None for share in shares]
        # The outputs of a data stage are no sum of its inputs, which are tokens, and anything.
        self.shares[0] = None

    def _rings(self, lengths: Sequence[int]) -> dict[int, Ring]:
        """The ring of each stage that is averaged by one, of so many numbers."""
        rings: dict[int, Ring] = {}
        first_hop = self.program.first_free_hop
        for stage, replicas in enumerate(self.replicas):
            members = best_ring(self.plan.case, stage, sorted(replicas))
            if self._averages_by_ring(members):
                rings[stage] = Ring.of(stage, members, first_hop, lengths[stage])
                first_hop += rings[stage].hops
        return rings

    def _averages_by_ring(self, members: Sequence[int]) -> bool:
        if len(members) == 1 or self.network.averaging == "collective":
            return False
        if self.network.averaging == "ring" or self.network.averaging_dtype is not None:
            return True
        _, bandwidth = self.plan.case.link_matrices
        return any(
            bandwidth[a, b] < FAST_LINK
            for a in members
            for b in members
            if self.host_of[a] != self.host_of[b]
        )

    @property
    def sums_totals_by_links(self) -> bool:
        """Whether hosts send their totals to host 0: slow links suit no collective."""
        return len(self.host_devices) > 1 and bool(self.rings)

    @property
    def first_totals_hop(self) -> int:
        """Above the numbers of all other hops."""
        after_rings = [ring.first_hop + ring.hops for ring in self.rings.values()]
        return max([self.program.first_free_hop, *after_rings])

    def open_sums(self) -> None:
        """Sum something small over every group of devices that training sums over.

        Processes have 30 seconds to come to the first sum of a group (gloo's limit, which JAX does
        not let one change), and compiling the stages can keep one of them longer. Call this on all
        hosts at about the same time.
        """
        stages = range(len(self.replicas))
        groups = [self._devices_of(stage) for stage in stages if stage not in self.rings]
        if not self.sums_totals_by_links:
            groups.append(tuple(self.host_devices))
        for devices in groups:
            own = [d for d in devices if d.process_index == jax.process_index()]
            if own:
                zeros = {device: jax.device_put(np.zeros(1, np.float32), device) for device in own}
                jax.block_until_ready(list(sum_over_devices(devices, zeros).values()))

    def run(
        self, iteration: int, batches: Mapping[int, Sequence[Batch]], stop: bool = False
    ) -> Outcome:
        """Dispatch one iteration in the program's order, waiting for nothing.

        `batches[d]` are those of data node d, one for each of its microbatches in order. `stop`
        tells all hosts, through the totals, that this one was asked to stop.
        """
        assert not self.rings, "a ring waits for what arrives"
        totals = self.new_totals()
        inputs = self.batches_of_microbatches(batches)
        carried: dict[int, jax.Array] = {}
        owners: list[Totals] = []
        for instruction in self.program.instructions:
            if isinstance(instruction, Compute):
                self._compute(instruction, iteration, inputs, carried, totals)
            else:
                if not self.updates_locally:
                    self.sum_replicas(instruction.stage)
                owners += self.squared_norms(instruction.stage)
        local = self.add_up([*totals.values(), *owners], stop, {})
        summed = sum_over_devices(self.host_devices, {self.host_device: local})[self.host_device]
        outcome = self.update(summed, watched=False)
        if self.averages_parameters(iteration):
            for stage in self.stages_served():
                self.sum_replicas(stage)
        return outcome

    def update(self, summed: Float[Array, " totals_and_nodes"], *, watched: bool) -> Outcome:
        """Update all stages served here; `summed` is what `add_up` gave, over all hosts."""
        totals, busy_s = _apart(summed)
        for node, state in self.states.items():
            state.parameters, state.optimizer_state, state.gradients = state.functions.update(
                state.parameters,
                state.optimizer_state,
                state.gradients,
                jax.device_put(totals, self.devices[node]),
                self._factor(self.stage_of[node]),
            )
        gauges = {node: state.gauge for node, state in self.nodes.items()}
        return Outcome(totals, gauges, busy_s if watched else None)

    def owned_stages(self) -> dict[int, StageState]:
        """The stages whose first replica is served here: this host saves them."""
        return {
            stage: self.states[replicas[0]]
            for stage, replicas in enumerate(self.replicas)
            if replicas[0] in self.states
        }

    def stages_served(self) -> list[int]:
        """The stages that have a replica here, in order."""
        return sorted({self.stage_of[node] for node in self.states})

    def new_totals(self) -> dict[jax.Device, Totals]:
        """Zeros to add to, on each device that computes losses."""
        return {
            self.devices[node]: self.put(np.zeros(TOTALS, np.float32), node)
            for node in self.states
            if self.stage_of[node] == 0
        }

    def batches_of_microbatches(self, batches: Mapping[int, Sequence[Batch]]) -> dict[int, Batch]:
        """The batch of each microbatch whose data node is served here."""
        unused = {node: iter(own) for node, own in batches.items()}
        return {
            microbatch: next(unused[path[0]])
            for microbatch, path in enumerate(self.plan.microbatches)
            if path[0] in unused
        }

    def _compute(
        self,
        instruction: Compute,
        iteration: int,
        inputs: Mapping[int, Batch],
        carried: dict[int, jax.Array],
        totals: dict[jax.Device, Totals],
    ) -> None:
        operation = instruction.operation
        arrives, leaves = instruction.arrives, instruction.leaves
        if arrives is not None:
            link = self.links[self.host_of[arrives.source]]
            value = self.unpack(link.receive(arrives, iteration, self.travelling))
        elif operation.kind == "F":
            value = self.first_input(operation, inputs)
        else:
            value = carried.pop(operation.microbatch)
        result = self.call(operation, value, totals)
        if leaves is not None:
            self.links[self.host_of[leaves.target]].send(leaves, iteration, self.pack(result))
        elif result is not None:
            carried[operation.microbatch] = result

    def first_input(self, operation: Operation, inputs: Mapping[int, Batch]) -> jax.Array:
        """The tokens of a microbatch, on its data node, which keeps its targets."""
        _, microbatch, node = operation
        batch = inputs[microbatch]
        self.nodes[node].targets[microbatch] = self.put(batch["targets"], node)
        return self.put(marked_tokens(batch), node)

    def call(self, operation: Operation, value: jax.Array, totals: dict[jax.Device, Totals]) -> Any:
        """Dispatch one operation; its output, or None after the last backward of a path."""
        if not self.names_dispatches:
            return self._dispatch(operation, value, totals)
        with jax.profiler.TraceAnnotation(f"{operation}, stage {self.stage_of[operation.node]}"):
            return self._dispatch(operation, value, totals)

    def _dispatch(
        self, operation: Operation, value: jax.Array, totals: dict[jax.Device, Totals]
    ) -> Any:
        kind, microbatch, node = operation
        device = self.devices[node]
        own, stage = self.nodes[node], self.states[self.replica_of[node]]
        functions = stage.functions
        if kind == "F":
            result, own.saved[microbatch], own.gauge = functions.forward(
                stage.parameters, own.gauge, value, self.shares[self.stage_of[node]]
            )
        elif kind == "L":
            result, stage.gradients, totals[device], own.gauge = functions.loss(
                stage.parameters,
                stage.gradients,
                totals[device],
                own.gauge,
                value,
                own.targets.pop(microbatch),
            )
        else:
            result, stage.gradients, own.gauge = functions.backward(
                stage.parameters, stage.gradients, own.gauge, own.saved.pop(microbatch), value
            )
        return result

    def pack(self, array: jax.Array) -> jax.Array:
        """An activation, or its gradient, as it travels."""
        return array.astype(self.travelling.dtype)

    def unpack(self, array: jax.Array) -> jax.Array:
        """An activation, or its gradient, as stages compute with it."""
        return array.astype(self.activation.dtype)

    def sum_replicas(self, stage: int) -> None:
        """Sum by a collective what the replicas of a stage average."""
        if len(self.replicas[stage]) == 1:
            return
        own = [node for node in self.replicas[stage] if node in self.states]
        given: dict[jax.Device, list[PyTree]] = {}
        for node in own:
            given.setdefault(self.devices[node], []).append(self.to_sum(node))
        local = {device: _add_trees(trees) for device, trees in given.items()}
        summed = sum_over_devices(self._devices_of(stage), local)
        for node in own:
            self.take_sum(node, summed[self.devices[node]])

    def _devices_of(self, stage: int) -> tuple[jax.Device, ...]:
        return tuple(dict.fromkeys(self.devices[node] for node in self.replicas[stage]))

    def to_sum(self, node: int) -> PyTree:
        """What a replica adds to a sum over its stage, and gives up until `take_sum`."""
        state = self.states[node]
        if self.updates_locally:
            return numbers(state.to_save())
        gradients, state.gradients = state.gradients, {}
        return gradients

    def take_sum(self, node: int, summed: PyTree) -> None:
        """Go on with the sum over a replica's stage."""
        state = self.states[node]
        if self.updates_locally:
            replicas = len(self.replicas[self.stage_of[node]])
            state.restore(with_mean(state.to_save(), summed, replicas))
        else:
            state.gradients = summed

    def summed_array(self, node: int) -> jax.Array:
        """An array of a replica that is there when the sum over its stage is."""
        state = self.states[node]
        return jax.tree.leaves(state.parameters if self.updates_locally else state.gradients)[0]

    def squared_norms(self, stage: int) -> list[Totals]:
        """What the gradients of a stage add here to the squared norm over all stages.

        Summed gradients count where the first replica is served. Of local ones, each of which is
        `_factor` times what the replica has added up, the mean over the replicas counts.
        """
        counted = self.replicas[stage] if self.updates_locally else self.replicas[stage][:1]
        own = [self.states[node] for node in counted if node in self.states]
        norms = [state.functions.squared_norm(state.gradients) for state in own]
        # The mean of n terms that are n^2 times as large is n times their sum.
        return [norm * len(counted) for norm in norms] if self.updates_locally else norms

    def _factor(self, stage: int) -> np.float32 | None:
        """By what local gradients are multiplied, so that their mean is the stage's gradient."""
        return np.float32(len(self.replicas[stage])) if self.updates_locally else None

    def add_up(
        self, parts: Sequence[Totals], stop: bool, busy_s: Mapping[int, float]
    ) -> Float[Array, " totals_and_nodes"]:
        """What this host adds to the sum over all: totals, then how long each node computed."""
        own = np.zeros(TOTALS + len(self.devices), np.float32)
        own[STOP] = stop
        for node, seconds in busy_s.items():
            own[TOTALS + node] = seconds
        here = [jax.device_put(part, self.host_device) for part in parts]
        return _add_totals(here, jax.device_put(own, self.host_device))

    def put(self, array: np.ndarray, node: int) -> jax.Array:
        """A copy on the device of a node."""
        return jax.device_put(array, self.devices[node])


def _add_trees(trees: Sequence[PyTree]) -> PyTree:
    return trees[0] if len(trees) == 1 else _sum_of_trees(trees)


@jax.jit
def _sum_of_trees(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda first, *others: sum(others, start=first), *trees)


@jax.jit
def _add_totals(parts: list[jax.Array], own: jax.Array) -> jax.Array:
    return own.at[:TOTALS].add(jnp.sum(jnp.stack([*parts, jnp.zeros(TOTALS)]), axis=0))


@jax.jit
def _apart(summed: jax.Array) -> tuple[jax.Array, jax.Array]:
    return summed[:TOTALS], summed[TOTALS:]
