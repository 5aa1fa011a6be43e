"""Relaxation of the trips of microbatches through partly open placements.

It decides whether an iteration may take at most a given time, if a placement is known only by the
least and most nodes of each class in each stage. It proves that this is impossible, by prices
(Lagrange): the violations of a plan cost nothing at any prices, so if their cost is positive at
some prices for all numbers of nodes and all trips, there is no plan. That sum is computed here, so
the proof does not depend on the precision of the linear program that finds the prices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import linprog
from scipy.sparse import csr_array, eye_array, hstack

from skippipe_sched.problem.case import Case
from skippipe_sched.problem.rules import sequence_problem

OfPlaces = Float[np.ndarray, "places classes"]
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


class Relaxation:
    """Placements and trips as a linear program, with trips generated according to prices.

    Places are the stages, stage 0 once for each number of microbatches that a data node may have:
    `places[g]` are stage, number of nodes, and microbatches of each of them. The unknowns are, as
    real numbers, the nodes of each class in each place, and how often each trip is made. They keep
    the conditions of every plan: sizes of places, numbers of nodes in classes, microbatches of data
    nodes, CC1, CC2 (except for `MOST_DISTINGUISHED`), CC3, TC1, and room in memory (`_Program`).
    """

    def __init__(self, case: Case, classes: Classes, places: Sequence[tuple[int, int, int]]):
        """Start without trips; `places` as above."""
        self.classes, self.places = classes, places
        self.stage_of = np.array([stage for stage, *_ in places])
        inner, visits = len(case.stages) - 1, sum(case.microbatches) * classes.visited
        self.least, self.most = visits // inner, -(-visits // inner)
        no_sequences = np.zeros((0, classes.visited), dtype=int)
        self.trips = self.trips_of(no_sequences[:, 0], no_sequences, no_sequences)

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

    def placement(self, box: Box, iteration_s: float) -> OfPlaces | None:
        """Find numbers of nodes for which `iteration_s` may suffice; None if proved impossible."""
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

    def __init__(self, of: Relaxation, box: Box, iteration_s: float):
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

    def adding_up(self, of: Relaxation) -> tuple[np.ndarray, np.ndarray]:
        """Return the equalities over numbers of nodes, and their right-hand sides."""
        places, classes = self.box.low.shape
        counts = np.tile(np.eye(classes), places)
        sent = np.repeat([count for *_, count in of.places], classes) * counts
        equal = np.vstack([np.repeat(np.eye(places), classes, axis=1), counts, -sent])
        sizes = [size for _, size, _ in of.places]
        return equal, np.concatenate([sizes, of.classes.count, np.zeros(classes)])

    def shares(self, of: Relaxation) -> list[np.ndarray]:
        """Return the upper limits of the nodes' visits, and if needed the lower ones."""
        data = int((of.stage_of == 0).sum())
        column = np.arange(data * self.allowed.shape[1], self.box.low.size)
        above, below = np.zeros((2, self.visits, self.box.low.size))
        above[np.arange(self.visits), column] = -self.box.visits_high[data:].ravel()
        below[np.arange(self.visits), column] = self.box.visits_low[data:].ravel()
        of_stages = np.zeros((2 * (len(self.allowed) - 1), self.box.low.size))
        return [above] if self.even else [above, below, of_stages]

    def free_s(self, of: Relaxation, iteration_s: float) -> np.ndarray:
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
