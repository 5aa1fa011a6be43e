"""Compilation of all functions of a session in advance, so that no iteration traces or compiles.

A host that compiled during an iteration would delay the others; in advance, hosts compile in
parallel. Functions of parameters are traced, lowered and compiled for shapes and shardings only,
which needs no device memory and changes no state. Functions that sum gradients are run on the
gradients, which are zeros before an iteration. JAX also caches the compiled programs (see
`compilation`).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from skippipe_sched.problem.case import Case

from skippipe_jax.config import Config
from skippipe_jax.models.node_memory import gathers_once
from skippipe_jax.optim.outer import begin, fragments_of
from skippipe_jax.program.compiler import Compute, Program
from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.runtime.operations import TrainingOperations, add_targets
from skippipe_jax.runtime.outer_steps import inner_steps, share_of_norm
from skippipe_jax.runtime.replicas import Replicas
from skippipe_jax.runtime.ring import Gathering, RingPart
from skippipe_jax.runtime.stage_functions import (
    TOTALS,
    activation,
    functions_of_run,
    wire_of_run,
)
from skippipe_jax.runtime.state import StageState
from skippipe_jax.runtime.totals import add_up, split_sums


class AheadOfTimeCompiler:
    """Compiler of jitted functions for arrays or their shapes.

    Attributes:
        count: number of programs that were requested.
    """

    def __init__(self):
        """Begin with a count of 0."""
        self.count = 0

    def __call__(self, function: Any, *arguments: Any, **static: Any) -> Any:
        """Compile a function for these arguments; return shapes and shardings of its results.

        A consumer must be compiled for the results of the same call: the residuals of a forward
        pass hold its trace.
        """
        self.count += 1
        traced = function.trace(*arguments, **static)
        return _with_shardings(traced.out_info, traced.lower().compile().output_shardings)


def _with_shardings(shapes: Any, shardings: Any) -> Any:
    """Return these shapes with these shardings."""

    def described(own: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        weak = own.weak_type
        return jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(described, shapes, shardings)


class ProgramKind(NamedTuple):
    """Kind of operations that share a program: F, L or B, and whether hops bring input or output.

    `arrives` or `leaves` is False if the previous or next operation is on the same node.
    """

    letter: str
    arrives: bool
    leaves: bool


def _kinds_of(nodes: Collection[int], programs: Collection[Program]) -> frozenset[ProgramKind]:
    """Return the kinds of operations that programs have for some nodes."""
    return frozenset(
        ProgramKind(step.operation.kind, step.arrives is not None, step.leaves is not None)
        for program in programs
        for step in program.instructions
        if isinstance(step, Compute) and step.operation.node in nodes
    )


def _usual_kinds(stage: int) -> frozenset[ProgramKind]:
    """Return the kinds of operations on a node of a stage, if each path visits several stages."""
    if stage == 0:
        return frozenset(
            {
                ProgramKind("F", False, True),
                ProgramKind("L", True, True),
                ProgramKind("B", True, False),
            }
        )
    return frozenset({ProgramKind("F", True, True), ProgramKind("B", True, True)})


@dataclass(frozen=True)
class _Replica:
    """Replica of a stage, whose state may consist of shapes only.

    Attributes:
        of_stages: number of stages of the model.
        here: devices of the replica.
        kinds: kinds of operations on its nodes.
        count: number of replicas of the stage; None if unknown yet.
    """

    config: Config
    stage: int
    of_stages: int
    state: StageState
    here: NodeSharding
    kinds: frozenset[ProgramKind]
    count: int | None = None

    def compile(self, ahead: AheadOfTimeCompiler) -> None:
        """Compile the functions of training and validation, except those that sum gradients."""
        state, functions = self.state, self.state.functions
        self._compile_operations(ahead)
        averaging = self.config.averaging
        if not averaging.is_outer or averaging.exact_steps:
            totals, draw = self._replicated((TOTALS,), jnp.float32), np.zeros(2, np.uint32)
            ahead(functions.squared_norm, state.gradients)
            arguments = state.parameters, state.optimizer_state, state.gradients, totals, draw
            ahead(functions.update, *arguments)
        if averaging.is_outer:
            self._compile_own_steps(ahead)
        if self.config.validation.every:
            arriving, tokens = self._arriving(self._computed), self._tokens()
            inputs = arriving if self.stage else self._tokens(are_inputs=True)
            ahead(functions.predict, state.parameters, inputs)
            if self.stage == 0:
                ahead(functions.held_out, state.parameters, arriving, tokens)

    @property
    def _computed(self) -> jax.ShapeDtypeStruct:
        return activation(self.config.model, self.config.data)

    def _replicated(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.here.whole)

    def _arriving(self, own: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=self.here.of_hop(own.shape))

    def _tokens(self, *, are_inputs: bool = False) -> jax.ShapeDtypeStruct:
        is_marked = are_inputs and self.config.data.packing == "documents"
        return self._replicated((*self._computed.shape[:2], *(2,) * is_marked), jnp.int32)

    def _compile_operations(self, ahead: AheadOfTimeCompiler) -> None:
        wire, state, functions = wire_of_run(self.config), self.state, self.state.functions
        parameters, gradients = state.parameters, state.gradients
        if state.gathers:
            blocks = ahead(functions.gather, parameters["blocks"])
            parameters = {**parameters, "blocks": blocks}
        gauge, saved_residuals = self._replicated((2,), jnp.int32), []
        # F first, as B is compiled for the residuals of F.
        for letter, arrives, leaves in sorted(self.kinds, key=lambda kind: "FLB".index(kind[0])):
            wire_format = wire.gradients if letter == "B" else wire.activations
            value = self._arriving(wire_format.travelling if arrives else self._computed)
            draw = np.zeros(4, np.uint32) if leaves and wire.gradients.is_drawn else None
            if letter == "F":
                value = value if self.stage else self._tokens(are_inputs=True)
                _, saved, _ = ahead(functions.forward, parameters, gauge, value, leaves=leaves)
                saved_residuals.append(saved)
            elif letter == "L":
                totals = self._replicated((TOTALS,), jnp.float32)
                arguments = gradients, totals, gauge, value, self._tokens(), draw
                ahead(functions.loss, parameters, *arguments, leaves=leaves)
            else:
                for saved in saved_residuals:
                    arguments = gradients, gauge, saved, value, draw
                    ahead(functions.backward, parameters, *arguments, leaves=leaves)

    def _compile_own_steps(self, ahead: AheadOfTimeCompiler) -> None:
        """Compile the functions of `outer` mode at the end of iterations.

        `apply` depends on the number of replicas, so it is compiled only if that is known.
        """
        config, state = self.config, self.state
        cut = config.model.stage_partition(self.of_stages)
        arguments = state.parameters, state.optimizer_state, state.gradients
        own_step = inner_steps(config, self.of_stages)[self.stage]
        targets = self._replicated((), jnp.int32)
        ahead(add_targets, targets, targets)
        parameters, _, _, norm = ahead(own_step, *arguments, targets)
        if self.count is not None:
            ahead(share_of_norm, norm, self.count)
        if self.count == 1:
            return
        outer = ahead(begin, parameters)
        for fragment in fragments_of(config.averaging, cut[self.stage]):
            message, sent, outer = fragment.send(parameters, outer, ahead)
            if self.count is not None:
                messages = dict.fromkeys(range(self.count), message)
                parameters, outer = fragment.apply(parameters, outer, sent, messages, ahead)


def compile_ahead(
    config: Config,
    stages: Collection[int],
    of_stages: int,
    nodes: Collection[NodeSharding],
    case: Case | None = None,
) -> int:
    """Compile the functions of some of a run's stages for some nodes; return their number.

    `case` is the plan's; it decides whether weights are gathered on meshes. Functions that depend
    on the other hosts are left to `compile_session`.
    """
    functions, ahead = functions_of_run(config, of_stages), AheadOfTimeCompiler()
    distinct = {functions[stage]: stage for stage in sorted(stages)}
    for here in nodes:
        for own, stage in distinct.items():
            shapes = jax.eval_shape(own.create, jax.random.key(0), 0)
            parameters, optimizer_state, gradients = (
                _with_shardings(tree, here.of_tree(tree)) for tree in shapes
            )
            lies = here.of_tree(optimizer_state, own.state_memory)
            optimizer_state = _with_shardings(optimizer_state, lies)
            own, draw = own.on(here.mesh), np.zeros(2, np.uint32)
            gathers = case is not None and gathers_once(config, case, stage, here.shape)
            state = StageState(own, parameters, optimizer_state, gradients, draw, gathers=gathers)
            _Replica(config, stage, of_stages, state, here, _usual_kinds(stage)).compile(ahead)
            with jax.default_device(here.devices[0]):
                ahead(own.no_gradients, parameters)
    return ahead.count


def compile_session(
    config: Config,
    operations: TrainingOperations,
    programs: Collection[Program],
    *,
    counts_by_consensus: bool,
) -> None:
    """Compile all functions of this host for iterations of these programs and for validations.

    Excluded are functions that several processes run together (see `open_collectives`). With
    `counts_by_consensus`, hosts exchange totals as numbers, not as device arrays.
    """
    replicas, topology, averaging = operations.replicas, operations.topology, config.averaging
    ahead, compiled = AheadOfTimeCompiler(), set()
    for replica, state in replicas.states.items():
        stage, here = topology.stage_of[replica], topology.sharding(replica)
        nodes = [node for node in topology.nodes if topology.replica_of[node] == replica]
        kinds, count = _kinds_of(nodes, programs), len(topology.replicas[stage])
        alike = state.functions, here, kinds, state.gathers, count
        if alike not in compiled:
            compiled.add(alike)
            of_stages = len(topology.replicas)
            _Replica(config, stage, of_stages, state, here, kinds, count).compile(ahead)
    if averaging.is_outer:
        for replica in replicas.states:
            _gather_zeros(config, replicas, replica)
        norms = [jax.device_put(np.zeros(TOTALS, np.float32)) for _ in replicas.states]
        _add_up_zeros(operations, norms, are_numbers=True)
    if not averaging.is_outer or averaging.exact_steps:
        for replica in replicas.states:
            _sum_zeros(replicas, replica, config.network.averaging_dtype)
        norms = [norm for stage in replicas.stages for norm in replicas.squared_norms(stage)]
        _add_up_zeros(operations, norms, are_numbers=counts_by_consensus)


def _sum_zeros(replicas: Replicas, replica: int, dtype: Any) -> None:
    """Sum the gradients of a replica in the ring of its stage, if any, with zeros as input."""
    topology = replicas.topology
    ring = topology.rings.get(topology.stage_of[replica])
    if ring is None:
        return
    dtype, here = jnp.dtype(dtype or np.float32), topology.sharding(replica)
    part = RingPart(ring, replica, replicas.to_sum(replica), dtype, here)
    for _ in itertools.islice(part.begin(), ring.shards):
        pass
    for step, chunk, _, like in part.unrequested:
        # One chunk of each device, as the others call the same programs.
        if chunk < ring.shards:
            part.arrive(step, chunk, _zeros(like, here))
    replicas.states[replica].gradients = part.result()


def _gather_zeros(config: Config, replicas: Replicas, replica: int) -> None:
    """Gather messages about each fragment of a replica, with zeros from the others."""
    topology, parameters = replicas.topology, replicas.states[replica].parameters
    stage, here = topology.stage_of[replica], topology.sharding(replica)
    layers = config.model.stage_partition(len(topology.replicas))[stage]
    if stage not in topology.gatherings:
        return
    for fragment in fragments_of(config.averaging, layers):
        message = _zeros(fragment.message_shape(parameters), here)
        gathering = Gathering(topology.gatherings[stage], replica, message)
        for _ in gathering.begin():
            pass
        for step, chunk, _, like in gathering.unrequested:
            gathering.arrive(step, chunk, _zeros(like, here))
        gathering.messages()


def _add_up_zeros(
    operations: TrainingOperations, norms: Sequence[Any], *, are_numbers: bool
) -> None:
    """Sum totals of this host, and of all hosts with copies of them, as numbers or arrays."""
    replicas, topology = operations.replicas, operations.topology
    operations.begin(0)
    parts = [*operations.totals.values(), *norms]
    local = add_up(topology, parts, False, {}, replicas.squared_norms_of_blocks())
    if are_numbers:
        local = jax.device_put(np.asarray(local))
    split_sums(local, len(topology.devices))


def _zeros(shape: jax.ShapeDtypeStruct, here: NodeSharding) -> jax.Array:
    return jax.device_put(np.zeros(shape.shape, shape.dtype), shape.sharding or here.first)
