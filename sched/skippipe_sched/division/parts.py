"""Parts of a whole case: some of its nodes, for one expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from jaxtyping import Int

from skippipe_sched.division.lanes import LaneTraining
from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import AUTO, Case, parse_case
from skippipe_sched.problem.node_subset import with_nodes
from skippipe_sched.problem.open_case import DEFAULT_SKIP_RATIO, candidates

# Copies of its stage's parameters that a node stores: parameters, gradients and the two moments of
# an optimizer.
STATE_COPIES = 4


@dataclass(frozen=True)
class LaneCut:
    """Partition of a lane's model over its nodes.

    `merged` neighboring stages of the whole case form one stage; `sizes` are the numbers of nodes
    of these stages, the data stage first.
    """

    merged: int
    sizes: tuple[int, ...]
    path_length: int

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(self.sizes)

    @property
    def model(self) -> tuple[int, int]:
        """Values on which paths depend: the number of merged stages, and the path length."""
        return self.merged, self.path_length


@dataclass(frozen=True)
class LanePlacement:
    """Nodes of a lane in the order of their stages, and its cut."""

    cut: LaneCut
    nodes: tuple[int, ...]

    @property
    def local(self) -> Int[np.ndarray, " nodes"]:
        """Number of each of `nodes` in the lane's own case, whose nodes are in ascending order."""
        return np.searchsorted(np.sort(self.nodes), self.nodes)

    def stage(self, number: int) -> slice:
        """Return the position of a stage's nodes in `nodes`."""
        start = sum(self.cut.sizes[:number])
        return slice(start, start + self.cut.sizes[number])

    def moved(self, node: int, target: int) -> LanePlacement:
        """Return a copy with a node on another stage."""
        stages = [
            [own for own in self.nodes[self.stage(stage)] if own != node]
            for stage in range(len(self.cut.sizes))
        ]
        stages[target].append(node)
        sizes = tuple(map(len, stages))
        return LanePlacement(replace(self.cut, sizes=sizes), tuple(chain.from_iterable(stages)))


Layout = tuple[LanePlacement, ...]
"""Places of all lanes."""


class Whole:
    """A case to take parts of, and the ways in which its stages may be merged in them.

    A part has the links between its nodes, all the whole's microbatches in an iteration, and the
    same share of skipped stages. For few nodes, neighboring stages are merged so that the model
    stays whole: a merged stage has the cost and averaged bytes of its stages together, a node that
    holds it has memory for proportionally fewer microbatches, and the rules of paths (CC2) allow no
    more of the model to be skipped or swapped than before.
    """

    def __init__(self, source: Mapping[str, Any]):
        """Read a case given as a mapping, in which its link table is no file.

        Raises:
            InputError: as `candidates` does, or for stages that are left out.
        """
        if "left_out" in source:
            problem = "applies only to a run that has lost nodes"
            raise InputError("case.left_out", source["left_out"], problem, "Remove this key")
        self.case: Case = candidates(dict(source))[0]
        self.skip_ratio: Any = None
        if source.get("path_length") == AUTO:
            self.skip_ratio = source.get("skip_ratio", list(DEFAULT_SKIP_RATIO))
        nodes = range(len(self.case.nodes))
        alone = with_nodes(self.case, nodes, self.case.stages, self.case.microbatches)
        self.described: list[dict[str, Any]] = alone.source["nodes"]
        self.source: dict[str, Any] = {
            key: value
            for key, value in alone.source.items()
            if key not in ("skip_ratio", "microbatches_per_data_node")
        } | {"microbatches": sum(self.case.microbatches)}
        self.cuts = cache(self._cuts)

    @cached_property
    def merges(self) -> tuple[int, ...]:
        """Numbers of stages that may be merged: 1 first, then those that fit the nodes' memory."""
        return tuple(
            merged for merged in range(1, len(self.case.stages) + 1) if self._is_possible(merged)
        )

    def _is_possible(self, merged: int) -> bool:
        if merged == 1:
            return True
        lengths = len(self.case.stages), 0 if self.skip_ratio else self.case.path_length
        if any(length % merged for length in lengths) or not self._has_room(merged):
            return False
        # A path over so few stages cannot skip the required share.
        return self.can_cut(len(self.case.stages) // merged, merged)

    def _has_room(self, merged: int) -> bool:
        state_bytes = STATE_COPIES * max(_in_groups(self.case.stage_bytes, merged))
        return all(
            node.memory >= merged
            and (
                node.memory_bytes is None
                or node.memory_bytes * prod(node.mesh or (1,)) >= state_bytes
            )
            for node in self.case.nodes
        )

    @property
    def fewest_nodes(self) -> int:
        """Least number of nodes of a lane: one for each stage."""
        return len(self.case.stages) // self.merges[-1]

    def can_cut(self, nodes: int, merged: int) -> bool:
        """Return whether `cuts` finds any."""
        if nodes * merged < len(self.case.stages):
            return False
        try:
            return bool(self.cuts(nodes, merged))
        except InputError:
            return False

    def _cuts(self, nodes: int, merged: int) -> tuple[LaneCut, ...]:
        """List the cuts over this number of nodes, the most promising first (`candidates`).

        Raises:
            InputError: as `candidates` does.
        """
        stages = len(self.case.stages) // merged
        open_case = self._source(range(nodes), merged, LaneTraining("any", 1))
        open_case |= {"stages": AUTO, "stage_count": stages}
        if self.skip_ratio is not None:
            open_case |= {"path_length": AUTO, "skip_ratio": self.skip_ratio}
        return tuple(
            LaneCut(merged, case.stages, case.path_length) for case in candidates(open_case)
        )

    def part(self, nodes: Sequence[int], cut: LaneCut, training: LaneTraining) -> Case:
        """Make the case of these nodes with this cut: its node k is the k-th of `nodes`."""
        return parse_case(
            self._source(nodes, cut.merged, training)
            | {"stages": list(cut.sizes), "path_length": cut.path_length}
        )

    def _source(self, nodes: Sequence[int], merged: int, training: LaneTraining) -> dict[str, Any]:
        """Return a part as a mapping in the form of YAML, without its sizes."""
        case, rules = self.case, self.case.rules
        described = [
            own
            | {"forward_s": own["forward_s"] * training.compute, "memory": own["memory"] // merged}
            for own in (self.described[node] for node in nodes)
        ]
        distance = rules.max_swap_distance // merged
        return self.source | {
            "nodes": described,
            "stage_cost": list(_in_groups(case.stage_cost, merged)),
            "stage_bytes": [size * training.bytes for size in _in_groups(case.stage_bytes, merged)],
            "path_length": max(1, case.path_length // merged),
            "rules": {
                "max_swaps": rules.max_swaps if distance else 0,
                "max_swap_distance": max(1, distance),
                "max_jump": rules.max_jump // merged,
            },
        }


def _in_groups(values: Sequence[float], size: int) -> tuple[float, ...]:
    """Sum each group of `size` neighbors."""
    return tuple(sum(values[start : start + size]) for start in range(0, len(values), size))
