"""Operations of a program, for training and for held-out microbatches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree
from skippipe_sched.problem.plan import Operation

from skippipe_jax.data.batches import Batch
from skippipe_jax.models.document_mask import marked_tokens
from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.runtime.replicas import Replicas
from skippipe_jax.runtime.stage_functions import TOTALS, Totals
from skippipe_jax.runtime.state import NodeState, StageState
from skippipe_jax.runtime.wire_format import Wire

COUNT = jax.ShapeDtypeStruct((), np.int32)
"""Shape and dtype of a number of target tokens."""


class Operations(ABC):
    """Asynchronous dispatch of operations on the nodes of this host.

    Attributes:
        replicas: the replicas of this host.
        names_dispatches: whether each dispatch has the name of its operation in JAX's profiler.
    """

    def __init__(self, replicas: Replicas):
        """Run on the nodes that these replicas serve."""
        self.replicas = replicas
        self.topology = replicas.topology
        self.names_dispatches = False

    @abstractmethod
    def arriving(self, operation: Operation) -> PyTree:
        """Return shape and dtype of what a hop brings to an operation."""

    @abstractmethod
    def _keep_targets(self, operation: Operation, batch: Batch) -> None: ...

    @abstractmethod
    def _dispatch(
        self, operation: Operation, value: jax.Array, leaves: bool
    ) -> tuple[Any, jax.Array]: ...

    def dispatch(
        self, operation: Operation, value: jax.Array | Batch, *, leaves: bool
    ) -> tuple[Any, jax.Array]:
        """Dispatch an operation on its input, which is encoded if it came from another node.

        The input of a microbatch's first operation is its batch. Its tokens are put on the data
        node only now, and its targets, which are kept for the loss.

        Returns its output (encoded if it `leaves` the node, None if there is none), and an array
        that is ready when the operation has ended.
        """
        if isinstance(value, dict):
            self._keep_targets(operation, value)
            value = self._put(marked_tokens(value), operation.node)
        if not self.names_dispatches:
            return self._dispatch(operation, value, leaves)
        stage = self.topology.stage_of[operation.node]
        with jax.profiler.TraceAnnotation(f"{operation}, stage {stage}"):
            return self._dispatch(operation, value, leaves)

    def _state(self, node: int) -> StageState:
        return self.replicas.states[self.topology.replica_of[node]]

    def _put(self, array: np.ndarray, node: int) -> jax.Array:
        return jax.device_put(array, self.topology.sharding(node).whole)


class TrainingOperations(Operations):
    """Operations of training: forward, loss and backward, which add to gradients and totals.

    Attributes:
        targets: number of target tokens of the microbatches that have visited each replica in this
            iteration, if `sends_targets`.
    """

    def __init__(self, replicas: Replicas, wire: Wire, seed: int, *, sends_targets: bool = False):
        """Start with nothing in flight; call `begin` before each iteration.

        The replicas' functions are made for this `wire`; `seed` is that of stochastic rounding.
        With `sends_targets`, activations carry the number of their microbatch's target tokens.
        """
        super().__init__(replicas)
        self.wire = wire
        self.seed = seed
        self.sends_targets = sends_targets
        self.targets: dict[int, jax.Array] = {}
        self.iteration = 0
        self.nodes = {
            node: NodeState(gauge=self._put(np.zeros(2, np.int32), node))
            for node in self.topology.nodes
        }
        self.totals: dict[NodeSharding, Totals] = {}

    def begin(self, iteration: int) -> None:
        """Reset totals and targets for an iteration."""
        self.iteration = iteration
        topology = self.topology
        if self.sends_targets:
            self.targets = {
                replica: self._put(np.zeros((), np.int32), replica)
                for replica in self.replicas.states
            }
        self.totals = {
            topology.sharding(replica): self._put(np.zeros(TOTALS, np.float32), replica)
            for replica in self.replicas.states
            if topology.stage_of[replica] == 0
        }

    def arriving(self, operation: Operation) -> PyTree:
        """Return shape and dtype of what a hop brings: a gradient to B, else an activation.

        An activation comes with its microbatch's number of target tokens, if `sends_targets`.
        """
        if operation.kind == "B":
            return self.wire.gradients.travelling
        activation = self.wire.activations.travelling
        return (activation, COUNT) if self.sends_targets else activation

    def _keep_targets(self, operation: Operation, batch: Batch) -> None:
        own = self.nodes[operation.node]
        own.targets[operation.microbatch] = self._put(batch["targets"], operation.node)
        if self.sends_targets:
            counted = np.int32(np.count_nonzero(batch["targets"] >= 0))
            own.counts[operation.microbatch] = self._put(np.asarray(counted), operation.node)

    def _dispatch(
        self, operation: Operation, value: jax.Array, leaves: bool
    ) -> tuple[Any, jax.Array]:
        kind, microbatch, node = operation
        topology = self.topology
        own, state = self.nodes[node], self._state(node)
        functions = state.functions
        targets = own.counts.pop(microbatch, None)
        if isinstance(value, tuple):
            value, targets = value
        if kind == "F":
            result, own.saved[microbatch], own.gauge = functions.forward(
                state.in_use,
                own.gauge,
                value,
                leaves=leaves,
            )
            if targets is not None:
                replica = topology.replica_of[node]
                self.targets[replica] = add_targets(self.targets[replica], targets)
                result = (result, targets) if leaves else result
        elif kind == "L":
            here = topology.sharding(node)
            result, state.gradients, self.totals[here], own.gauge = functions.loss(
                state.in_use,
                state.gradients,
                self.totals[here],
                own.gauge,
                value,
                own.targets.pop(microbatch),
                self._draw(operation, leaves),
                leaves=leaves,
            )
        else:
            result, state.gradients, own.gauge = functions.backward(
                state.in_use,
                state.gradients,
                own.gauge,
                own.saved.pop(microbatch),
                value,
                self._draw(operation, leaves),
                leaves=leaves,
            )
        return result, own.gauge

    def _draw(self, operation: Operation, leaves: bool) -> np.ndarray | None:
        """Return the seed for the rounding of a sent gradient, or None if it is not stochastic."""
        if not (leaves and self.wire.gradients.is_drawn):
            return None
        stage = self.topology.stage_of[operation.node]
        return np.array([self.seed, self.iteration, operation.microbatch, stage], np.uint32)


class HeldOutOperations(Operations):
    """Operations of validation: forward through every stage, and the loss at the end.

    Attributes:
        losses: for each microbatch, the sum of its token losses [nats] and its target tokens.
    """

    def __init__(self, replicas: Replicas, activation: jax.ShapeDtypeStruct):
        """Use unencoded hops of shape `activation`, so that the loss is that of the exact model."""
        super().__init__(replicas)
        self.activation = activation
        self.targets: dict[int, jax.Array] = {}
        self.losses: dict[int, jax.Array] = {}

    def arriving(self, operation: Operation) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of an activation."""
        return self.activation

    def _keep_targets(self, operation: Operation, batch: Batch) -> None:
        self.targets[operation.microbatch] = self._put(batch["targets"], operation.node)

    def _dispatch(
        self, operation: Operation, value: jax.Array, leaves: bool
    ) -> tuple[Any, jax.Array]:
        kind, microbatch, node = operation
        state = self._state(node)
        if kind == "F":
            result = state.functions.predict(state.model, value)
            return result, result
        targets = self.targets.pop(microbatch)
        loss = state.functions.held_out(state.model, value, targets)
        self.losses[microbatch] = loss
        return None, loss


@jax.jit
def add_targets(first: jax.Array, second: jax.Array) -> jax.Array:
    """Add two numbers of target tokens."""
    return first + second
