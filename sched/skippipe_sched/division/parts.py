"""The case of some of the nodes of a whole one, for one expert that these train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from skippipe_sched.division.lanes import Training
from skippipe_sched.errors import InputError
from skippipe_sched.problem.auto import DEFAULT_SKIP_RATIO, candidates
from skippipe_sched.problem.case import AUTO, Case, parse_case
from skippipe_sched.problem.fewer_nodes import with_nodes

# What a node keeps of its stage's parameters, in their own number: beside them their gradients and
# the two moments of an optimizer.
STATE_COPIES = 4


@dataclass(frozen=True)
class Cut:
    """How the model of a lane lies on its nodes.

    `merged` neighbouring stages of the whole case are one stage here, of which each has as many
    nodes as `sizes` says, the data stage first.
    """

    merged: int
    sizes: tuple[int, ...]
    path_length: int

    @property
    def nodes(self) -> int:
        """How many it needs."""
        return sum(self.sizes)

    @property
    def model(self) -> tuple[int, int]:
        """Return what paths depend on: how many stages are merged, and how many a path visits."""
        return self.merged, self.path_length


class Whole:
    """A case to take parts of, and how its stages may be merged in them.

    A part has the links between its nodes, all the whole's microbatches in an iteration, and the
    same share of stages skipped. Where few nodes take part, neighbouring stages become one, so that
    the model stays whole: a merged stage costs and averages what its stages do together, a node
    that holds it has room for so many times fewer microbatches, and the rules of paths (CC2) allow
    no more of the model to be passed over or swapped than before.
    """

    def __init__(self, source: Mapping[str, Any], folder: Path = Path()):
        """Read a case as YAML gives it; `folder` is where its link table would lie.

        Raises:
            InputError: for what `candidates` refuses, or stages that are left out.
        """
        if "left_out" in source:
            problem = "is for a run that has lost nodes, and what is divided has lost none"
            raise InputError("case.left_out", source["left_out"], problem, "Remove this key")
        self.case: Case = candidates(dict(source), folder)[0]
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
        self._cuts: dict[tuple[int, int], tuple[Cut, ...]] = {}

    @cached_property
    def merges(self) -> tuple[int, ...]:
        """How many neighbouring stages may be one: 1 first, and what fits the nodes' memory."""
        return tuple(
            merged for merged in range(1, len(self.case.stages) + 1) if self._is_possible(merged)
        )

    def _is_possible(self, merged: int) -> bool:
        if merged == 1:
            return True
        lengths = len(self.case.stages), 0 if self.skip_ratio else self.case.path_length
        if any(length % merged for length in lengths) or not self._has_room(merged):
            return False
        # No path over so few stages may skip what it has to.
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
        """Of a lane: one for each stage."""
        return len(self.case.stages) // self.merges[-1]

    def can_cut(self, nodes: int, merged: int) -> bool:
        """Tell whether `cuts` has some."""
        if nodes * merged < len(self.case.stages):
            return False
        try:
            return bool(self.cuts(nodes, merged))
        except InputError:
            return False

    def cuts(self, nodes: int, merged: int) -> tuple[Cut, ...]:
        """List how so many nodes may share stages, the most promising cut first (`candidates`).

        Raises:
            InputError: for what `candidates` refuses.
        """
        if (nodes, merged) in self._cuts:
            return self._cuts[nodes, merged]
        stages = len(self.case.stages) // merged
        open_case = self._source(range(nodes), merged, Training("any", 1))
        open_case |= {"stages": AUTO, "stage_count": stages}
        if self.skip_ratio is not None:
            open_case |= {"path_length": AUTO, "skip_ratio": self.skip_ratio}
        cuts = [Cut(merged, case.stages, case.path_length) for case in candidates(open_case)]
        self._cuts[nodes, merged] = tuple(cuts)
        return self._cuts[nodes, merged]

    def part(self, nodes: Sequence[int], cut: Cut, training: Training) -> Case:
        """Make the case of these nodes by this cut: its node k is the k-th of `nodes`."""
        return parse_case(
            self._source(nodes, cut.merged, training)
            | {"stages": list(cut.sizes), "path_length": cut.path_length}
        )

    def _source(self, nodes: Sequence[int], merged: int, training: Training) -> dict[str, Any]:
        """Describe a part as YAML does, all but its sizes."""
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
    """Sum up so many neighbours each."""
    return tuple(sum(values[start : start + size]) for start in range(0, len(values), size))
