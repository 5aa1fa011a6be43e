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


class Operations(ABC):
    """Dispatches operations on the nodes of this host; nothing is waited for.

    Attributes:
        replicas: those of this host.
        activation: what stages compute with.
        travelling: an activation, or its gradient, as hops carry it.
        names_dispatches: whether each dispatch bears the name of its operation, for JAX's profiler.
    """

    def __init__(
        self, replicas: Replicas, activation: jax.ShapeDtypeStruct, travelling_dtype: str | None
    ):
        """Stages give `activation` to each other, rounded for hops to a dtype if one is given."""
        self.replicas = replicas
        self.activation = activation
        dtype = travelling_dtype or activation.dtype
        self.travelling = jax.ShapeDtypeStruct(activation.shape, dtype)
        self.names_dispatches = False

    @abstractmethod
    def first_input(self, operation: Operation, batch: Batch) -> jax.Array:
        """The tokens of a microbatch, on its data node, which keeps its targets."""

    @abstractmethod
    def _dispatch(self, operation: Operation, value: jax.Array) -> tuple[Any, jax.Array]: ...

    def dispatch(self, operation: Operation, value: jax.Array) -> tuple[Any, jax.Array]:
        """Dispatch an operation on its input.

        Returns its output, None where there is none, and an array that is there when it has ended.
        """
        if not self.names_dispatches:
            return self._dispatch(operation, value)
        stage = self.replicas.topology.stage_of[operation.node]
        with jax.profiler.TraceAnnotation(f"{operation}, stage {stage}"):
            return self._dispatch(operation, value)

    def pack(self, array: jax.Array) -> jax.Array:
        """An activation, or its gradient, as it travels."""
        return array.astype(self.travelling.dtype)

    def unpack(self, array: jax.Array) -> jax.Array:
        """An activation, or its gradient, as stages compute with it."""
        return array.astype(self.activation.dtype)

    def _state(self, node: int) -> StageState:
        return self.replicas.states[self.replicas.topology.replica_of[node]]

    def _put(self, array: np.ndarray, node: int) -> jax.Array:
        return jax.device_put(array, self.replicas.topology.sharding(node))


class TrainingOperations(Operations):
    """Forward, loss and backward, which add to gradients and totals."""

    def __init__(
        self, replicas: Replicas, activation: jax.ShapeDtypeStruct, travelling_dtype: str | None
    ):
        """Begin with nothing in flight; call `begin` before an iteration."""
        super().__init__(replicas, activation, travelling_dtype)
        self.nodes = make_nodes(replicas.topology)
        self.totals: dict[jax.Device, Totals] = {}
        self.shares: Sequence[np.float32 | None] = ()

    def begin(self, shares: Sequence[np.float32 | None]) -> None:
        """Begin an iteration, in which what a stage adds is divided by its share, if it has one."""
        self.shares = shares
        topology = self.replicas.topology
        self.totals = {
            topology.device(replica): self._put(np.zeros(TOTALS, np.float32), replica)
            for replica in self.replicas.states
            if topology.stage_of[replica] == 0
        }

    def first_input(self, operation: Operation, batch: Batch) -> jax.Array:
        """The tokens of a microbatch, on its data node, which keeps its targets."""
        targets = self.nodes[operation.node].targets
        targets[operation.microbatch] = self._put(batch["targets"], operation.node)
        return self._put(marked_tokens(batch), operation.node)

    def _dispatch(self, operation: Operation, value: jax.Array) -> tuple[Any, jax.Array]:
        kind, microbatch, node = operation
        topology = self.replicas.topology
        own, state = self.nodes[node], self._state(node)
        functions = state.functions
        if kind == "F":
            result, own.saved[microbatch], own.gauge = functions.forward(
                state.parameters, own.gauge, value, self.shares[topology.stage_of[node]]
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
            )
        else:
            result, state.gradients, own.gauge = functions.backward(
                state.parameters, state.gradients, own.gauge, own.saved.pop(microbatch), value
            )
        return result, own.gauge


class HeldOutOperations(Operations):
    """Forward through every stage, and the loss at the end.

    Attributes:
        losses: of each microbatch: the sum of its token losses [nats], and its target tokens.
    """

    def __init__(self, replicas: Replicas, activation: jax.ShapeDtypeStruct):
        """Activations travel as they are: they are for the loss of the model as it is."""
        super().__init__(replicas, activation, None)
        self.targets: dict[int, jax.Array] = {}
        self.losses: dict[int, jax.Array] = {}

    def first_input(self, operation: Operation, batch: Batch) -> jax.Array:
        """The tokens of a microbatch, on its data node, which keeps its targets."""
        self.targets[operation.microbatch] = self._put(batch["targets"], operation.node)
        return self._put(marked_tokens(batch), operation.node)

    def _dispatch(self, operation: Operation, value: jax.Array) -> tuple[Any, jax.Array]:
        kind, microbatch, node = operation
        state = self._state(node)
        if kind == "F":
            result = state.functions.predict(state.parameters, value)
            return result, result
        targets = self.targets.pop(microbatch)
        loss = state.functions.held_out(state.parameters, value, targets)
        self.losses[microbatch] = loss
        return None, loss
