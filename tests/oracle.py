"""The one-device program that decides whether training is right.

It knows nothing of nodes, transfers or programs: it calls the stages of the model in the order of
each path and lets `jax.grad` differentiate the mean over all target tokens of an iteration.
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
    step = _step(structures, stage_paths, transformation, optimizer)
    state = transformation.init(parameters)
    losses = []
    for batches in iterations:
        parameters, state, loss = step(parameters, state, batches)
        losses.append(float(loss))
    return parameters, losses


def _step(
    structures: Sequence[Any],
    stage_paths: Sequence[Sequence[int]],
    transformation: Any,
    optimizer: OptimizerConfig,
):
    @functools.partial(jax.jit, static_argnums=0)
    def apply(structure: Any, parameters: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(structure, parameters)(x)

    @functools.partial(jax.jit, static_argnums=0)
    def loss_of(structure: Any, parameters: Any, x: jax.Array, targets: jax.Array):
        return nnx.merge(structure, parameters).loss(x, targets)

    @functools.partial(jax.jit, static_argnums=0)
    def squared_log_z(structure: Any, parameters: Any, x: jax.Array, targets: jax.Array):
        z = jnp.exp(nnx.merge(structure, parameters).logits(x)).sum(axis=-1)
        return jnp.sum(jnp.log(z) ** 2 * (targets >= 0))

    def loss(parameters: list[Any], batches: Sequence[Batch]) -> tuple[jax.Array, jax.Array]:
        """What is minimised, and the part of it that is reported as the loss."""
        nats = tokens = squares = jnp.zeros(())
        for stages, batch in zip(stage_paths, batches, strict=True):
            x = batch["tokens"]
            for stage in stages:
                x = apply(structures[stage], parameters[stage], x)
            own = loss_of(structures[0], parameters[0], x, batch["targets"])
            nats, tokens = nats + own[0], tokens + own[1]
            if optimizer.z_loss:
                squares += squared_log_z(structures[0], parameters[0], x, batch["targets"])
        return (nats + optimizer.z_loss * squares) / tokens, nats / tokens

    @jax.jit
    def update(parameters: list[Any], state: Any, gradients: list[Any]):
        updates, state = transformation.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    def step(parameters: list[Any], state: Any, batches: Sequence[Batch]):
        gradients, value = jax.grad(loss, has_aux=True)(parameters, batches)
        norm, bound = float(optax.tree.norm(gradients)), optimizer.skip_above_norm
        # Not `norm > bound`, which NaN is not.
        if bound is not None and not norm <= bound:
            return parameters, state, value
        return *update(parameters, state, gradients), value

    return step


def relative_error(tree: Any, expected: Any) -> float:
    """The largest over the arrays of ||tree - expected|| / ||expected||."""

    def error(array: Any, truth: Any) -> float:
        truth = np.asarray(truth, np.float64)
        return float(np.linalg.norm(np.asarray(array, np.float64) - truth) / np.linalg.norm(truth))

    return max(jax.tree.leaves(jax.tree.map(error, tree, expected)))
