"""Buddy checkpoints as bytes: packing of a stage's state, its pieces, and their routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import PyTree, UInt8
from skippipe_sched.problem.plan import Plan

from skippipe_jax.config import Config
from skippipe_jax.config.cluster import BUDDY
from skippipe_jax.models.footprint import buddy_checkpoint_bytes
from skippipe_jax.program.compiler import Hop

Bytes = UInt8[np.ndarray, " bytes"]

# The amount that a server copies at a time: larger pieces would only delay activations longer.
COPY_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Copy:
    """State of a stage after a step, in the memory of this host."""

    stage: int
    step: int
    state: Bytes

    @property
    def name(self) -> tuple[int, int]:
        """Stage and step, which identify the copy."""
        return self.stage, self.step


def packed(state: PyTree) -> Bytes:
    """Pack all arrays of a state into bytes, with at most one additional array in memory."""
    leaves = jax.tree.leaves(state)
    whole, start = np.empty(sum(leaf.nbytes for leaf in leaves), np.uint8), 0
    for leaf in leaves:
        own = np.ascontiguousarray(_fetched(leaf)).reshape(-1).view(np.uint8)
        whole[start : start + own.size] = own
        start += own.size
    return whole


def _fetched(leaf: jax.Array | np.ndarray) -> np.ndarray:
    """Fetch an array from its devices, without JAX's cache, which lives as long as the array."""
    if isinstance(leaf, np.ndarray):
        return leaf
    parts = [shard.data for shard in leaf.addressable_shards]
    return np.asarray(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts))


def unpacked(packed_bytes: Bytes, shapes: PyTree) -> PyTree:
    """Restore a state of these shapes from its bytes."""
    leaves, structure = jax.tree.flatten(shapes)
    ends = np.cumsum([leaf.size * leaf.dtype.itemsize for leaf in leaves])
    assert ends[-1] == len(packed_bytes), "the bytes do not match these shapes"
    parts = np.split(packed_bytes, ends[:-1])
    return structure.unflatten(
        part.view(leaf.dtype).reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)
    )


def pieces(size: int, of: int | None = None) -> Iterator[slice]:
    """Cut `size` bytes into pieces of `of` bytes, by default `COPY_CHUNK_BYTES`."""
    of = COPY_CHUNK_BYTES if of is None else of
    return (slice(start, min(start + of, size)) for start in range(0, size, of))


@dataclass(frozen=True)
class CopyRoute:
    """Route of the copies of a stage: from its first replica to a node of its buddy."""

    stage: int
    size: int
    source: int
    target: int
    hops: tuple[Hop, ...]

    def part(self, turn: int, every: int) -> Iterator[tuple[Hop, slice]]:
        """Return the pieces that are sent in iteration `turn` of `every`, and their hops."""
        length = -(-self.size // every)
        begin = min(turn * length, self.size)
        here = pieces(min(length, self.size - begin))
        return (
            (hop, slice(begin + piece.start, begin + piece.stop))
            for hop, piece in zip(self.hops, here, strict=False)
        )


def copy_routes(
    config: Config,
    plan: Plan,
    host_of: Sequence[int],
    replicas: Sequence[Sequence[int]],
) -> Iterator[CopyRoute]:
    """Yield the routes of all stages with a buddy.

    A stage that all hosts serve has no buddy.
    """
    if config.recovery.lost_stage != BUDDY:
        return
    for stage, size in enumerate(buddy_checkpoint_bytes(config, len(plan.stages))):
        serving = {host_of[node] for node in plan.stages[stage]}
        further = (*plan.stages[stage + 1 :], *plan.stages[:stage])
        target = next(
            (node for nodes in further for node in nodes if host_of[node] not in serving), None
        )
        if target is not None:
            source = replicas[stage][0]
            in_a_turn = len([*pieces(-(-size // config.recovery.buddy_every))])
            names = (f"copy of stage {stage}: {piece}" for piece in range(in_a_turn))
            hops = tuple(Hop(name, source, target) for name in names)
            yield CopyRoute(stage, size, source, target, hops)
