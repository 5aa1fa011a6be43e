"""The one-device program that decides whether training is right.

It knows nothing of nodes, transfers or programs: it calls the stages of the model in the order of
each path and lets `jax.grad` differentiate the mean over all target tokens of an iteration. Nor
does it know of packing: documents that share a sequence are run one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from skippipe_jax.config import ModelConfig, OptimizerConfig
from skippipe_jax.data.batches import IGNORED_TARGET, Batch
from skippipe_jax.models.llama import create_stage
from skippipe_jax.optim.update_rule import update_rule


@dataclass(frozen=True)
class Phase:
    """Iterations with stages of so many layers, and microbatches that visit stages in this order.

    `stage_paths[m]` are the stages that microbatch m visits, `iterations[i][m]` its batch in
    iteration i of the phase.
    """

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
) -> tuple[list[Any], list[float]]:
    """Parameters of every stage after the iterations, and the loss of each iteration.

    `stage_paths[m]` are the stages that microbatch m visits in order, `iterations[i][m]` its batch
    in iteration i.
    """
    phase = Phase(model.stage_partition(stages), stage_paths, iterations)
    return train_by(model, optimizer, [phase], seed, steps or len(iterations))


def train_by(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    phases: Sequence[Phase],
    seed: int,
    steps: int,
) -> tuple[list[Any], list[float]]:
    """The same over several phases, with the stages of the last one."""
    _, parameters = created(model, tuple(phases[0].layers), seed)
    transformation = clipped_rule(optimizer, steps)
    state = transformation.init(parameters)
    losses = []
    step_of_cut: dict[tuple[int, ...], Any] = {}
    for phase in phases:
        layers = tuple(phase.layers)
        if layers not in step_of_cut:
            structures, _ = created(model, layers, seed)
            loss = _loss(structures, range(len(layers)), optimizer)
            step_of_cut[layers] = _step(loss, transformation, optimizer)
        parameters, state = cut((parameters, state), layers)
        for batches in phase.iterations:
            unpacked = [one_by_one(batch) for batch in batches]
            parameters, state, value = step_of_cut[layers](
                parameters, state, unpacked, phase.stage_paths
            )
            losses.append(float(value))
    return parameters, losses


@functools.cache
def created(model: ModelConfig, layers: tuple[int, ...], seed: int) -> tuple[list[Any], list[Any]]:
    """The structure of each stage of so many layers, and its first parameters."""
    key = jax.random.key(seed)
    modules = [create_stage(model, stage, layers, key) for stage in range(len(layers))]
    first = [nnx.to_pure_dict(nnx.state(module)) for module in modules]
    return [nnx.graphdef(module) for module in modules], jax.device_get(first)


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


def _loss(
    structures: Sequence[Any],
    stage_of: Mapping[int, int] | Sequence[int],
    optimizer: OptimizerConfig,
):
    """Parameters, batches and paths of an iteration -> what is minimised, and what is reported.

    There are parameters at every place that a path visits, and place p holds stage `stage_of[p]`.
    """

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

    def loss(
        parameters: list[Any], batches: Sequence[Batch], paths: Sequence[Sequence[int]]
    ) -> tuple[jax.Array, jax.Array]:
        nats = tokens = squares = jnp.zeros(())
        for path, batch in zip(paths, batches, strict=True):
            x = batch["tokens"]
            for place in path:
                x = apply(structures[stage_of[place]], parameters[place], x)
            first = parameters[path[0]]
            own = loss_of(structures[0], first, x, batch["targets"])
            nats, tokens = nats + own[0], tokens + own[1]
            if optimizer.z_loss:
                squares += squared_log_z(structures[0], first, x, batch["targets"])
        return (nats + optimizer.z_loss * squares) / tokens, nats / tokens

    return loss


def _step(loss: Callable[..., Any], transformation: Any, optimizer: OptimizerConfig):
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
        gradients, value = jax.grad(loss, has_aux=True)(parameters, batches, stage_paths)
        # Without a target there is no loss, which is NaN then, and nothing to learn.
        if not any((batch["targets"] >= 0).any() for batch in batches):
            return parameters, state, value
        bound = optimizer.skip_above_norm
        # Not `norm > bound`, which NaN is not.
        if bound is not None and not norm_of(gradients) <= bound:
            return parameters, state, value
        return *update(parameters, state, gradients), value

    return step


def norm_of(gradients: Any) -> float:
    """The norm of all numbers of a tree, by NumPy, which compiles nothing for each shape."""
    return float(np.sqrt(sum(np.vdot(leaf, leaf) for leaf in jax.tree.leaves(gradients))))


def clipped_rule(optimizer: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The update of a whole model, clipped by Optax if it is clipped."""
    rule = update_rule(optimizer, steps)
    if optimizer.clip_norm is None:
        return rule
    return optax.chain(optax.clip_by_global_norm(optimizer.clip_norm), rule)


def one_by_one(batch: Batch) -> Batch:
    """The same documents, each at the start of a row of its own.

    There are as many rows as there could be documents, so that all such batches have one shape.
    """
    if "begins" not in batch:
        return batch
    tokens = np.zeros((batch["tokens"].size, batch["tokens"].shape[1]), np.int32)
    targets = np.full_like(tokens, IGNORED_TARGET)
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
