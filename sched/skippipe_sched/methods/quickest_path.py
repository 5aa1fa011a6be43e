"""A*: the quickest round trip of one microbatch under constraints, as if it were alone."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, pairwise

import numpy as np

from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import NodePath, microbatch_chain, stage_of_nodes
from skippipe_sched.problem.rules import sequence_problem
from skippipe_sched.search.budget import Placement

# A* opens so many successors in the time of one operation simulated.
SUCCESSORS_PER_OPERATION = 2
# How much longer than the quickest a path may be for every conflict fewer.
EXTRA = 0.5
# Successors that A* opens before it gives up finding a path under an agent's constraints.
MOST_SUCCESSORS = 100_000
# How much the way still to go counts in A*: paths are at most so many times the quickest, and found
# without opening all beginnings that are about as good.
HASTE = 1.2
# Replicas of a stage that A* goes on to from a node: so many, those that promise most.
MOST_REPLICAS = 16

# The beginning of a path in A*: seconds that the whole trip promises to take, a number to break
# ties, seconds so far, the nodes, and their stages.
_Beginning = tuple[float, int, float, NodePath, tuple[int, ...]]


@dataclass(frozen=True)
class Constraint:
    """What an agent may not do: visit these nodes, between these times if they are given [s]."""

    nodes: frozenset[int]
    start_s: float = 0.0
    end_s: float = float("inf")


class QuickestPath:
    """The tables of a case on a placement; `spend` is told of work done, in operations."""

    def __init__(self, case: Case, stages: Placement, spend: Callable[[float], None]):
        """Reckon the tables."""
        self.case = case
        self.stages = stages
        self.spend = spend
        self.stage_of = np.array(stage_of_nodes(stages))
        self.visit_s = np.array(
            [
                case.duration("F", node, stage) + case.duration("B", node, stage)
                for node, stage in enumerate(self.stage_of)
            ]
        )
        self.round_trip_s = case.round_trip_s
        self.forward_s = self._onward(back=False)
        self.back_s = self._onward(back=True)
        self.alone_s = cache(self._alone)
        self.following = cache(self._following)

    def _onward(self, back: bool) -> np.ndarray:
        """[node, node] seconds there and back; infinite where no path goes that step."""
        rules = self.case.rules
        step = self.stage_of[None, :] - self.stage_of[:, None]
        if back:
            allowed = (step < 0) & (step >= -min(rules.max_swap_distance, len(self.stages)))
        else:
            allowed = (step > 0) & (step <= 1 + min(rules.max_jump, len(self.stages)))
        return np.where(allowed & (self.stage_of > 0), self.round_trip_s, np.inf)

    def _to_go(self, data_node: int, step_s: np.ndarray) -> np.ndarray:
        """[stages left, steps back left, node]: the least seconds on and back to the data node.

        It knows nothing of the stages visited before, so it is never too much.
        """
        steps_back = min(self.case.rules.max_swaps, self.case.path_length)
        shape = (self.case.path_length, steps_back + 1, len(step_s))
        to_go_s = np.broadcast_to(self.round_trip_s[:, data_node], shape).copy()
        for left in range(1, len(to_go_s)):
            for back in range(steps_back + 1):
                onward_s = self.forward_s + (step_s + to_go_s[left - 1, back])
                to_go_s[left, back] = onward_s.min(axis=1)
                if back:
                    onward_s = self.back_s + (step_s + to_go_s[left - 1, back - 1])
                    to_go_s[left, back] = np.minimum(to_go_s[left, back], onward_s.min(axis=1))
        return to_go_s

    def _alone(self, data_node: int) -> float:
        """About the quickest round trip that begins at a data node [s]."""
        return float(self._to_go(data_node, self.visit_s)[-1, -1, data_node])

    def _following(self, visited: tuple[int, ...]) -> tuple[int, ...]:
        """The stages that may come after these (CC1, CC2) without leaving too few for the rest."""
        rules, last = self.case.rules, len(self.stages) - 1
        stages = []
        for stage in range(1, last + 1):
            longer = (*visited, stage)
            if sequence_problem(longer, rules) is not None:
                continue
            swaps = sum(s < max(longer[:i]) for i, s in enumerate(longer) if i)
            # Every further visit is to a higher stage or is a swap.
            if self.case.path_length - len(longer) <= last - max(longer) + rules.max_swaps - swaps:
                stages.append(stage)
        return tuple(stages)

    def find(
        self,
        data_node: int,
        constraints: Sequence[Constraint],
        crowding: np.ndarray,
        start_s: float,
    ) -> NodePath | None:
        """A*: the quickest round trip that keeps the constraints; conflicts count as time."""
        length = self.case.path_length
        step_s = self.visit_s + EXTRA * self.alone_s(data_node) * crowding
        for constraint in constraints:
            if constraint.end_s == np.inf:
                step_s[list(constraint.nodes)] = np.inf
        timed = [constraint for constraint in constraints if constraint.end_s < np.inf]
        to_go_s = self._to_go(data_node, step_s)
        ties = count()
        heap: list[_Beginning] = [(0.0, next(ties), 0.0, (data_node,), (0,))]
        opened: set[tuple[int, frozenset[int], int]] = set()
        left = MOST_SUCCESSORS
        while heap and left > 0:
            _, _, so_far_s, path, visited = heapq.heappop(heap)
            if len(path) == length:
                if not self._meets(path, timed, start_s):
                    return path
                continue
            # Another, longer way to the same node through the same stages leads nowhere better,
            # unless it matters when it comes there.
            here, stages_left = path[-1], length - len(path) - 1
            state = (here, frozenset(visited), sum(a > b for a, b in pairwise(visited)))
            if not timed and state in opened:
                continue
            opened.add(state)
            for stage in self.following(visited):
                longer_visited = (*visited, stage)
                back = to_go_s.shape[1] - 1 - sum(a > b for a, b in pairwise(longer_visited))
                nodes = np.array(self.stages[stage])
                longer_s = so_far_s + self.round_trip_s[here, nodes] + step_s[nodes]
                total_s = longer_s + HASTE * to_go_s[stages_left, back, nodes]
                promising = np.argsort(total_s, kind="stable")[:MOST_REPLICAS]
                left -= len(promising)
                self.spend(len(promising) / SUCCESSORS_PER_OPERATION)
                for replica in promising[total_s[promising] < np.inf]:
                    longer_path = (*path, int(nodes[replica]))
                    longer: _Beginning = (
                        float(total_s[replica]),
                        next(ties),
                        float(longer_s[replica]),
                        longer_path,
                        longer_visited,
                    )
                    heapq.heappush(heap, longer)
        return None

    def _meets(self, path: NodePath, constraints: Sequence[Constraint], start_s: float) -> bool:
        """Whether a path, alone and begun at `start_s`, wants a node when it may not have it."""
        now = start_s
        before = path[0]
        for operation in microbatch_chain(0, path):
            node = operation.node
            now += self.case.hop_duration(operation.kind, before, node)
            end_s = now + self.case.duration(operation.kind, node, self.stage_of[node])
            for constraint in constraints:
                if (
                    node in constraint.nodes
                    and now < constraint.end_s
                    and end_s > constraint.start_s
                ):
                    return True
            now, before = end_s, node
        return False
