"""The one-device program that decides whether training with `averaging.mode: outer` is right.

It follows every replica's own trajectory: a microbatch runs, under `jax.grad`, with the parameters
of the nodes on its path, and every node takes steps of its own. What replicas send each other and
apply is written here in NumPy, array by array, from the formulas of docs/training.md alone: it
shares no line with `skippipe_jax.optim.outer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from skippipe_jax.config import AveragingConfig, ModelConfig, OptimizerConfig
from skippipe_jax.data.batches import Batch
from skippipe_jax.optim.update_rule import update_rule
from tests.harness import oracle

Recorded = Callable[[int, int, int], np.ndarray]
"""(iteration, stage, replica) -> the message that it has sent at the end of the iteration, which is
taken in place of what the oracle would have quantised"""
Arrays = dict[str, np.ndarray]
GROUP, LARGEST = 128, 127


@dataclass(frozen=True)
class Trained:
    """What comes out: `parameters` of every node, `outer` ones of every stage, and the `losses`.

    A loss is the mean over all target tokens of an iteration.
    """

    parameters: list[Any]
    outer: list[Any]
    losses: list[float]


def train(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    averaging: AveragingConfig,
    stages: Sequence[Sequence[int]],
    microbatches: Sequence[Sequence[int]],
    iterations: Sequence[Sequence[Batch]],
    seed: int,
    steps: int,
    *,
    recorded: Recorded | None = None,
) -> Trained:
    """Train with `stages[s]` as the nodes of stage s, and `microbatches[m]` a path over nodes."""
    layers = model.stage_partition(len(stages))
    stage_of = {node: stage for stage, nodes in enumerate(stages) for node in nodes}
    structures, first = oracle.created(model, tuple(layers), seed)
    gradient = jax.grad(oracle._loss(structures, stage_of, optimizer), has_aux=True)
    parameters: list[Any] = [first[stage_of[node]] for node in range(len(stage_of))]
    inner = Inner(optimizer, steps, stages, parameters)
    averaged: dict[int, Formulas] = {}
    losses = []
    for iteration, batches in enumerate(iterations, start=1):
        unpacked = [oracle.one_by_one(batch) for batch in batches]
        # Of the mean over all targets: each replica's own is of those that have visited it.
        gradients, value = jax.device_get(gradient(parameters, unpacked, microbatches))
        losses.append(float(value))
        if iteration <= averaging.exact_steps:
            parameters = inner.step_together(parameters, gradients)
            continue
        targets = [int(np.sum(batch["targets"] >= 0)) for batch in unpacked]
        visited = [
            sum(count for count, path in zip(targets, microbatches, strict=True) if node in path)
            for node in range(len(stage_of))
        ]
        if iteration == averaging.exact_steps + 1:
            for stage, nodes in enumerate(stages):
                if len(nodes) > 1:
                    own = [parameters[node] for node in nodes]
                    averaged[stage] = Formulas(
                        averaging, layers[stage], own, _of_stage(recorded, stage)
                    )
        parameters = inner.step_apart(parameters, gradients, visited, sum(targets))
        for stage, own in averaged.items():
            after = own.end(iteration, [parameters[node] for node in stages[stage]])
            for node, tree in zip(stages[stage], after, strict=True):
                parameters[node] = tree
    outer = [
        averaged[stage].outer() if stage in averaged else parameters[nodes[0]]
        for stage, nodes in enumerate(stages)
    ]
    return Trained(parameters, outer, losses)


def _of_stage(recorded: Recorded | None, stage: int) -> Callable[[int, int], np.ndarray] | None:
    if recorded is None:
        return None
    return lambda iteration, replica: recorded(iteration, stage, replica)


class Inner:
    """The steps of AdamW that nodes take, each with moments of its own."""

    def __init__(
        self,
        optimizer: OptimizerConfig,
        steps: int,
        stages: Sequence[Sequence[int]],
        parameters: list[Any],
    ):
        self.optimizer = optimizer
        self.stages = stages
        transformation = update_rule(optimizer, steps)

        @jax.jit
        def update(gradient: Any, state: Any, before: Any) -> tuple[Any, Any]:
            updates, state = transformation.update(gradient, state, before)
            return optax.apply_updates(before, updates), state

        self.update = update
        self.states = [transformation.init(own) for own in parameters]
        sizes = [sum(leaf.size for leaf in jax.tree.leaves(own)) for own in parameters]
        of_model = sum(sizes[nodes[0]] for nodes in stages)
        self.shares = [size / of_model for size in sizes]

    def step_together(self, parameters: list[Any], gradients: list[Any]) -> list[Any]:
        """As in mode exact: by the sum over the replicas, within the norm over all stages."""
        sums = [
            jax.tree.map(lambda *own: sum(own), *(gradients[node] for node in nodes))
            for nodes in self.stages
        ]
        norm = oracle.norm_of(sums)
        after = list(parameters)
        for nodes, own in zip(self.stages, sums, strict=True):
            for node in nodes:
                after[node] = self._stepped(node, parameters[node], own, norm, 1.0)
        return after

    def step_apart(
        self, parameters: list[Any], gradients: list[Any], visited: Sequence[int], targets: int
    ) -> list[Any]:
        """By its own gradient of the mean over the targets that have visited it, if any."""
        after = list(parameters)
        for node, count in enumerate(visited):
            if count == 0:
                continue
            own = jax.tree.map(lambda leaf: leaf * (targets / count), gradients[node])  # noqa: B023
            share = self.shares[node] ** 0.5
            norm = oracle.norm_of(own)
            after[node] = self._stepped(node, parameters[node], own, norm, share)
        return after

    def _stepped(self, node: int, before: Any, gradient: Any, norm: float, share: float) -> Any:
        """By a gradient of this norm, whose bounds are this share of those in the configuration."""
        bound = self.optimizer.skip_above_norm
        # Not `norm > bound`, which NaN is not.
        if bound is not None and not norm <= bound * share:
            return before
        if self.optimizer.clip_norm is not None and norm > self.optimizer.clip_norm * share:
            factor = self.optimizer.clip_norm * share / norm
            gradient = jax.tree.map(lambda leaf: leaf * factor, gradient)
        after, self.states[node] = self.update(gradient, self.states[node], before)
        return after


class Formulas:
    """The averaging of one stage as docs/training.md has it, in NumPy."""

    def __init__(
        self,
        averaging: AveragingConfig,
        layers: int,
        replicas: list[Any],
        recorded: Callable[[int, int], np.ndarray] | None = None,
    ):
        self.averaging = averaging
        self.layers = layers
        self.recorded = recorded
        self.structure = jax.tree.structure(replicas[0])
        self.anchor = named(replicas[0])
        self.momentum = {name: np.zeros_like(own) for name, own in self.anchor.items()}
        self.residuals = [
            {name: np.zeros_like(own) for name, own in self.anchor.items()} for _ in replicas
        ]
        # By fragment: what each replica had when it was sent, and what each has sent.
        self.under_way: dict[int, list[tuple[Arrays, Arrays]]] = {}

    def end(self, iteration: int, replicas: list[Any]) -> list[Any]:
        """Send and apply what is due at the end of an iteration: the parameters after it."""
        parameters = [named(own) for own in replicas]
        for fragment in range(self.averaging.fragments):
            if self._is_sent(fragment, iteration):
                self.under_way[fragment] = [
                    self._sent(fragment, iteration, replica, own)
                    for replica, own in enumerate(parameters)
                ]
            if self._is_sent(fragment, iteration - self.averaging.delay):
                self._apply(fragment, parameters)
        return [self._tree(own) for own in parameters]

    def outer(self) -> Any:
        """The outer parameters."""
        return self._tree(self.anchor)

    def _is_sent(self, fragment: int, iteration: int) -> bool:
        every = self.averaging.every
        offset = (fragment + 1) * every // self.averaging.fragments
        since = iteration - self.averaging.exact_steps
        return since > 0 and (since - offset) % every == 0

    def _places(self, fragment: int) -> dict[str, np.ndarray]:
        """Which numbers of each array belong to a fragment, in the order of a message."""
        fragments = self.averaging.fragments
        found = {}
        for name, array in self.anchor.items():
            belongs = np.zeros(array.shape, bool)
            if name.startswith("blocks/"):
                of_block = np.arange(self.layers) * fragments // self.layers
                belongs[of_block == fragment] = True
            else:
                belongs[...] = fragment == (0 if name == "embedding" else fragments - 1)
            if belongs.any():
                found[name] = belongs
        return found

    def _sent(
        self, fragment: int, iteration: int, replica: int, parameters: Arrays
    ) -> tuple[Arrays, Arrays]:
        places, residual = self._places(fragment), self.residuals[replica]
        had = {name: parameters[name][place] for name, place in places.items()}
        changes = {
            name: self.anchor[name][place] - had[name] + residual[name][place]
            for name, place in places.items()
        }
        if self.recorded is None:
            dtype = self.averaging.dtype
            sent = {name: rounded(change, dtype) for name, change in changes.items()}
        else:
            message = self.recorded(iteration, replica)
            sizes = {name: change.size for name, change in changes.items()}
            sent = read(message, sizes, self.averaging.dtype)
        for name, place in places.items():
            residual[name][place] = changes[name] - sent[name]
        return had, sent

    def _apply(self, fragment: int, parameters: list[Arrays]) -> None:
        rate, mu = np.float32(self.averaging.rate), np.float32(self.averaging.momentum)
        of_replicas = self.under_way.pop(fragment)
        for name, place in self._places(fragment).items():
            total = np.zeros(int(place.sum()), np.float32)
            for _, sent in of_replicas:
                total = total + sent[name]
            change = total / np.float32(len(of_replicas))
            momentum = mu * self.momentum[name][place] + change
            anchor = self.anchor[name][place] - rate * (change + mu * momentum)
            self.momentum[name][place], self.anchor[name][place] = momentum, anchor
            for own, (had, _) in zip(parameters, of_replicas, strict=True):
                if self.averaging.delay == 0:
                    own[name][place] = anchor
                else:
                    own[name][place] = own[name][place] + (anchor - had[name])

    def _tree(self, arrays: Arrays) -> Any:
        return self.structure.unflatten(jnp.asarray(own) for own in arrays.values())


def named(tree: Any) -> Arrays:
    """Copies of a tree's arrays, by name, in the order of its leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.array(leaf, np.float32)
        for path, leaf in leaves
    }


def rounded(change: np.ndarray, dtype: str) -> np.ndarray:
    """What is left of a change, one after another, that has travelled in a dtype."""
    if dtype != "int8":
        return change.astype(jnp.dtype(dtype)).astype(np.float32)
    groups = np.pad(change, (0, -change.size % GROUP)).reshape(-1, GROUP)
    scales = np.abs(groups).max(axis=1, keepdims=True) / np.float32(LARGEST)
    scales[scales < np.finfo(np.float32).tiny] = 0.0
    multiples = np.rint(groups / np.where(scales == 0.0, np.float32(1.0), scales))
    return (np.clip(multiples, -LARGEST, LARGEST) * scales).ravel()[: change.size]


def read(message: np.ndarray, sizes: dict[str, int], dtype: str) -> Arrays:
    """The changes in a message that was sent, which has so many numbers for each name."""
    found, begin = {}, 0
    for name, size in sizes.items():
        found[name] = message[begin : begin + size].astype(np.float32)
        begin += size
    if dtype == "int8":
        scales = message[begin:].copy().view(np.float32)
        for name, numbers in found.items():
            own, scales = np.split(scales, [-(-numbers.size // GROUP)])
            found[name] = numbers * np.repeat(own, GROUP)[: numbers.size]
    return found
