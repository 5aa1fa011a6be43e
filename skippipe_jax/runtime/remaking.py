"""A stage that nobody holds any more is made anew by those who serve it, see `Generation.remade`.

Every host that serves it makes its own, from the same numbers by the same operations, so replicas
are equal bit by bit. By `buddy` the state is that of a copy that a host of another stage has kept,
by `skip` of one that a host has read from the last checkpoint, for a stage that was left out.
By `average` (CheckFree, arXiv 2506.15461) the parameters of stage i are

    W_i = (a W_(i+1) + b W_(i-1)) / (a + b)

where a and b are the norms of the gradients of the blocks of stages i + 1 and i - 1 at the last
step, over all replicas and before clipping; the optimizer's moments are zero. In all ways the
optimizer counts as many updates as it does elsewhere, so that all stages learn at one rate.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from skippipe_jax.cluster.group import Group
from skippipe_jax.config.cluster import AVERAGE
from skippipe_jax.consensus.generations import Remade
from skippipe_jax.program.hops import Hop, HopNumbers
from skippipe_jax.runtime.copied import Copy, pieces, unpacked
from skippipe_jax.runtime.handover import arrived
from skippipe_jax.runtime.state import Kept, Origin, State
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.runtime.transport import HostLink

# Of a copy that is given whole, while nothing else is sent.
PIECE_BYTES = 1 << 26


@dataclass(frozen=True)
class Remains:
    """What hosts have, beside the states that they hold, to make a stage from that is lost.

    Attributes:
        copies: those of stages of others that this host keeps, or has read for others.
        squared_norms: of the gradients of each stage's blocks at the last step; None if unknown.
        updates: how many the optimizer has made; None if unknown.
    """

    copies: Collection[Copy] = field(default=(), compare=False)
    squared_norms: tuple[float, ...] | None = None
    updates: int | None = None


NO_REMAINS = Remains()


class Gift(NamedTuple):
    """What a source has of a stage that is made anew goes to a host that serves it.

    `number` says which of the sources it comes from; hosts are counted as their group does.
    """

    made: Remade
    number: int
    source: int
    target: int
    hops: tuple[Hop, ...]


class Remaking:
    """Makes the stages anew that a group has lost. All of its hosts make the same one."""

    def __init__(
        self,
        topology: Topology,
        group: Group,
        shapes: Sequence[State],
        numbers: HopNumbers,
        kept: Kept,
        remains: Remains,
    ):
        """Begin with states that are `kept` here, and what `remains`, for these `shapes`.

        Transfers take their numbers from `numbers`.
        """
        self.topology, self.group, self.shapes = topology, group, shapes
        self.kept, self.remains = kept, remains
        self.gifts = tuple(self._planned(numbers))

    def _planned(self, numbers: HopNumbers) -> Iterator[Gift]:
        host_of, place = self.topology.host_of, self.group.hosts.index
        for made in self.group.generation.remade:
            targets = {host_of[node]: node for node in self.topology.plan.stages[made.stage]}
            for target, node in targets.items():
                for number, source in enumerate(map(place, made.sources)):
                    first = self.topology.first_nodes[source]
                    count = 0 if source == target else len(self._shapes(made))
                    hops = tuple(Hop(taken, first, node) for taken in numbers.take(count))
                    yield Gift(made, number, source, target, hops)

    def _shapes(self, made: Remade) -> list[jax.ShapeDtypeStruct]:
        """Return what a source gives for a stage, array by array."""
        shapes = self.shapes[made.stage]
        if made.by == AVERAGE:
            return jax.tree.leaves(shapes["parameters"]["blocks"])
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(dict(shapes)))
        return [
            jax.ShapeDtypeStruct((piece.stop - piece.start,), np.uint8)
            for piece in pieces(size, PIECE_BYTES)
        ]

    def _own(self, gift: Gift) -> list[np.ndarray]:
        """Return what this host has for a stage, array by array."""
        made = gift.made
        if made.by == AVERAGE:
            stage = made.stage + (-1, 1)[gift.number]
            states = [state for (of, _), state in self.kept.items() if of == stage]
            return [np.asarray(leaf) for leaf in jax.tree.leaves(states[0].parameters["blocks"])]
        name = made.stage, made.step
        [copy] = [copy for copy in self.remains.copies if copy.name == name]
        return [copy.state[piece] for piece in pieces(len(copy.state), PIECE_BYTES)]

    def give(self, links: Mapping[int, HostLink]) -> None:
        """Offer what others make stages from; it must not be donated before they have it."""
        for gift in self.gifts:
            if self.topology.host == gift.source and gift.hops:
                here = self.topology.spread(gift.hops[0].source).first
                for hop, array in zip(gift.hops, self._own(gift), strict=True):
                    links[gift.target].send(hop, 0, jax.device_put(array, here))

    def origin(self, links: Mapping[int, HostLink], others: Origin | None) -> Origin:
        """Return the state of each stage made anew here; that of `others` has its own origin.

        Raises:
            GenerationEnded: when it is asked and the group ends before all is there.
        """

        def make(stage: int, shapes: State) -> State:
            own = [gift for gift in self.gifts if gift.made.stage == stage]
            if not own:
                assert others is not None, "a host that goes on holds its stages"
                return others(stage, shapes)
            given = [self._taken(gift, links) for gift in own if gift.target == self.topology.host]
            assert self.remains.updates is not None, "known to whoever has a source"
            if own[0].made.by == AVERAGE:
                norms = self.remains.squared_norms
                weights = (1.0, 1.0) if norms is None else (norms[stage - 1], norms[stage + 1])
                return averaged(shapes, given, weights, self.remains.updates)
            state = unpacked(np.concatenate(given[0]), dict(shapes))
            counted = with_count(state["optimizer_state"], self.remains.updates)
            return {**state, "optimizer_state": counted}

        return make

    def _taken(self, gift: Gift, links: Mapping[int, HostLink]) -> list[np.ndarray]:
        if gift.source == gift.target:
            return self._own(gift)
        asked = zip(gift.hops, self._shapes(gift.made), strict=True)
        arrays = [links[gift.source].receive(hop, 0, like) for hop, like in asked]
        return [np.asarray(array) for array in arrived(arrays, self.group)]


def averaged(
    shapes: State,
    beside: Sequence[Sequence[np.ndarray]],
    squared_norms: tuple[float, float],
    updates: int,
) -> State:
    """Average two stages into the one between them, by the formula above, in float32.

    `beside` are the arrays of the blocks of the stage before and of the one after. Where the norms
    are both zero, or one is no finite number, both stages count alike.
    """
    before, after = (np.sqrt(np.float32(squared)) for squared in squared_norms)
    whole = before + after
    if not (np.isfinite(whole) and whole > 0):
        before = after = np.float32(1)
        whole = before + after
    likes, structure = jax.tree.flatten(shapes["parameters"]["blocks"])
    means = [
        ((after * two.astype(np.float32) + before * one.astype(np.float32)) / whole).astype(like)
        for one, two, like in zip(*beside, [like.dtype for like in likes], strict=True)
    ]
    zeros = jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), shapes["optimizer_state"])
    return {
        "parameters": {**shapes["parameters"], "blocks": structure.unflatten(means)},
        "optimizer_state": with_count(zeros, updates),
    }


def with_count(optimizer_state: PyTree, updates: int) -> PyTree:
    """Set the counters of an optimizer's state to so many updates; its moments stay."""
    return jax.tree.map(
        lambda leaf: (
            np.full(leaf.shape, updates, leaf.dtype)
            if np.issubdtype(leaf.dtype, np.integer)
            else leaf
        ),
        optimizer_state,
    )
