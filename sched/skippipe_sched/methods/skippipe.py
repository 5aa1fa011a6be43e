"""SkipPipe's own path search: conflict-based, with microbatches as agents (arXiv 2502.19913).

On a fixed placement (DT-FM's) every agent takes the fastest path found by A*, as if it were alone.
Where agents exceed a limit, one of them gets a constraint and is planned again; the others keep
their paths. The kinds of conflict, in the order in which they are resolved:

- CC3: a stage has more than its share of the visits; the constraint forbids the stage.
- TC1: a replica has more than its share of its stage's; the constraint forbids the node.
- TC2: microbatches meet on a node; the constraint forbids the node during those seconds.

At first one agent stands for all microbatches of a data node, as in the paper, then each microbatch
is an agent. An optimal search would open a tree that grows exponentially with the agents, so
slightly longer paths with fewer conflicts are accepted (`EXTRA`), few children are opened at each
conflict (`BRANCHES`), and a tree may be given up (`EXPANSIONS_PER_AGENT`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, pairwise, repeat

import numpy as np

from skippipe_sched.methods import dtfm
from skippipe_sched.methods.dtfm_skip import random_paths
from skippipe_sched.methods.full import matched
from skippipe_sched.methods.routes import Routes, data_node_of_microbatches
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import NodePath, microbatch_chain, stage_of_nodes
from skippipe_sched.problem.rules import sequence_problem, share_limits
from skippipe_sched.search.budget import Placement, Search
from skippipe_sched.timing.simulate import simulate
from skippipe_sched.timing.timeline import TimedOperation, Timeline

PLACEMENT_SHARE = 0.3
PATHS_SHARE = 0.6
# With TC2: share of the work on paths that searches for solutions without regard to meetings.
FIRST_PATHS_SHARE = 0.3
# Work is counted in simulated operations.
OPERATIONS_PER_SECOND = 40_000
# Additional cost of planning one agent again, in the same unit.
OPERATIONS_PER_AGENT = 5
# Number of failed trees after which the microbatches of a data node are planned separately.
TREES_TOGETHER = 5
# Agents that are tried with a constraint at a conflict.
BRANCHES = 3
# Conflicts per agent that are examined in one tree before it is given up.
EXPANSIONS_PER_AGENT = 40
# The slowest data node decides; this weight of the mean guides the search.
WEIGHT_OF_MEAN = 0.1
# Successors that A* opens in the time of one simulated operation.
SUCCESSORS_PER_OPERATION = 2
# Extra length that a path may have for every conflict fewer, relative to the fastest.
EXTRA = 0.5
# Successors that A* opens before it gives up finding a path under an agent's constraints.
MOST_SUCCESSORS = 100_000
# Weight of the remaining distance in A*: paths are at most this many times the fastest, and are
# found without opening all beginnings of similar cost.
HASTE = 1.2
# Limit on the replicas of a stage that A* continues to from a node, the most promising first.
MOST_REPLICAS = 16

# The beginning of a path in A*: estimated seconds of the whole trip, a number to break ties,
# seconds so far, the nodes, and their stages.
_Beginning = tuple[float, int, float, NodePath, tuple[int, ...]]


@dataclass(frozen=True)
class Constraint:
    """Forbidden visits of an agent: to these nodes, between these times if given [s]."""

    nodes: frozenset[int]
    start_s: float = 0.0
    end_s: float = float("inf")


@dataclass(frozen=True)
class _Agent:
    """Microbatches of one data node that take one path."""

    data_node: int
    microbatches: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Solution:
    """A node of the constraint tree: a path for every agent, and the constraints behind them.

    `visits` are the numbers of microbatches that visit each node.
    """

    agents: tuple[_Agent, ...]
    paths: tuple[NodePath, ...]
    constraints: tuple[tuple[Constraint, ...], ...]
    visits: np.ndarray


def routes(case: Case, search: Search, *, meetings: bool = True) -> Routes:
    """Search for paths with all three kinds of conflict; the simulator selects the best.

    Without `meetings` (TC2), microbatches are planned as if they never met: the paper's ablation.

    Raises:
        InputError: if under `case.rules` no paths visit the inner stages equally often.
    """
    stages = dtfm.place(case, search, PLACEMENT_SHARE)
    # Whatever the search finds in its time, these paths keep the rules.
    paths = matched(case, stages, random_paths(case, stages, search.random))
    if case.path_length > 1:
        paths = _PathSearch(case, stages, search, meetings).best_paths(paths)
    return Routes(stages, paths)


class _PathSearch:
    """Path search on a placement: tables of the case, and the remaining work."""

    def __init__(self, case: Case, stages: Placement, search: Search, meetings: bool):
        self.case = case
        self.stages = stages
        self.search = search
        self.meetings = meetings
        self.work_left = search.steps(PATHS_SHARE * OPERATIONS_PER_SECOND)
        self.data_nodes = data_node_of_microbatches(case, stages)
        self.stage_of = np.array(stage_of_nodes(stages))
        durations = (
            case.duration("F", node, stage) + case.duration("B", node, stage)
            for node, stage in enumerate(self.stage_of)
        )
        self.visit_s = np.fromiter(durations, float)
        self.round_trip_s = case.round_trip_s
        self.forward_s = self._onward(back=False)
        self.back_s = self._onward(back=True)
        self.shares = cache(self._shares)
        self.trip_s = cache(self._trip_s)
        self.quickest_s = cache(self._quickest_s)
        self.following = cache(self._following)

    def best_paths(self, paths: tuple[NodePath, ...]) -> tuple[NodePath, ...]:
        """Search for the best paths, starting with `paths`."""
        best = self._judge(paths)
        self._keep(paths)
        alone = tuple(_Agent(node, (m,)) for m, node in enumerate(self.data_nodes))
        together = tuple(
            _Agent(node, tuple(m for m, other in enumerate(self.data_nodes) if other == node))
            for node in self.stages[0]
        )
        work_for_meetings = self.work_left * (1 - FIRST_PATHS_SHARE) if self.meetings else 0
        agents, without = together, 0
        while self.work_left > work_for_meetings and not self.search.stopped():
            root = self._root(agents)
            solution = None if root is None else self._resolve(root)
            if solution is None:
                without += 1
                agents = alone if without == TREES_TOGETHER else agents
                continue
            path_of = {
                microbatch: path
                for agent, path in zip(solution.agents, solution.paths, strict=True)
                for microbatch in agent.microbatches
            }
            candidate = tuple(path_of[microbatch] for microbatch in range(len(path_of)))
            judged = self._judge(candidate)
            if judged < best:
                paths, best = candidate, judged
                self._keep(paths)
        while self.meetings and self.work_left > 0 and not self.search.stopped():
            visits = np.bincount([n for path in paths for n in path], minlength=len(self.stage_of))
            solution = self._constrained(_Solution(alone, paths, ((),) * len(alone), visits))
            solution = None if solution is None else self._resolve(solution)
            if solution is not None:
                judged = self._judge(solution.paths)
                if judged <= best:
                    paths, best = solution.paths, judged
                    self._keep(paths)
        return paths

    def _keep(self, paths: tuple[NodePath, ...]) -> None:
        self.search.found(self._simulate(paths).iteration_s)

    def _judge(self, paths: tuple[NodePath, ...]) -> tuple[float, float]:
        """Compute the cost: the simulated time, or without TC2 the collision-free time."""
        if self.meetings:
            timeline = self._simulate(paths)
            return timeline.iteration_s, timeline.pipeline_s
        self.work_left -= 1
        return self._alone_s(zip(paths, repeat(1))), 0.0

    def _simulate(self, paths: tuple[NodePath, ...]) -> Timeline:
        self.work_left -= sum(2 * len(path) + 1 for path in paths)
        return simulate(self.case, self.stages, paths)

    def _alone_s(self, paths: Iterable[tuple[NodePath, int]]) -> float:
        """Compute the time of the data nodes for paths, each of some microbatches, if none meet."""
        trips_s = dict.fromkeys(self.stages[0], 0.0)
        for path, microbatches in paths:
            trips_s[path[0]] += microbatches * self.trip_s(path)
        ends_s = [
            trips_s[node] / min(sent, self.case.nodes[node].memory)
            for node, sent in zip(self.stages[0], self.case.microbatches, strict=True)
        ]
        return max(ends_s) + WEIGHT_OF_MEAN * float(np.mean(ends_s))

    def _trip_s(self, path: NodePath) -> float:
        hops_s = sum(
            self.round_trip_s[a, b] for a, b in zip(path, (*path[1:], path[0]), strict=True)
        )
        return float(hops_s + self.visit_s[list(path)].sum())

    def _root(self, agents: tuple[_Agent, ...]) -> _Solution | None:
        """Plan every agent's path, one after another in random order."""
        nothing = ((),) * len(agents)
        solution = _Solution(agents, nothing, nothing, np.zeros(len(self.stage_of), dtype=int))
        for agent in self.search.random.permutation(len(agents)).tolist():
            if self.work_left <= 0 or self.search.stopped():
                return None
            planned = self._planned(solution, agent)
            if planned is None:
                return None
            solution = planned
        return solution

    def _resolve(self, root: _Solution) -> _Solution | None:
        """Find the first solution below `root` without conflicts of the kinds CC3 and TC1."""
        ties = count()
        heap = [(0.0, next(ties), root)]
        for _ in range(EXPANSIONS_PER_AGENT * len(root.agents)):
            if not heap or self.work_left <= 0 or self.search.stopped():
                return None
            _, _, solution = heapq.heappop(heap)
            overfull = self._overfull(solution.visits)
            if not overfull:
                return solution
            nodes = frozenset(overfull[0])
            users = [a for a, path in enumerate(solution.paths) if not nodes.isdisjoint(path)]
            for agent in self.search.random.permutation(users)[:BRANCHES].tolist():
                child = self._planned(solution, agent, Constraint(nodes))
                if child is not None:
                    weights = [len(a.microbatches) for a in child.agents]
                    alone_s = self._alone_s(zip(child.paths, weights, strict=True))
                    conflicts = len(self._overfull(child.visits))
                    heapq.heappush(heap, (alone_s * (1 + EXTRA * conflicts), next(ties), child))
        return None

    def _overfull(self, visits: np.ndarray) -> list[tuple[int, ...]]:
        """List the nodes of each inner stage, then single nodes, above their share (CC3, TC1).

        Where shares are not integers, those with the most visits may have the larger ones. If
        nothing is above its share, nothing is below either, as the visits add up.
        """
        of_stage = np.array([visits[list(nodes)].sum() for nodes in self.stages[1:]])
        low = np.full(len(of_stage), of_stage.sum() // len(of_stage))
        above = _above(of_stage, low, low + 1)
        overfull: list[tuple[int, ...]] = [self.stages[1 + stage] for stage in above]
        for stage, nodes in enumerate(self.stages[1:], start=1):
            low, high = self.shares(stage, int(of_stage[stage - 1]))
            overfull += [(nodes[i],) for i in _above(visits[list(nodes)], low, high)]
        return overfull

    def _shares(self, stage: int, visits: int) -> tuple[np.ndarray, np.ndarray]:
        low, high = share_limits(self.case, stage, self.stages[stage], visits)
        return np.array(low), np.array(high)

    def _constrained(self, solution: _Solution) -> _Solution | None:
        """Plan one agent again that meets another, or whose data node ends last."""
        random = self.search.random
        timeline = self._simulate(solution.paths)
        meetings = _meetings(timeline, set(self.stages[0]))
        if meetings and random.random() < 0.5:
            waits_s = np.array([later.start_s - later.arrived_s for _, later in meetings])
            chosen = meetings[int(random.choice(len(meetings), p=waits_s / waits_s.sum()))]
            kept, moved = random.permutation(2)
            busy, agent = chosen[kept], chosen[moved].operation.microbatch
            nodes = frozenset((busy.operation.node,))
            constraint = Constraint(nodes, busy.start_s, busy.end_s)
        else:
            last = max(timeline.runs, key=lambda run: run.end_s).operation.node
            agent = int(random.choice([m for m, n in enumerate(self.data_nodes) if n == last]))
            constraint = Constraint(frozenset((int(random.choice(solution.paths[agent][1:])),)))
        first = next(run for run in timeline.runs if run.operation.microbatch == agent)
        return self._planned(solution, agent, constraint, first.start_s)

    def _planned(
        self,
        solution: _Solution,
        agent: int,
        constraint: Constraint | None = None,
        start_s: float = 0.0,
    ) -> _Solution | None:
        """Plan one agent of `solution` again, under one more constraint; None if impossible."""
        constraints = solution.constraints[agent]
        if constraint is not None:
            constraints = (*constraints, constraint)
        weight = len(solution.agents[agent].microbatches)
        self.work_left -= OPERATIONS_PER_AGENT
        visits = solution.visits.copy()
        visits[list(solution.paths[agent])] -= weight
        crowding = self._crowding(visits, weight)
        path = self.find(solution.agents[agent].data_node, constraints, crowding, start_s)
        if path is None:
            return None
        visits[list(path)] += weight
        return replace(
            solution,
            paths=_with(solution.paths, agent, path),
            constraints=_with(solution.constraints, agent, constraints),
            visits=visits,
        )

    def _crowding(self, visits: np.ndarray, weight: int) -> np.ndarray:
        """Compute by how much each node and its stage exceed their shares with `weight` more.

        The unit is agents of that weight, so that it counts conflicts.
        """
        inner = len(self.stages) - 1
        most = -(-len(self.data_nodes) * (self.case.path_length - 1) // inner)
        crowding = np.zeros(len(visits))
        for stage, nodes in enumerate(self.stages[1:], start=1):
            of_node = visits[list(nodes)]
            _, high = self.shares(stage, most)
            over = np.maximum(of_node + weight - high, 0) + max(of_node.sum() + weight - most, 0)
            crowding[list(nodes)] = over / weight
        return crowding

    # A* search for the path of one agent.

    def _onward(self, back: bool) -> np.ndarray:
        """Return [node, node] the round trips [s]; infinite where no path takes that step."""
        rules = self.case.rules
        step = self.stage_of[None, :] - self.stage_of[:, None]
        if back:
            allowed = (step < 0) & (step >= -min(rules.max_swap_distance, len(self.stages)))
        else:
            allowed = (step > 0) & (step <= 1 + min(rules.max_jump, len(self.stages)))
        return np.where(allowed & (self.stage_of > 0), self.round_trip_s, np.inf)

    def _to_go(self, data_node: int, step_s: np.ndarray) -> np.ndarray:
        """Bound [stages left, steps back left, node] the remaining seconds to the data node.

        The bound ignores the stages visited before, so it is never too high.
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

    def _quickest_s(self, data_node: int) -> float:
        """Estimate the fastest round trip that begins at a data node [s]."""
        return float(self._to_go(data_node, self.visit_s)[-1, -1, data_node])

    def _following(self, visited: tuple[int, ...]) -> tuple[int, ...]:
        """List the stages that may come next (CC1, CC2) without leaving too few for the rest."""
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
        """Find by A* the fastest round trip under the constraints; conflicts count as time."""
        length = self.case.path_length
        step_s = self.visit_s + EXTRA * self.quickest_s(data_node) * crowding
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
            # A longer way to the same node through the same stages is never better, unless timed
            # constraints make its arrival time matter.
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
                self.work_left -= len(promising) / SUCCESSORS_PER_OPERATION
                for replica in promising[total_s[promising] < np.inf]:
                    longer_path = (*path, int(nodes[replica]))
                    whole_s, seconds = float(total_s[replica]), float(longer_s[replica])
                    longer = whole_s, next(ties), seconds, longer_path, longer_visited
                    heapq.heappush(heap, longer)
        return None

    def _meets(self, path: NodePath, constraints: Sequence[Constraint], start_s: float) -> bool:
        """Return whether a path without waits, from `start_s` on, violates a timed constraint."""
        now = start_s
        before = path[0]
        for operation in microbatch_chain(0, path):
            node = operation.node
            now += self.case.hop_duration(operation.kind, before, node)
            end_s = now + self.case.duration(operation.kind, node, self.stage_of[node])
            for constraint in constraints:
                overlaps = now < constraint.end_s and end_s > constraint.start_s
                if node in constraint.nodes and overlaps:
                    return True
            now, before = end_s, node
        return False


def _above(visits: np.ndarray, low: np.ndarray, high: np.ndarray) -> list[int]:
    """List the visits above their shares, if as many as necessary have the larger share `high`."""
    larger = int(visits.sum() - low.sum())
    most_first = np.lexsort((np.arange(len(visits)), low - visits, low == high))
    share = low.copy()
    share[most_first[:larger]] = high[most_first[:larger]]
    return np.flatnonzero(visits > share).tolist()


def _with(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


def _meetings(
    timeline: Timeline, data_nodes: set[int]
) -> list[tuple[TimedOperation, TimedOperation]]:
    """List the meetings on inner nodes (TC2): a run, and the next one, which waits for its end."""
    latest: dict[int, TimedOperation] = {}
    meetings = []
    for run in timeline.runs:
        node = run.operation.node
        before = latest.get(node)
        if node not in data_nodes and before is not None and run.arrived_s < before.end_s:
            meetings.append((before, run))
        latest[node] = run
    return meetings
