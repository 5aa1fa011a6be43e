"""The one-device program that decides whether training is right.

It knows nothing of nodes, transfers or programs: it calls the stages of the model in the order of
each path and lets `jax.grad` differentiate the mean over all target tokens of an iteration. Nor
does it know of packing: documents that share a sequence are run one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from skippipe_jax.data import NOT_COUNTED, Batch
from skippipe_jax.model import ModelConfig, create_stage
from skippipe_jax.optimizer import OptimizerConfig, adamw


def train(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    stage_paths: Sequence[Sequence[int]],
    stages: int,
    iterations: Sequence[Sequence[Batch]],
    seed: int,
    steps: int | None = None,
) -> tuple[list[Any], list[float]]:
    """Parameters of every stage after the iterations, and the loss of each iteration.

    `stage_paths[m]` are the stages that microbatch m visits in order, `iterations[i][m]` its batch
    in iteration i.
    """
    every = [stage_paths] * len(iterations)
    return train_by(model, optimizer, every, stages, iterations, seed, steps)


def train_by(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    paths_of_iterations: Sequence[Sequence[Sequence[int]]],
    stages: int,
    iterations: Sequence[Sequence[Batch]],
    seed: int,
    steps: int | None = None,
    scaled: bool = False,
) -> tuple[list[Any], list[float]]:
    """The same with paths of its own for each iteration.

    If `scaled`, what a stage adds is divided by the share of the microbatches that visit it.
    """
    layers = model.layers_of_stages(stages)
    modules = [create_stage(model, s, layers, jax.random.key(seed)) for s in range(stages)]
    structures = [nnx.graphdef(module) for module in modules]
    parameters = [nnx.to_pure_dict(nnx.state(module)) for module in modules]
    transformation = optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm), adamw(optimizer, steps or len(iterations))
    )
    step = _step(structures, transformation, scaled)
    state = transformation.init(parameters)
    losses = []
    for batches, stage_paths in zip(iterations, paths_of_iterations, strict=True):
        unpacked = [one_by_one(batch) for batch in batches]
        parameters, state, loss = step(parameters, state, unpacked, stage_paths)
        losses.append(float(loss))
    return parameters, losses


def _step(structures: Sequence[Any], transformation: Any, scaled: bool):
    @functools.partial(jax.jit, static_argnums=0)
    def apply(structure: Any, parameters: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(structure, parameters)(x)

    @functools.partial(jax.jit, static_argnums=0)
    def loss_of(structure: Any, parameters: Any, x: jax.Array, targets: jax.Array):
        return nnx.merge(structure, parameters).loss(x, targets)

    def loss(
        parameters: list[Any], batches: Sequence[Batch], stage_paths: Sequence[Sequence[int]]
    ) -> jax.Array:
        nats = tokens = jnp.zeros(())
        for stages, batch in zip(stage_paths, batches, strict=True):
            x = batch["tokens"]
            for stage in stages:
                before, x = x, apply(structures[stage], parameters[stage], x)
                if scaled and stage > 0:
                    visits = sum(stage in path for path in stage_paths)
                    x = before + (x - before) / (visits / len(stage_paths))
            own = loss_of(structures[0], parameters[0], x, batch["targets"])
            nats, tokens = nats + own[0], tokens + own[1]
        return nats / tokens

    @jax.jit
    def update(parameters: list[Any], state: Any, gradients: list[Any]):
        updates, state = transformation.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    def step(
        parameters: list[Any],
        state: Any,
        batches: Sequence[Batch],
        stage_paths: Sequence[Sequence[int]],
    ):
        value, gradients = jax.value_and_grad(loss)(parameters, batches, stage_paths)
        return *update(parameters, state, gradients), value

    return step


def one_by_one(batch: Batch) -> Batch:
    """The same documents, each at the start of a row of its own.

    There are as many rows as there could be documents, so that all such batches have one shape.
    """
    if "begins" not in batch:
        return batch
    tokens = np.zeros((batch["tokens"].size, batch["tokens"].shape[1]), np.int32)
    targets = np.full_like(tokens, NOT_COUNTED)
    row = 0
    for own_tokens, own_targets, begins in zip(
        batch["tokens"], batch["targets"], batch["begins"], strict=True
    ):
        # What comes before the first mark, if anything, is a document too.
        begin_at = np.flatnonzero(begins[1:]) + 1
        for document, counted in zip(
            np.split(own_tokens, begin_at), np.split(own_targets, begin_at), strict=True
        ):
            tokens[row, : len(document)], targets[row, : len(document)] = document, counted
            row += 1
    return {"tokens": tokens, "targets": targets}


def relative_error(tree: Any, expected: Any) -> float:
    """The largest over the arrays of ||tree - expected|| / ||expected||."""

    def error(array: Any, truth: Any) -> float:
        truth = np.asarray(truth, np.float64)
        return float(np.linalg.norm(np.asarray(array, np.float64) - truth) / np.linalg.norm(truth))

    return max(jax.tree.leaves(jax.tree.map(error, tree, expected)))
