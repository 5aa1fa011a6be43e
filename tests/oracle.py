"""The one-device program that decides whether training is right.

It knows nothing of nodes, transfers or programs: it calls the stages of the model in the order of
each path and lets `jax.grad` differentiate the mean over all target tokens of an iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from skippipe_jax.data import Batch
from skippipe_jax.model import ModelConfig, create_stage
from skippipe_jax.optimizer import OptimizerConfig, adamw


@dataclass(frozen=True)
class Move:
    """From here on, stages of so many layers, and microbatches that visit these stages in order."""

    layers: Sequence[int]
    stage_paths: Sequence[Sequence[int]]
    iterations: Sequence[Sequence[Batch]]


def train(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    stage_paths: Sequence[Sequence[int]],
    stages: int,
    iterations: Sequence[Sequence[Batch]],
    seed: int,
    steps: int | None = None,
    moves: Sequence[Move] = (),
) -> tuple[list[Any], list[float]]:
    """Parameters of every stage after the iterations, and the loss of each iteration.

    `stage_paths[m]` are the stages that microbatch m visits in order, `iterations[i][m]` its batch
    in iteration i. After these iterations training goes on as each of the `moves` says.
    """

    def modules(layers: Sequence[int]) -> list[Any]:
        key = jax.random.key(seed)
        return [create_stage(model, stage, layers, key) for stage in range(len(layers))]

    layers = model.layers_of_stages(stages)
    parameters = [nnx.to_pure_dict(nnx.state(module)) for module in modules(layers)]
    transformation = optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm), adamw(optimizer, steps or len(iterations))
    )
    state = transformation.init(parameters)
    losses = []
    for move in (Move(layers, stage_paths, iterations), *moves):
        parameters, state = cut((parameters, state), move.layers)
        structures = [nnx.graphdef(module) for module in modules(move.layers)]
        step = _step(structures, move.stage_paths, transformation)
        for batches in move.iterations:
            parameters, state, loss = step(parameters, state, batches)
            losses.append(float(loss))
    return parameters, losses


def cut(tree: Any, layers: Sequence[int]) -> Any:
    """A tree in which each list holds the stages of one model, cut into stages of other sizes."""
    return jax.tree.map(
        lambda node: _cut(node, layers) if isinstance(node, list) else node,
        tree,
        is_leaf=lambda node: isinstance(node, list),
    )


def _cut(stages: list[Any], layers: Sequence[int]) -> list[Any]:
    blocks = jax.tree.map(lambda *own: np.concatenate(own), *(stage["blocks"] for stage in stages))
    ends = np.cumsum(layers)
    parts = [
        {"blocks": jax.tree.map(lambda rows, end=end, n=n: rows[end - n : end], blocks)}
        for end, n in zip(ends, layers, strict=True)
    ]
    return [stages[0] | parts[0], *parts[1:]]


def _step(structures: Sequence[Any], stage_paths: Sequence[Sequence[int]], transformation: Any):
    @functools.partial(jax.jit, static_argnums=0)
    def apply(structure: Any, parameters: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(structure, parameters)(x)

    @functools.partial(jax.jit, static_argnums=0)
    def loss_of(structure: Any, parameters: Any, x: jax.Array, targets: jax.Array):
        return nnx.merge(structure, parameters).loss(x, targets)

    def loss(parameters: list[Any], batches: Sequence[Batch]) -> jax.Array:
        nats = tokens = jnp.zeros(())
        for stages, batch in zip(stage_paths, batches, strict=True):
            x = batch["tokens"]
            for stage in stages:
                x = apply(structures[stage], parameters[stage], x)
            own = loss_of(structures[0], parameters[0], x, batch["targets"])
            nats, tokens = nats + own[0], tokens + own[1]
        return nats / tokens

    @jax.jit
    def update(parameters: list[Any], state: Any, gradients: list[Any]):
        updates, state = transformation.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    def step(parameters: list[Any], state: Any, batches: Sequence[Batch]):
        value, gradients = jax.value_and_grad(loss)(parameters, batches)
        return *update(parameters, state, gradients), value

    return step


def relative_error(tree: Any, expected: Any) -> float:
    """The largest over the arrays of ||tree - expected|| / ||expected||."""

    def error(array: Any, truth: Any) -> float:
        truth = np.asarray(truth, np.float64)
        return float(np.linalg.norm(np.asarray(array, np.float64) - truth) / np.linalg.norm(truth))

    return max(jax.tree.leaves(jax.tree.map(error, tree, expected)))
