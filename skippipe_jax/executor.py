"""Running a host's program: the state of its nodes, and one iteration after another.

`Executor.run` only dispatches. The device runs a node's operations in the program's order because
each call takes the gauge or the gradients that the call before it returned; transfers overlap with
the compute of other microbatches because nothing here waits for a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from skippipe_sched.plan import Operation, Plan

from skippipe_jax.data import Batch
from skippipe_jax.links import Link
from skippipe_jax.model import ModelConfig
from skippipe_jax.optimizer import OptimizerConfig
from skippipe_jax.program import Compute, Program
from skippipe_jax.stages import (
    STOP,
    Gauge,
    Gradients,
    Parameters,
    StageFunctions,
    Totals,
    stage_functions,
)
from skippipe_jax.summing import sum_over_devices


@dataclass
class StageState:
    """What the nodes of one stage on one device share: they hold the same replica."""

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
    # What the operation before left for the next one on the same node.
    carried: dict[int, jax.Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Of one iteration, still being computed: the totals over all nodes, and this host's gauges."""

    totals: Totals
    gauges: dict[int, Gauge]


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
    ):
        """Create the parameters of the stages served here, drawn from `seed`.

        `devices[n]` and `host_of[n]` are the device and the host of node n, `functions[s]` those
        of stage s, `links[h]` the way to host h.
        """
        self.plan = plan
        self.program = program
        self.devices = devices
        self.links = links
        self.host_of = host_of
        self.stage_of = plan.stage_of
        self.replicas = [
            tuple(dict.fromkeys(devices[node] for node in nodes)) for nodes in plan.stages
        ]
        layers = model.layers_of_stages(len(plan.stages))
        self.states: dict[tuple[int, jax.Device], StageState] = {}
        for node in program.nodes:
            stage = self.stage_of[node]
            if (stage, devices[node]) not in self.states:
                with jax.default_device(devices[node]):
                    created = functions[stage].create(jax.random.key(seed), sum(layers[:stage]))
                created = jax.device_put(created, devices[node])
                self.states[stage, devices[node]] = StageState(functions[stage], *created)
        self.nodes = {
            node: NodeState(gauge=self._put(np.zeros(2, np.int32), node)) for node in program.nodes
        }
        # One device of each host sums what all hosts need to know.
        first_node_of_host = {host: node for node, host in reversed(list(enumerate(host_of)))}
        self.host_devices = [devices[node] for _, node in sorted(first_node_of_host.items())]
        self.host_device = self.host_devices[program.host]

    def open_sums(self) -> None:
        """Sum something small over every group of devices that training sums over.

        Processes have 30 seconds to come to the first sum of a group (gloo's limit, which JAX does
        not let one change), and compiling the stages can keep one of them longer. Call this on all
        hosts at about the same time.
        """
        groups = [*self.replicas, tuple(self.host_devices)]
        for devices in groups:
            own = [d for d in devices if d.process_index == jax.process_index()]
            if own:
                zeros = {device: jax.device_put(np.zeros(1, np.float32), device) for device in own}
                jax.block_until_ready(list(sum_over_devices(devices, zeros).values()))

    def run(
        self, iteration: int, batches: Mapping[int, Sequence[Batch]], stop: bool = False
    ) -> Outcome:
        """Dispatch one iteration.

        `batches[d]` are those of data node d, one for each of its microbatches in order. `stop`
        tells all hosts, through the totals, that this one was asked to stop.
        """
        totals = {
            device: jax.device_put(np.zeros(4, np.float32), device)
            for stage, device in self.states
            if stage == 0
        }
        inputs = self._batches_of_microbatches(batches)
        owners: list[Totals] = []
        for instruction in self.program.instructions:
            if isinstance(instruction, Compute):
                self._compute(instruction, iteration, inputs, totals)
            else:
                owners += self._sum_replicas(instruction.stage)
        stopping = np.zeros(4, np.float32)
        stopping[STOP] = stop
        summed = self._sum_totals([*totals.values(), *owners, stopping])
        for (_, device), state in self.states.items():
            state.parameters, state.optimizer_state, state.gradients = state.functions.update(
                state.parameters,
                state.optimizer_state,
                state.gradients,
                jax.device_put(summed, device),
            )
        # The next iteration gives the gauges themselves up.
        gauges = {node: jnp.copy(state.gauge) for node, state in self.nodes.items()}
        return Outcome(summed, gauges)

    def owned_stages(self) -> dict[int, StageState]:
        """The stages whose first replica is served here: this host saves them."""
        return {
            stage: self.states[stage, replicas[0]]
            for stage, replicas in enumerate(self.replicas)
            if (stage, replicas[0]) in self.states
        }

    def _batches_of_microbatches(self, batches: Mapping[int, Sequence[Batch]]) -> dict[int, Batch]:
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
        totals: dict[jax.Device, Totals],
    ) -> None:
        kind, microbatch, node = operation = instruction.operation
        arrives, leaves = instruction.arrives, instruction.leaves
        if arrives is not None:
            value = self.links[self.host_of[arrives.source]].receive(arrives, iteration)
        elif kind == "F":
            batch = inputs[microbatch]
            value = self._put(batch["tokens"], node)
            self.nodes[node].targets[microbatch] = self._put(batch["targets"], node)
        else:
            value = self.nodes[node].carried.pop(microbatch)
        result = self._call(operation, value, totals)
        if leaves is not None:
            self.links[self.host_of[leaves.target]].send(leaves, iteration, result)
        elif result is not None:
            self.nodes[node].carried[microbatch] = result

    def _call(
        self, operation: Operation, value: jax.Array, totals: dict[jax.Device, Totals]
    ) -> Any:
        """Dispatch one operation; its output, or None after the last backward of a path."""
        kind, microbatch, node = operation
        device = self.devices[node]
        own, stage = self.nodes[node], self.states[self.stage_of[node], device]
        functions = stage.functions
        if kind == "F":
            result, own.saved[microbatch], own.gauge = functions.forward(
                stage.parameters, own.gauge, value
            )
        elif kind == "L":
            result, stage.gradients, totals[device] = functions.loss(
                stage.parameters,
                stage.gradients,
                totals[device],
                value,
                own.targets.pop(microbatch),
            )
        else:
            result, stage.gradients, own.gauge = functions.backward(
                stage.parameters, stage.gradients, own.gauge, own.saved.pop(microbatch), value
            )
        return result

    def _sum_replicas(self, stage: int) -> list[Totals]:
        """Sum a stage's gradients over its replicas; the squared norm, on its first replica."""
        replicas = self.replicas[stage]
        own = {device: state for (of, device), state in self.states.items() if of == stage}
        summed = sum_over_devices(
            replicas, {device: state.gradients for device, state in own.items()}
        )
        for device, state in own.items():
            state.gradients = summed[device]
        return [
            state.functions.squared_norm(state.gradients)
            for device, state in own.items()
            if device == replicas[0]
        ]

    def _sum_totals(self, parts: Sequence[Any]) -> Totals:
        """The sum of this host's parts and all other hosts', on this host's first device."""
        device = self.host_device
        local = _add_all([jax.device_put(part, device) for part in parts])
        return sum_over_devices(self.host_devices, {device: local})[device]

    def _put(self, array: np.ndarray, node: int) -> jax.Array:
        return jax.device_put(array, self.devices[node])


@jax.jit
def _add_all(parts: list[jax.Array]) -> jax.Array:
    return jnp.sum(jnp.stack(parts), axis=0)
