"""Local updates: each replica follows its own gradients, and now and then they average parameters.

With `recipe.average_parameters_every: N` the replicas of a stage exchange no gradients (local SGD,
Stich 2019). What training means then, exactly:

- Every node is a replica with parameters and moments of its own, whatever devices and hosts there
  are, and a microbatch runs with those of the nodes on its path.
- The gradient of a replica is that of the iteration's loss (the mean over all target tokens) by its
  own parameters, times the number of replicas of its stage. So the mean over the replicas is what
  they would average every iteration. A replica that no microbatch visits has the gradient zero, and
  is updated by it like the others: all make the same number of steps of the schedule.
- The gradient's norm, for clipping and `optimizer.skip_above_norm`, is root(sum over the stages of
  the mean over the stage's replicas of the squared norms). All replicas clip, or skip, alike.
- After the update of every N-th iteration, made or skipped, the replicas of a stage all have the
  mean of their parameters and of Adam's moments, taken in float32, bit for bit the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree


def numbers(state: PyTree) -> list[Array]:
    """The numbers of a stage's state in float32, without the counters; some are its own arrays."""
    leaves = jax.tree.leaves(state)
    return [leaf.astype(jnp.float32) for leaf in leaves if _is_number(leaf)]


def with_mean(state: PyTree, summed: Sequence[Array], replicas: int) -> PyTree:
    """The state with the mean of its `numbers`, from their sum over so many replicas."""
    leaves, structure = jax.tree.flatten(state)
    dtypes = tuple(leaf.dtype for leaf in leaves if _is_number(leaf))
    means = iter(_means(list(summed), np.float32(replicas), dtypes))
    return structure.unflatten(next(means) if _is_number(leaf) else leaf for leaf in leaves)


def _is_number(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


@functools.partial(jax.jit, static_argnums=2)
def _means(
    summed: list[Array], replicas: Float[Array, ""], dtypes: tuple[jnp.dtype, ...]
) -> list[Array]:
    # Not donated: replicas that share a device share the sum.
    return [(leaf / replicas).astype(dtype) for leaf, dtype in zip(summed, dtypes, strict=True)]
