"""Reconstruction of lost stages from their sources, see `Generation.remade`.

Every host that serves a lost stage rebuilds it from the same numbers by the same operations, so the
replicas are equal bit by bit. With `buddy` the state is that of a buddy checkpoint on a host of
another stage. With `skip` it is that of the last checkpoint, read by one host, for a stage that was
bypassed. With `average` (CheckFree, arXiv 2506.15461) the parameters of stage i are

    W_i = (a W_(i+1) + b W_(i-1)) / (a + b)

where a and b are the norms of the gradients of the blocks of stages i + 1 and i - 1 at the last
step, over all replicas and before clipping; the optimizer's moments are zero. In all cases the
optimizer's update counter is that of the other stages, so that all stages learn at one rate.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import PyTree

from skippipe_jax.config.cluster import AVERAGE
from skippipe_jax.consensus.generations import RebuiltStage
from skippipe_jax.runtime.state import Kept, StateTree
from skippipe_jax.runtime.state_copy import Copy, pieces, unpacked

# Chunks of a buddy checkpoint that is sent whole, while the links are idle.
REBUILD_CHUNK_BYTES = 1 << 26


@dataclass(frozen=True)
class RecoverySources:
    """Sources of this host for lost stages, beside the states of its replicas.

    Attributes:
        copies: states of stages that this host keeps as a buddy, or has read from a checkpoint.
        squared_norms: squared norms of the gradients of each stage's blocks at the last step; None
            if unknown.
        updates: number of updates that the optimizer has made; None if unknown.
    """

    copies: Collection[Copy] = field(default=(), compare=False)
    squared_norms: tuple[float, ...] | None = None
    updates: int | None = None


NO_RECOVERY_SOURCES = RecoverySources()


def source_shapes(made: RebuiltStage, shapes: StateTree) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of the arrays that a source sends for a stage with these `shapes`."""
    if made.by == AVERAGE:
        return jax.tree.leaves(shapes["parameters"]["blocks"])
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(dict(shapes)))
    return [
        jax.ShapeDtypeStruct((piece.stop - piece.start,), np.uint8)
        for piece in pieces(size, REBUILD_CHUNK_BYTES)
    ]


def source_arrays(
    made: RebuiltStage, number: int, kept: Kept, remains: RecoverySources
) -> list[np.ndarray]:
    """Return the arrays of a host that is source `number` of a stage."""
    if made.by == AVERAGE:
        stage = made.stage + (-1, 1)[number]
        states = [state for (of, _), state in kept.items() if of == stage]
        return [np.asarray(leaf) for leaf in jax.tree.leaves(states[0].parameters["blocks"])]
    name = made.stage, made.step
    [copy] = [copy for copy in remains.copies if copy.name == name]
    return [copy.state[piece] for piece in pieces(len(copy.state), REBUILD_CHUNK_BYTES)]


def rebuilt(
    made: RebuiltStage,
    shapes: StateTree,
    sources: Sequence[Sequence[np.ndarray]],
    remains: RecoverySources,
) -> StateTree:
    """Rebuild a stage with these `shapes` from the arrays of each of its sources."""
    assert remains.updates is not None, "a source without an update count"
    if made.by == AVERAGE:
        norms, stage = remains.squared_norms, made.stage
        weights = (1.0, 1.0) if norms is None else (norms[stage - 1], norms[stage + 1])
        return averaged_stage(shapes, sources, weights, remains.updates)
    state = unpacked(np.concatenate(sources[0]), dict(shapes))
    counted = with_count(state["optimizer_state"], remains.updates)
    return {**state, "optimizer_state": counted}


def averaged_stage(
    shapes: StateTree,
    neighbors: Sequence[Sequence[np.ndarray]],
    squared_norms: tuple[float, float],
    updates: int,
) -> StateTree:
    """Average two stages into the stage between them, by the formula above, in float32.

    `neighbors` are the arrays of the blocks of the previous and the next stage. If both norms are
    zero, or one is not finite, both stages have equal weights.
    """
    before, after = (np.sqrt(np.float32(squared)) for squared in squared_norms)
    total = before + after
    if not (np.isfinite(total) and total > 0):
        before = after = np.float32(1)
        total = before + after
    likes, structure = jax.tree.flatten(shapes["parameters"]["blocks"])
    means = [
        ((after * two.astype(np.float32) + before * one.astype(np.float32)) / total).astype(like)
        for one, two, like in zip(*neighbors, [like.dtype for like in likes], strict=True)
    ]
    zeros = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), shapes["optimizer_state"])
    return {
        "parameters": {**shapes["parameters"], "blocks": structure.unflatten(means)},
        "optimizer_state": with_count(zeros, updates),
    }


def with_count(optimizer_state: PyTree, updates: int) -> PyTree:
    """Return an optimizer's state with its counters set to `updates`; the moments stay."""
    return jax.tree.map(
        lambda leaf: (
            np.full(leaf.shape, updates, leaf.dtype)
            if np.issubdtype(leaf.dtype, np.integer)
            else leaf
        ),
        optimizer_state,
    )
