"""Lower bound on an iteration with one placement in all of its parts.

`bound.lower_bound_s` minimizes each of its parts over placements separately: near nodes are one
stage where a ring should be fast, and different stages where paths should be short. This bound
searches for a placement that keeps a given time in all parts, by branch and bound. A branch
restricts each stage to some of its possible sets of nodes; the first one allows all. A branch is
closed when it is proved that no plan with these sets keeps the time. If all are closed, that time
is a bound.

In the relaxation of a branch, a placement is known only by the least and most nodes of each class
in each stage. It is proved impossible by prices (Lagrange): the violations of a plan cost nothing
at any prices, so if their cost is positive at some prices for all numbers of nodes and all trips,
there is no plan. That sum is computed here, so the proof does not depend on the precision of the
linear program that finds the prices.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise, permutations, product
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.optimize import linprog
from scipy.sparse import csr_array, eye_array, hstack

from skippipe_sched.problem.case import Case
from skippipe_sched.problem.node_subset import without_skipped_stages
from skippipe_sched.problem.rules import SHARE_TOLERANCE, sequence_problem
from skippipe_sched.timing.averaging import all_reduce_bytes, rings_of_iteration
from skippipe_sched.timing.bound import lower_bound_s
from skippipe_sched.timing.one_node import NodeWork, busy_s

# Limits on the sets of nodes of a stage, the orders of their rings, and the orders of stages on a
# path: a case with more has no better bound than the quick one.
MOST_SETS, MOST_RINGS, MOST_SEQUENCES = 20_000, 3_000_000, 3_000
# The search ends when the bound is known to this relative precision; its first steps are of this
# relative size.
PRECISION, STEP = 0.002, 0.04
# Branches first separate sets of data nodes whose rings differ by more than this share.
RING_SPREAD = 0.3
# With more equal inner stages, these are not distinguished: CC2 is ignored, and their order is
# free.
MOST_DISTINGUISHED = 4
# Price of a missing or excess visit in the linear program [s], so that it is always feasible.
MISSING_S = 50.0
# Zero threshold, in seconds of all microbatches together; sums are exact to 1e-9 of it.
ROUNDING_S = 1e-6
MOST_ROUNDS = 200
# New trips of each class of data nodes in a round.
MOST_NEW = 6

OfPlaces = Float[np.ndarray, "places classes"]


def placement_bound_s(case: Case, path_length: int, most_s: float, limit_s: float) -> float:
    """Bound [s] from below `iteration_s` of every plan whose paths all visit `path_length` stages.

    It is the greatest time below `most_s`, the time of a known plan, for which it is proved within
    about `limit_s` that no plan is faster, and at least `lower_bound_s`. Its value may depend on
    the speed of the machine, its validity does not. In a case of too many placements, or with
    contention "node", it is `lower_bound_s`.
    """
    least_s = lower_bound_s(case, path_length)
    case = without_skipped_stages(case)
    # With shared connections, shares also depend on them, which is not listed here.
    if path_length == 1 or case.shares_connections or not _few_enough(case, path_length):
        return least_s
    end_s = time.monotonic() + limit_s
    search = _Search(case, path_length)
    while most_s - least_s > PRECISION * least_s and (left_s := end_s - time.monotonic()) > 0:
        tried_s = min((1 + STEP) * least_s, (least_s + most_s) / 2)
        # A failing proof may take forever: half of the remaining time is for smaller times.
        if search.proves(tried_s, time.monotonic() + left_s / 2):
            least_s = tried_s
        else:
            most_s = tried_s
    return least_s


def _few_enough(case: Case, path_length: int) -> bool:
    """Return whether the lists that the search needs are short enough."""
    classes = len({(node.location, node.forward_s, node.memory) for node in case.nodes})
    sizes = [tuple(Counter(case.microbatches).values()), *((n,) for n in set(case.stages[1:]))]
    sets = [math.prod(math.comb(classes + n - 1, n) for n in parts) for parts in sizes]
    rings = [s * math.factorial(sum(n) - 1) for s, n in zip(sets, sizes, strict=True)]
    sequences = math.perm(len(case.stages) - 1, path_length - 1)
    return max(sets) <= MOST_SETS and max(rings) <= MOST_RINGS and sequences <= MOST_SEQUENCES


class _Sets(NamedTuple):
    """Sets of nodes that a stage may have, by class: rows that belong together.

    `nodes[i, p, c]` is the number of nodes of class c in place p of the stage in set i (one place,
    except for data nodes with different numbers of microbatches), `ring_s` the duration of their
    fastest ring, `low` and `high` the least and most visits of one node of each class (CC3, TC1).
    """

    nodes: Int[np.ndarray, "sets places classes"]
    ring_s: Float[np.ndarray, " sets"]
    low: Float[np.ndarray, "sets places classes"]
    high: Float[np.ndarray, "sets places classes"]

    @property
    def of_stage(self) -> Int[np.ndarray, "sets classes"]:
        """Number of nodes of each class in the stage."""
        return self.nodes.sum(axis=1)


# A branch of the search: the remaining sets of nodes, by stage.
_Branch = tuple[Int[np.ndarray, " sets"], ...]


class _Search:
    """Branch and bound over the placements of one case.

    Places are the stages, stage 0 once for each number of microbatches that a data node may have:
    `places[g]` are stage, number of nodes, and microbatches of each of them.
    """

    def __init__(self, case: Case, path_length: int):
        """List the open choices of a case without `left_out` stages."""
        self.case = case
        self.classes = Classes(case, path_length)
        self.averaging = rings_of_iteration(case.averaging)
        counts = sorted(set(case.microbatches))
        self.places = [(0, case.microbatches.count(count), count) for count in counts]
        self.places += [(s, size, 0) for s, size in enumerate(case.stages) if s]
        self.stage_of = np.array([stage for stage, *_ in self.places])
        inner, visits = len(case.stages) - 1, sum(case.microbatches) * self.classes.visited
        self.least, self.most = visits // inner, -(-visits // inner)
        no_sequences = np.zeros((0, self.classes.visited), dtype=int)
        self.trips = self.trips_of(no_sequences[:, 0], no_sequences, no_sequences)
        self.sets = [self.sets_of(stage) for stage in range(len(case.stages))]
        kinds = stage_kinds(case)
        # Among equal stages that are not distinguished, the first one has the first set.
        self.same = [
            self.classes.alike and s > 1 and kinds[s] == kinds[s - 1] for s in range(len(kinds))
        ]

    def sets_of(self, stage: int) -> _Sets:
        """List the sets of nodes that a stage may have, with their rings and visits."""
        count = self.classes.count
        every = np.eye(len(count), dtype=int)
        sizes = [size for s, size, _ in self.places if s == stage]
        parts = [
            [every[list(own)].sum(axis=0) for own in
             combinations_with_replacement(range(len(count)), size)]
            for size in sizes
        ]  # fmt: skip
        nodes = np.array([own for own in product(*parts) if (sum(own) <= count).all()])
        of_stage = nodes.sum(axis=1)
        low, high = np.zeros(nodes.shape), np.zeros(nodes.shape)
        if stage == 0:
            low[:] = high[:] = np.array([c for s, _, c in self.places if s == 0])[:, None]
        else:
            speed = self.classes.forward_s[0].min() / self.classes.forward_s[0]
            share = speed / (of_stage @ speed)[:, None]
            low[:, 0] = np.floor(self.least * share + SHARE_TOLERANCE / 2)
            high[:, 0] = np.ceil(self.most * share - SHARE_TOLERANCE / 2)
        return _Sets(nodes, self.rings_s(stage, of_stage), low, high)

    def rings_s(self, stage: int, of_stage: np.ndarray) -> Float[np.ndarray, " sets"]:
        """Compute the seconds of the fastest ring of each set of nodes, over all of its orders."""
        case, size = self.case, self.case.stages[stage]
        if size == 1:
            return np.zeros(len(of_stage))
        own = [np.flatnonzero(self.classes.of_node == k) for k in range(len(self.classes.count))]
        nodes = np.array(
            [np.concatenate([o[:n] for o, n in zip(own, row, strict=True)]) for row in of_stage]
        )
        latency, bandwidth = case.link_matrices
        steps = 2 * (size - 1) * self.averaging.of_all_reduce
        sent = all_reduce_bytes(case.averaging, case.stage_bytes[stage], size)
        least_s = np.full(len(nodes), np.inf)
        for order in permutations(range(1, size)):
            ring = nodes[:, [0, *order]]
            hop = ring, np.roll(ring, -1, axis=1)
            slowest, latest = bandwidth[hop].min(axis=1), latency[hop].max(axis=1)
            least_s = np.minimum(least_s, steps / size * sent / slowest + steps * latest)
        return least_s

    def proves(self, iteration_s: float, until_s: float) -> bool:
        """Prove that no plan takes at most `iteration_s`; return False if that is not proved."""
        open_branches: list[_Branch] = [tuple(np.arange(len(own.ring_s)) for own in self.sets)]
        while open_branches:
            if time.monotonic() > until_s:
                return False
            branch = self.narrowed(open_branches.pop(), iteration_s)
            if branch is None:
                continue
            nodes = self.relaxed(self.box(branch), iteration_s)
            if nodes is None:
                continue
            if all(len(sets) == 1 for sets in branch):
                return False
            open_branches += self.split(branch, nodes)
        return True

    def box(self, branch: _Branch) -> Box:
        """Return the bounds that hold for all placements of a branch."""
        low, high, visits_low, visits_high, ring_s = [], [], [], [], []
        for own, sets in zip(self.sets, branch, strict=True):
            nodes = own.nodes[sets]
            there = nodes > 0
            low.append(nodes.min(axis=0))
            high.append(nodes.max(axis=0))
            least = np.where(there, own.low[sets], np.inf).min(axis=0)
            visits_low.append(np.where(there.any(axis=0), least, 0.0))
            visits_high.append(np.where(there, own.high[sets], 0.0).max(axis=0))
            ring_s.append(own.ring_s[sets].min())
        delay_s = np.array(ring_s) if self.averaging.waits else np.zeros(len(ring_s))
        low, high, visits_low, visits_high = map(
            np.concatenate, (low, high, visits_low, visits_high)
        )
        return Box(low, high, visits_low, visits_high, delay_s)

    def narrowed(self, branch: _Branch, iteration_s: float) -> _Branch | None:
        """Drop sets of nodes that no placement of the branch has in `iteration_s`.

        A set is dropped if the sets of the other stages cannot complement it, or if one of its
        nodes takes too long by itself. None if a stage has no set left.
        """
        while True:
            size = sum(map(len, branch))
            adding_up = self.adding_up(branch)
            if adding_up is None:
                return None
            branch = adding_up
            if sum(map(len, branch)) < size:
                continue
            late = self.too_late(branch, iteration_s)
            branch = tuple(sets[~out] for sets, out in zip(branch, late, strict=True))
            if not all(map(len, branch)):
                return None
            if sum(map(len, branch)) == size:
                return branch

    def adding_up(self, branch: _Branch) -> _Branch | None:
        """Drop sets with which the numbers of nodes cannot add up, or that are out of order."""
        own = [s.of_stage[sets] for s, sets in zip(self.sets, branch, strict=True)]
        least = np.array([nodes.min(axis=0) for nodes in own])
        most = np.array([nodes.max(axis=0) for nodes in own])
        kept = []
        for stage, (sets, nodes) in enumerate(zip(branch, own, strict=True)):
            others_least = least.sum(axis=0) - least[stage]
            others_most = most.sum(axis=0) - most[stage]
            missing = self.classes.count - nodes
            fits = ((others_least <= missing) & (missing <= others_most)).all(axis=1)
            if self.same[stage]:
                fits &= sets >= branch[stage - 1].min()
            if stage + 1 < len(branch) and self.same[stage + 1]:
                fits &= sets <= branch[stage + 1].max()
            if not fits.any():
                return None
            kept.append(sets[fits])
        return tuple(kept)

    def too_late(self, branch: _Branch, iteration_s: float) -> list[Bool[np.ndarray, " sets"]]:
        """Return for each set left to each stage whether a node of it takes too long by itself."""
        box = self.box(branch)
        ended_s, pipeline_s = self.alone_s(box)
        late = []
        for stage, (own, sets) in enumerate(zip(self.sets, branch, strict=True)):
            nodes, ring_s = own.nodes[sets] > 0, own.ring_s[sets]
            places = self.stage_of == stage
            last_s = np.where(nodes, ended_s[places], 0.0).max(axis=(1, 2))
            other_s = np.where(nodes, pipeline_s[places], 0.0).max(axis=(1, 2))
            if self.averaging.waits:
                averaged_s = last_s + ring_s
            else:  # Rings that follow one another, or the node's work in each iteration.
                averaged_s = np.maximum(last_s, self.averaging.number * ring_s)
            late.append(np.maximum(averaged_s, other_s) > iteration_s)
        return late

    def alone_s(self, box: Box) -> tuple[OfPlaces, OfPlaces]:
        """Bound the busy end of one node of each class in each place, and the pipeline by it.

        As in `bound`, its microbatches arrive at the earliest by the shortest way from a data node,
        are away for the shortest round trip between forward and backward, and after their last
        backward comes the shortest way back. Where iterations overlap, only its busy time counts.
        """
        ended_s, pipeline_s = np.zeros(box.low.shape), np.zeros(box.low.shape)
        head_s, away_s, tail_s, out_s, home_s = self.ways_s(box)
        of, waits = self.classes, self.averaging.waits
        for g, k in np.argwhere((box.high > 0) & (box.visits_low > 0)):
            stage, count = self.stage_of[g], int(box.visits_low[g, k])
            away, back = (out_s[k], home_s[k]) if stage == 0 else (away_s[stage, k], 0.0)
            if not np.isfinite(away):
                ended_s[g, k] = np.inf
                continue
            loss_s = of.loss_s[k] if stage == 0 else 0.0
            memory = min(of.memory[k], count)
            seconds = (of.forward_s[stage, k], away, loss_s, back, of.backward_s[stage, k])
            ended_s[g, k] = busy_s(NodeWork(count, memory, *map(float, seconds)))
            if stage and waits:
                ended_s[g, k] += head_s[stage, k]
                pipeline_s[g, k] = ended_s[g, k] + tail_s[stage, k] + box.delay_s[0]
        return ended_s, pipeline_s

    def ways_s(self, box: Box) -> tuple[np.ndarray, ...]:
        """Find the shortest ways between data nodes and inner nodes that a branch allows.

        By inner stage and class: until the forward there can start, from its end until the backward
        can start, and from the end of that to the end of the pipeline. By class of data nodes:
        between their forward and the loss, and between that and their backward.
        """
        of = self.classes
        shut = np.full(of.forward_s.shape, np.inf)
        for stage, high in zip(self.stage_of, box.high, strict=True):
            shut[stage][high > 0] = 0.0
        itself = np.where(np.eye(len(of.count), dtype=bool), of.revisit_penalty, 0.0)
        there, back = of.there_s + of.revisit_penalty, of.back_s + of.revisit_penalty
        head_s, away_s, tail_s = np.full((3, *of.forward_s.shape), np.inf)
        out_s, home_s = np.full((2, len(of.count)), np.inf)
        start = shut[0][:, None] + itself
        for sequence in of.sequences:
            reach = [of.forward_s[0][:, None] + there + start + shut[sequence[0]]]
            leave = [of.backward_s[0][:, None] + back + start + shut[sequence[0]]]
            beyond = [there.T + back.T + of.loss_s[:, None] + start + shut[sequence[-1]]]
            for before, stage in pairwise(sequence):
                onward = reach[-1] + of.forward_s[before], leave[-1] + of.backward_s[before]
                reach.append((onward[0][:, :, None] + there).min(axis=1) + shut[stage] + itself)
                leave.append((onward[1][:, :, None] + back).min(axis=1) + shut[stage] + itself)
            for stage, after in pairwise(reversed(sequence)):
                work = beyond[-1] + of.forward_s[stage] + of.backward_s[stage]
                way = (work[:, None, :] + there + back).min(axis=2)
                beyond.append(way + shut[after] + itself)
            for position, stage in enumerate(sequence):
                head_s[stage] = np.minimum(head_s[stage], reach[position].min(axis=0))
                tail_s[stage] = np.minimum(tail_s[stage], leave[position].min(axis=0))
                away_s[stage] = np.minimum(away_s[stage], beyond[-1 - position].min(axis=0))
            last = sequence[-1]
            loop_s = (reach[-1] + of.forward_s[last] + there.T).min(axis=1) - of.forward_s[0]
            out_s = np.minimum(out_s, loop_s)
            loop_s = (leave[-1] + of.backward_s[last] + back.T).min(axis=1) - of.backward_s[0]
            home_s = np.minimum(home_s, loop_s)
        return head_s, away_s, tail_s, out_s, home_s

    def split(self, branch: _Branch, nodes: OfPlaces) -> Iterator[_Branch]:
        """Divide a branch in two, the half with the relaxed placement `nodes` last.

        First by the ring of the data nodes, before which all microbatches must have ended. Then the
        stage with the fewest remaining sets is divided by its number of nodes of the first class
        that is open: classes far from the others have the most effect.
        """
        ring_s = self.sets[0].ring_s[branch[0]]
        if np.ptp(ring_s) > RING_SPREAD * ring_s.max():
            stage = 0
            chosen = ring_s < (ring_s.min() + ring_s.max()) / 2
        else:
            in_question = [stage for stage, sets in enumerate(branch) if len(sets) > 1]
            stage = min(in_question, key=lambda stage: len(branch[stage]))
            own = self.sets[stage].nodes[branch[stage]].reshape(len(branch[stage]), -1)
            low, high = own.min(axis=0), own.max(axis=0)
            k = int(np.argmax(low < high))
            relaxed = nodes[self.stage_of == stage].ravel()[k]
            most = np.clip(np.floor(relaxed + SHARE_TOLERANCE), low[k], high[k] - 1)
            chosen = (own[:, k] <= most) == (relaxed <= most + 0.5)
        for half in (~chosen, chosen):
            yield (*branch[:stage], branch[stage][half], *branch[stage + 1 :])

    def trips_of(self, start: np.ndarray, stages: np.ndarray, classes: np.ndarray) -> Trips:
        """Make trips of these starts, inner stages and classes, with their durations."""
        of = self.classes
        ends = np.column_stack([start, classes, start])
        stage = np.column_stack([np.zeros_like(start), stages])
        here, following = ends[:, :-1], ends[:, 1:]
        there_s = (of.forward_s[stage, here] + of.there_s[here, following]).sum(axis=1)
        each_s = of.back_s[here, following] + of.backward_s[stage, here]
        back_s = np.cumsum(each_s[:, ::-1], axis=1)[:, ::-1]
        return Trips(start, stages, classes, there_s + of.loss_s[start], back_s)

    def relaxed(self, box: Box, iteration_s: float) -> OfPlaces | None:
        """Find numbers of nodes for which `iteration_s` may suffice; None if proved impossible.

        In this relaxation, a linear program (`_Program`), the unknowns are, as real numbers, the
        nodes of each class in each place, and how often each trip is made; trips are generated
        according to prices. They keep the conditions of every plan: sizes of places, numbers of
        nodes in classes, microbatches of data nodes, CC1, CC2 (except for `MOST_DISTINGUISHED`),
        CC3, TC1, and room in memory.
        """
        program = _Program(self, box, iteration_s)
        fits = program.allowed[0][self.trips.start]
        fits &= program.allowed[self.trips.stages, self.trips.classes].all(axis=1)
        trips = self.trips.some(fits)
        known, nodes, made = len(trips.start), None, np.zeros(0)
        for _ in range(MOST_ROUNDS):
            solution = program.solved(trips)
            if solution is None:
                return None
            nodes, made = solution.nodes, solution.made
            if solution.missing_s < ROUNDING_S:
                break
            least_s, new = self.cheapest(program, solution)
            if program.violated_s(solution, least_s) > ROUNDING_S:
                nodes = None
                break
            if not len(new.start):
                break
            trips = trips.with_others(new)
        # Later boxes start with the trips that were used here.
        used = np.flatnonzero(made > ROUNDING_S)
        self.trips = self.trips.with_others(trips.some(used[used >= known]))
        return nodes

    def cheapest(
        self, program: _Program, prices: _Solution
    ) -> tuple[Float[np.ndarray, " classes"], Trips]:
        """Find the least cost of a trip from each class at these prices, and trips that cost < 0.

        Exact, by dynamic programming along each sequence of stages: a row of room counts all of the
        way there, and the way back as far as the position at which it ends.
        """
        of = self.classes
        room, visit, sent = program.prices(prices)
        banned = np.where(program.allowed, 0.0, np.inf)
        here = np.eye(len(of.count), dtype=bool)
        itself = np.where(here, of.revisit_penalty, 0.0)
        least_s = np.full(len(of.count), np.inf)
        every = np.arange(len(of.count))
        found: list[tuple[float, int, tuple[int, ...], list[int]]] = []
        for sequence in of.sequences:
            # By position and start: the weight of the hop back from there and of the backward
            # before it.
            back = np.zeros((len(sequence) + 2, len(of.count)))
            for row, delay_s in enumerate(program.delays_s):
                end = program.end_of(sequence, delay_s) if row else 0
                if end is not None:
                    back[end + 1 :] += room[:, row]
            there = back[-1][:, None]
            start_s = there[:, 0] * (of.forward_s[0] + of.loss_s) + back[1] * of.backward_s[0]
            cost = np.where(here, (start_s + banned[0] - sent)[:, None], np.inf)
            came = []
            for position, stage in enumerate(sequence, start=1):
                hop_s = there[:, None] * of.there_s + back[position][:, None, None] * of.back_s
                step = cost[:, :, None] + hop_s + of.revisit_penalty
                came.append(step.argmin(axis=1))
                work_s = there * of.forward_s[stage]
                work_s = work_s + back[position + 1][:, None] * of.backward_s[stage]
                cost = step.min(axis=1) + work_s + visit[stage - 1] + banned[stage] + itself
            cost = cost + there * (of.there_s.T + of.back_s.T)
            last = cost.argmin(axis=1)
            own_s = cost[every, last]
            least_s = np.minimum(least_s, own_s)
            for start in np.flatnonzero(own_s < -ROUNDING_S / 10).tolist():
                way = [int(last[start])]
                for before in reversed(came[1:]):
                    way.append(int(before[start, way[-1]]))
                found.append((float(own_s[start]), start, sequence, way[::-1]))
        return least_s, self.cheapest_of(found)

    def cheapest_of(self, found: list[tuple[float, int, tuple[int, ...], list[int]]]) -> Trips:
        """Make trips of the cheapest ways that were found, `MOST_NEW` from each class."""
        taken: Counter[int] = Counter()
        kept = []
        for _, start, *way in sorted(found):
            taken[start] += 1
            if taken[start] <= MOST_NEW:
                kept.append((start, *way))
        if not kept:
            return self.trips.some(np.zeros(0, dtype=int))
        return self.trips_of(*(np.array(part) for part in zip(*kept, strict=True)))


class Classes:
    """Nodes by class: nodes of one class have the same location, speed and memory.

    The first classes are those that are far from the others.

    Attributes:
        of_node: the class of each node.
        count: nodes of each class.
        there_s: hop of an activation from class to class [s].
        back_s: hop of its gradient in the other direction, indexed as `there_s` [s].
        revisit_penalty: inf from a class of one node to itself, as a path visits no node twice;
            otherwise 0.
        forward_s: seconds of a forward, by stage and class; `backward_s` of a backward.
        loss_s: seconds of the loss on a data node, by class.
        memory: microbatches that a node may hold, by class.
        visited: number of inner stages on a path.
        sequences: inner stages in every order in which a path may visit them (CC1, CC2).
        alike: whether inner stages of one size, cost and bytes are not distinguished.
    """

    def __init__(self, case: Case, path_length: int):
        """Sort the nodes of a case without `left_out` stages, for paths of this length."""
        self.visited = path_length - 1
        described = [(node.location, node.forward_s, node.memory) for node in case.nodes]
        far_s = dict(zip(described, np.median(case.round_trip_s, axis=0).tolist(), strict=True))
        kinds = sorted(far_s, key=lambda kind: (-far_s[kind], kind))
        self.of_node = np.array([kinds.index(node) for node in described])
        self.count = np.bincount(self.of_node)
        first = np.array([np.flatnonzero(self.of_node == k)[0] for k in range(len(kinds))])
        last = np.array([np.flatnonzero(self.of_node == k)[-1] for k in range(len(kinds))])
        self.there_s = case.forward_hop_s[np.ix_(first, last)]
        self.back_s = case.backward_hop_s[np.ix_(first, last)].T
        self.revisit_penalty = np.where(np.diag(self.count == 1), np.inf, 0.0)
        cost = np.array(case.stage_cost)[:, None]
        self.forward_s = cost * np.array([forward_s for _, forward_s, _ in kinds])
        self.backward_s = self.forward_s * case.backward_ratio
        self.loss_s = self.forward_s[0] * case.loss_ratio
        self.memory = [memory for *_, memory in kinds]
        inner = range(1, len(case.stages))
        self.alike = max(Counter(stage_kinds(case)[1:]).values()) > MOST_DISTINGUISHED
        self.sequences = [
            sequence
            for sequence in permutations(inner, path_length - 1)
            if self.alike or sequence_problem((0, *sequence), case.rules) is None
        ]


def stage_kinds(case: Case) -> list[tuple[int, float, float]]:
    """List size, cost and bytes of each stage."""
    return list(zip(case.stages, case.stage_cost, case.stage_bytes, strict=True))


@dataclass(frozen=True)
class Box:
    """Bounds on a partly known placement.

    `low` and `high` bound the nodes of each class in each place; `visits_low` and `visits_high` the
    visits of each of them; `delay_s[s]` is the least time between the last backward of stage s and
    the end of the iteration.
    """

    low: Int[np.ndarray, "places classes"]
    high: Int[np.ndarray, "places classes"]
    visits_low: OfPlaces
    visits_high: OfPlaces
    delay_s: Float[np.ndarray, " stages"]


class Trips(NamedTuple):
    """Trips of a microbatch: from a class of data nodes through inner stages, each on a class.

    `there_s` is from the start of the first forward to the end of the loss, and `back_s[:, p]` from
    there to the end of the backward at position p of the path, without waits.
    """

    start: Int[np.ndarray, " trips"]
    stages: Int[np.ndarray, "trips inner"]
    classes: Int[np.ndarray, "trips inner"]
    there_s: Float[np.ndarray, " trips"]
    back_s: Float[np.ndarray, "trips positions"]

    def some(self, which: np.ndarray) -> Trips:
        """Return some of the trips."""
        return Trips(*(values[which] for values in self))

    def with_others(self, others: Trips) -> Trips:
        """Append other trips."""
        return Trips(*map(np.concatenate, zip(self, others, strict=True)))


class _Solution(NamedTuple):
    """Solution of a linear program: missing amount [s], nodes of places, trips, prices."""

    missing_s: float
    nodes: OfPlaces
    made: Float[np.ndarray, " trips"]
    equal: Float[np.ndarray, " equalities"]
    upper: Float[np.ndarray, " inequalities"]


class _Program:
    """Linear program of one box and one time: its rows over nodes, slack and trips.

    Equalities: sizes of places, nodes of classes, trips from each class of data nodes.
    Inequalities: visits of each inner stage and class, from above and below, and of each inner
    stage (CC3); room. All but the first two may be violated at a price, and the program minimizes
    the total price.

    Room on a data node. With memory for m microbatches at most m are in flight, at most j before j
    forwards have passed, and, of those that must have ended at some time, at most j later than j
    backwards before it. The data stage's last backward ends its ring's time before the iteration
    does. So all microbatches of a node together are in flight for at most the sum over j = 0 .. m -
    1 of max(0, T - ring - j (F + B)). A path through a stage with a longer ring must have ended its
    backward there by T less that ring, so until the first such stage on their path they are in
    flight for at most the sum of max(0, T - ring - j F).
    """

    def __init__(self, of: _Search, box: Box, iteration_s: float):
        self.box = box
        stages, classes = of.classes.forward_s.shape
        self.allowed = np.zeros((stages, classes), dtype=bool)
        for stage, high in zip(of.stage_of, box.high, strict=True):
            self.allowed[stage] |= high > 0
        data_s = float(box.delay_s[0])
        self.delays_s = [data_s, *sorted({s for s in box.delay_s[1:].tolist() if s > data_s})]
        # If the shares of all nodes are integers, the upper limits imply the lower ones: the number
        # of trips is fixed, and so are the visits of stages.
        self.even = not ((box.visits_low < box.visits_high) & (box.high > 0)).any()
        self.visits = (stages - 1) * classes
        self.room = classes * len(self.delays_s)
        self.equal, self.equal_to = self.adding_up(of)
        self.upper = np.vstack([*self.shares(of), self.free_s(of, iteration_s)])
        self.upper_to = np.zeros(len(self.upper))
        if not self.even:
            counts = slice(2 * self.visits, len(self.upper) - self.room)
            self.upper_to[counts] = np.repeat([of.most, -of.least], stages - 1)
        price = np.full(len(self.upper), MISSING_S)
        price[-self.room :] = 1.0
        # Slack: of each inequality; of each class, trips too few and too many.
        few = np.zeros((len(self.equal), 2 * classes))
        few[-classes:] = np.hstack([np.eye(classes), -np.eye(classes)])
        slack = csr_array((len(self.equal), len(price))), -eye_array(len(price))
        none = csr_array((len(price), 2 * classes))
        self.structure = (
            hstack([csr_array(self.equal), slack[0], csr_array(few)], "csr"),
            hstack([csr_array(self.upper), slack[1], none], "csr"),
        )
        trips_price = np.full(2 * classes, MISSING_S)
        self.cost = np.concatenate([np.zeros(box.low.size), price, trips_price])
        self.bounds = [*zip(box.low.ravel(), box.high.ravel(), strict=True)]
        self.bounds += [(0, None)] * (len(price) + len(trips_price))

    def adding_up(self, of: _Search) -> tuple[np.ndarray, np.ndarray]:
        """Return the equalities over numbers of nodes, and their right-hand sides."""
        places, classes = self.box.low.shape
        counts = np.tile(np.eye(classes), places)
        sent = np.repeat([count for *_, count in of.places], classes) * counts
        equal = np.vstack([np.repeat(np.eye(places), classes, axis=1), counts, -sent])
        sizes = [size for _, size, _ in of.places]
        return equal, np.concatenate([sizes, of.classes.count, np.zeros(classes)])

    def shares(self, of: _Search) -> list[np.ndarray]:
        """Return the upper limits of the nodes' visits, and if needed the lower ones."""
        data = int((of.stage_of == 0).sum())
        column = np.arange(data * self.allowed.shape[1], self.box.low.size)
        above, below = np.zeros((2, self.visits, self.box.low.size))
        above[np.arange(self.visits), column] = -self.box.visits_high[data:].ravel()
        below[np.arange(self.visits), column] = self.box.visits_low[data:].ravel()
        of_stages = np.zeros((2 * (len(self.allowed) - 1), self.box.low.size))
        return [above] if self.even else [above, below, of_stages]

    def free_s(self, of: _Search, iteration_s: float) -> np.ndarray:
        """Return the room of data nodes of each class, as defined above; negative."""
        classes = of.classes
        free = np.zeros((len(classes.count), len(self.delays_s), *self.box.low.shape))
        for place, (stage, _, count) in enumerate(of.places):
            if stage:
                continue
            for k in range(len(classes.count)):
                slots = np.arange(min(classes.memory[k], count))
                for row, delay_s in enumerate(self.delays_s):
                    apart_s = classes.forward_s[0, k] + (0 if row else classes.backward_s[0, k])
                    free_s = np.maximum(0.0, iteration_s - delay_s - slots * apart_s)
                    free[k, row, place, k] = -free_s.sum()
        return free.reshape(self.room, self.box.low.size)

    def end_of(self, sequence: tuple[int, ...], delay_s: float) -> int | None:
        """Find the first position of a path at a stage with a delay of at least `delay_s`."""
        late = (p for p, stage in enumerate(sequence, 1) if self.box.delay_s[stage] >= delay_s)
        return next(late, None)

    def rows_of(self, trips: Trips) -> tuple[csr_array, csr_array]:
        """Return the coefficients of trips in equalities and in inequalities."""
        number, (inner, classes) = len(trips.start), (len(self.allowed) - 1, len(self.allowed[0]))
        each = np.arange(number)
        sent = len(self.equal) - classes + trips.start
        equal = csr_array((np.ones(number), (sent, each)), (len(self.equal), number))
        stage = (trips.stages - 1).ravel()
        visit, counts = stage * classes + trips.classes.ravel(), 2 * self.visits + stage
        rows = [visit] if self.even else [visit, self.visits + visit, counts, inner + counts]
        columns = [np.repeat(each, trips.stages.shape[1])] * len(rows)
        values = [np.full(len(stage), 1.0 - 2.0 * (i % 2)) for i in range(len(rows))]
        first = len(self.upper) - self.room
        for row, delay_s in enumerate(self.delays_s):
            late = self.box.delay_s[trips.stages] >= delay_s
            end = late.argmax(axis=1) + 1 if row else np.zeros(number, dtype=int)
            used = each[late.any(axis=1)] if row else each
            rows.append(first + trips.start[used] * len(self.delays_s) + row)
            columns.append(used)
            values.append(trips.there_s[used] + trips.back_s[used, end[used]])
        entries = np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))
        return equal, csr_array(entries, (len(self.upper), number))

    def solved(self, trips: Trips) -> _Solution | None:
        """Solve the program with these trips; None if numbers of nodes cannot add up."""
        equal, upper = self.rows_of(trips)
        number = len(trips.start)
        solution = linprog(
            np.concatenate([self.cost, np.zeros(number)]),
            A_ub=hstack([self.structure[1], upper], "csr"), b_ub=self.upper_to,
            A_eq=hstack([self.structure[0], equal], "csr"), b_eq=self.equal_to,
            bounds=self.bounds + [(0, None)] * number,
        )  # fmt: skip
        if solution.x is None:
            return None
        nodes = solution.x[: self.box.low.size].reshape(self.box.low.shape)
        prices = solution.eqlin.marginals, np.minimum(solution.ineqlin.marginals, 0.0)
        return _Solution(float(solution.fun), nodes, solution.x[len(self.cost) :], *prices)

    def prices(self, of: _Solution) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sort prices: of room by class and row, of a visit by stage and class, of a start."""
        inner, classes = len(self.allowed) - 1, len(self.allowed[0])
        room = -of.upper[-self.room :].reshape(classes, len(self.delays_s))
        visit = -of.upper[: self.visits]
        if not self.even:
            visit = visit + of.upper[self.visits : 2 * self.visits]
            most, least = of.upper[2 * self.visits : -self.room].reshape(2, inner)
            visit = visit + np.repeat(least - most, classes)
        return room, visit.reshape(inner, classes), of.equal[-classes:]

    def violated_s(self, prices: _Solution, least_s: Float[np.ndarray, " classes"]) -> float:
        """Bound from below the violation of every placement of the box at these prices [s].

        With the price of a start raised by the cost of its cheapest trip, no trip has a negative
        cost. The rest is linear in the numbers of nodes, each between its bounds. For a plan
        without violations it is at most 0, whatever the prices, if those of inequalities are not
        positive (Lagrange).
        """
        equal = prices.equal.copy()
        equal[-len(least_s) :] += np.where(np.isfinite(least_s), least_s, 0.0)
        cost = -(equal @ self.equal + prices.upper @ self.upper)
        nodes_s = np.minimum(cost * self.box.low.ravel(), cost * self.box.high.ravel()).sum()
        return float(equal @ self.equal_to + prices.upper @ self.upper_to + nodes_s)
