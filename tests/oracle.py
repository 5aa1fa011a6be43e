"""The one-device program that decides whether training is right.

It knows nothing of nodes, transfers or programs: it calls the stages of the model in the order of
each path and lets `jax.grad` differentiate the mean over all target tokens of an iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from skippipe_jax.data import Batch
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
    layers = model.layers_of_stages(stages)
    modules = [create_stage(model, s, layers, jax.random.key(seed)) for s in range(stages)]
    structures = [nnx.graphdef(module) for module in modules]
    parameters = [nnx.to_pure_dict(nnx.state(module)) for module in modules]
    transformation = optax.chain(
        optax.clip_by_global_norm(optimizer.clip_norm), adamw(optimizer, steps or len(iterations))
    )
    step = jax.jit(_step(structures, stage_paths, transformation))
    state = transformation.init(parameters)
    losses = []
    for batches in iterations:
        tokens = jnp.stack([batch["tokens"] for batch in batches])
        targets = jnp.stack([batch["targets"] for batch in batches])
        parameters, state, loss = step(parameters, state, tokens, targets)
        losses.append(float(loss))
    return parameters, losses


def _step(structures: Sequence[Any], stage_paths: Sequence[Sequence[int]], transformation: Any):
    def loss(parameters: list[Any], tokens: jax.Array, targets: jax.Array) -> jax.Array:
        nats, count = 0.0, 0.0
        for microbatch, stages in enumerate(stage_paths):
            modules = {s: nnx.merge(structures[s], parameters[s]) for s in stages}
            x = tokens[microbatch]
            for stage in stages:
                x = modules[stage](x)
            more_nats, more_tokens = modules[stages[0]].loss(x, targets[microbatch])
            nats, count = nats + more_nats, count + more_tokens
        return nats / count

    def step(parameters: list[Any], state: Any, tokens: jax.Array, targets: jax.Array):
        value, gradients = jax.value_and_grad(loss)(parameters, tokens, targets)
        updates, state = transformation.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    return step


def relative_error(tree: Any, expected: Any) -> float:
    """The largest over the arrays of ||tree - expected|| / ||expected||."""

    def error(array: Any, truth: Any) -> float:
        truth = np.asarray(truth, np.float64)
        return float(np.linalg.norm(np.asarray(array, np.float64) - truth) / np.linalg.norm(truth))

    return max(jax.tree.leaves(jax.tree.map(error, tree, expected)))
