"""What the operations of a program compute: in training, and for held-out microbatches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from skippipe_sched.problem.plan import Operation

from skippipe_jax.data.batches import Batch
from skippipe_jax.models.document_mask import marked_tokens
from skippipe_jax.runtime.replicas import Replicas
from skippipe_jax.runtime.stage_functions import TOTALS, Totals
from skippipe_jax.runtime.state import StageState, make_nodes
from skippipe_jax.runtime.wire_format import Wire


class Operations(ABC):
    """Dispatches operations on the nodes of this host; nothing is waited for.

    Attributes:
        replicas: those of this host.
        names_dispatches: whether each dispatch bears the name of its operation, for JAX's profiler.
    """

    def __init__(self, replicas: Replicas):
        """On the nodes that these replicas serve."""
        self.replicas = replicas
        self.names_dispatches = False

    @abstractmethod
    def arriving(self, operation: Operation) -> jax.ShapeDtypeStruct:
        """What a hop brings to an operation."""

    @abstractmethod
    def first_input(self, operation: Operation, batch: Batch) -> jax.Array:
        """The tokens of a microbatch, on its data node, which keeps its targets."""

    @abstractmethod
    def _dispatch(
        self, operation: Operation, value: jax.Array, leaves: bool
    ) -> tuple[Any, jax.Array]: ...

    def dispatch(
        self, operation: Operation, value: jax.Array, *, leaves: bool
    ) -> tuple[Any, jax.Array]:
        """Dispatch an operation on its input, as it came from another node or from the same one.

        Returns its output, as it travels if it `leaves` the node and None where there is none, and
        an array that is there when the operation has ended.
        """
        if not self.names_dispatches:
            return self._dispatch(operation, value, leaves)
        stage = self.replicas.topology.stage_of[operation.node]
        with jax.profiler.TraceAnnotation(f"{operation}, stage {stage}"):
            return self._dispatch(operation, value, leaves)

    def _state(self, node: int) -> StageState:
        return self.replicas.states[self.replicas.topology.replica_of[node]]

    def _put(self, array: np.ndarray, node: int) -> jax.Array:
        return jax.device_put(array, self.replicas.topology.sharding(node))


class TrainingOperations(Operations):
    """Forward, loss and backward, which add to gradients and totals."""

    def __init__(self, replicas: Replicas, wire: Wire, seed: int):
        """Begin with nothing in flight; call `begin` before an iteration.

        The replicas' functions are those for this `wire`; `seed` draws stochastic roundings.
        """
        super().__init__(replicas)
        self.wire = wire
        self.seed = seed
        self.iteration = 0
        self.nodes = make_nodes(replicas.topology)
        self.totals: dict[jax.Device, Totals] = {}
        self.shares: Sequence[np.float32 | None] = ()

    def begin(self, iteration: int, shares: Sequence[np.float32 | None]) -> None:
        """Begin an iteration, in which what a stage adds is divided by its share, if it has one."""
        self.iteration = iteration
        self.shares = shares
        topology = self.replicas.topology
        self.totals = {
            topology.device(replica): self._put(np.zeros(TOTALS, np.float32), replica)
            for replica in self.replicas.states
            if topology.stage_of[replica] == 0
        }

    def arriving(self, operation: Operation) -> jax.ShapeDtypeStruct:
        """What a hop brings to an operation: a gradient for B, else an activation."""
        way = self.wire.gradients if operation.kind == "B" else self.wire.activations
        return way.travelling

    def first_input(self, operation: Operation, batch: Batch) -> jax.Array:
        """The tokens of a microbatch, on its data node, which keeps its targets."""
        targets = self.nodes[operation.node].targets
        targets[operation.microbatch] = self._put(batch["targets"], operation.node)
        return self._put(marked_tokens(batch), operation.node)

    def _dispatch(
        self, operation: Operation, value: jax.Array, leaves: bool
    ) -> tuple[Any, jax.Array]:
        kind, microbatch, node = operation
        topology = self.replicas.topology
        own, state = self.nodes[node], self._state(node)
        functions = state.functions
        if kind == "F":
            result, own.saved[microbatch], own.gauge = functions.forward(
                state.parameters,
                own.gauge,
                value,
                self.shares[topology.stage_of[node]],
                leaves=leaves,
            )
        elif kind == "L":
            device = topology.device(node)
            result, state.gradients, self.totals[device], own.gauge = functions.loss(
                state.parameters,
                state.gradients,
                self.totals[device],
                own.gauge,
                value,
                own.targets.pop(microbatch),
                self._draw(operation, leaves),
                leaves=leaves,
            )
        else:
            result, state.gradients, own.gauge = functions.backward(
                state.parameters,
                state.gradients,
                own.gauge,
                own.saved.pop(microbatch),
                value,
                self._draw(operation, leaves),
                leaves=leaves,
            )
        return result, own.gauge

    def _draw(self, operation: Operation, leaves: bool) -> np.ndarray | None:
        """What the rounding of the gradient that an operation sends is drawn by, if it is drawn."""
        if not (leaves and self.wire.gradients.is_drawn):
            return None
        stage = self.replicas.topology.stage_of[operation.node]
        return np.array([self.seed, self.iteration, operation.microbatch, stage], np.uint32)


class HeldOutOperations(Operations):
    """Forward through every stage, and the loss at the end.

    Attributes:
        losses: of each microbatch: the sum of its token losses [nats], and its target tokens.
    """

    def __init__(self, replicas: Replicas, activation: jax.ShapeDtypeStruct):
        """Activations travel as they are: they are for the loss of the model as it is."""
        super().__init__(replicas)
        self.activation = activation
        self.targets: dict[int, jax.Array] = {}
        self.losses: dict[int, jax.Array] = {}

    def arriving(self, operation: Operation) -> jax.ShapeDtypeStruct:
        """What a hop brings to an operation: an activation."""
        return self.activation

    def first_input(self, operation: Operation, batch: Batch) -> jax.Array:
        """The tokens of a microbatch, on its data node, which keeps its targets."""
        self.targets[operation.microbatch] = self._put(batch["targets"], operation.node)
        return self._put(marked_tokens(batch), operation.node)

    def _dispatch(
        self, operation: Operation, value: jax.Array, leaves: bool
    ) -> tuple[Any, jax.Array]:
        kind, microbatch, node = operation
        state = self._state(node)
        if kind == "F":
            result = state.functions.predict(state.parameters, value)
            return result, result
        targets = self.targets.pop(microbatch)
        loss = state.functions.held_out(state.parameters, value, targets)
        self.losses[microbatch] = loss
        return None, loss
