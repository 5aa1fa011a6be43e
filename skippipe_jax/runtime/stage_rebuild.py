"""Reconstruction of lost stages by the hosts that serve them, see `Generation.remade`.

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

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jaxtyping import PyTree

from skippipe_jax.cluster.membership import Group
from skippipe_jax.config.cluster import AVERAGE
from skippipe_jax.consensus.generations import RebuiltStage
from skippipe_jax.program.hops import Hop, HopNumbers
from skippipe_jax.runtime.copied import Copy, pieces, unpacked
from skippipe_jax.runtime.state import Kept, Origin, State
from skippipe_jax.runtime.state_transfer import ArrayTransfer
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.runtime.transport import HostLink

# Chunks of a buddy checkpoint that is sent whole, while the links are idle.
PIECE_BYTES = 1 << 26


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


@dataclass(frozen=True)
class SourceTransfer(ArrayTransfer):
    """Transfer from a source of a rebuilt stage to a host that serves the stage.

    `number` is the index of the source in `made.sources`.
    """

    made: RebuiltStage
    number: int


class StageRebuild:
    """Reconstruction of the lost stages of a group; equal on all of its hosts."""

    def __init__(
        self,
        topology: Topology,
        group: Group,
        shapes: Sequence[State],
        numbers: HopNumbers,
        kept: Kept,
        remains: RecoverySources,
    ):
        """Plan the transfers, with hops from `numbers`.

        `kept` and `remains` are the sources on this host; `shapes` are those of each stage's state.
        """
        self.topology, self.group, self.shapes = topology, group, shapes
        self.kept, self.remains = kept, remains
        self.transfers = tuple(self._planned(numbers))

    def _planned(self, numbers: HopNumbers) -> Iterator[SourceTransfer]:
        host_of, place = self.topology.host_of, self.group.hosts.index
        for made in self.group.generation.remade:
            targets = {host_of[node]: node for node in self.topology.plan.stages[made.stage]}
            for target, node in targets.items():
                for number, source in enumerate(map(place, made.sources)):
                    first = self.topology.first_nodes[source]
                    count = 0 if source == target else len(self._shapes(made))
                    hops = tuple(Hop(taken, first, node) for taken in numbers.take(count))
                    yield SourceTransfer(source, target, hops, made, number)

    def _shapes(self, made: RebuiltStage) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the arrays that a source sends for a stage."""
        shapes = self.shapes[made.stage]
        if made.by == AVERAGE:
            return jax.tree.leaves(shapes["parameters"]["blocks"])
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(dict(shapes)))
        return [
            jax.ShapeDtypeStruct((piece.stop - piece.start,), np.uint8)
            for piece in pieces(size, PIECE_BYTES)
        ]

    def _local_arrays(self, transfer: SourceTransfer) -> list[np.ndarray]:
        """Return the arrays that this host sends, or uses, for a stage."""
        made = transfer.made
        if made.by == AVERAGE:
            stage = made.stage + (-1, 1)[transfer.number]
            states = [state for (of, _), state in self.kept.items() if of == stage]
            return [np.asarray(leaf) for leaf in jax.tree.leaves(states[0].parameters["blocks"])]
        name = made.stage, made.step
        [copy] = [copy for copy in self.remains.copies if copy.name == name]
        return [copy.state[piece] for piece in pieces(len(copy.state), PIECE_BYTES)]

    def give(self, links: Mapping[int, HostLink]) -> None:
        """Offer the arrays that other hosts need; they must not be donated before the transfer."""
        for transfer in self.transfers:
            if self.topology.host == transfer.source and transfer.hops:
                here = self.topology.spread(transfer.hops[0].source).first
                arrays = self._local_arrays(transfer)
                transfer.send(links, (jax.device_put(array, here) for array in arrays))

    def origin(self, links: Mapping[int, HostLink], others: Origin | None) -> Origin:
        """Return the origin of the stages rebuilt here; other stages come from origin `others`.

        Raises:
            GenerationEnded: when the origin is called, if the group ends before all has arrived.
        """

        def make(stage: int, shapes: State) -> State:
            own = [transfer for transfer in self.transfers if transfer.made.stage == stage]
            if not own:
                assert others is not None, "a remaining host lacks the state of its stage"
                return others(stage, shapes)
            received = [
                self._received(transfer, links)
                for transfer in own
                if transfer.target == self.topology.host
            ]
            assert self.remains.updates is not None, "a source without an update count"
            if own[0].made.by == AVERAGE:
                norms = self.remains.squared_norms
                weights = (1.0, 1.0) if norms is None else (norms[stage - 1], norms[stage + 1])
                return averaged(shapes, received, weights, self.remains.updates)
            state = unpacked(np.concatenate(received[0]), dict(shapes))
            counted = with_count(state["optimizer_state"], self.remains.updates)
            return {**state, "optimizer_state": counted}

        return make

    def _received(
        self, transfer: SourceTransfer, links: Mapping[int, HostLink]
    ) -> list[np.ndarray]:
        if transfer.source == transfer.target:
            return self._local_arrays(transfer)
        here = self.topology.spread(transfer.hops[0].target)
        return transfer.receive(links, self._shapes(transfer.made), here, self.group)


def averaged(
    shapes: State,
    neighbors: Sequence[Sequence[np.ndarray]],
    squared_norms: tuple[float, float],
    updates: int,
) -> State:
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
