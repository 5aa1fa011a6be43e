"""Lower bound on an iteration with one placement in all of its parts.

`bound.lower_bound_s` minimizes each of its parts over placements separately: near nodes are one
stage where a ring should be fast, and different stages where paths should be short. This bound
searches for a placement that keeps a given time in all parts, by branch and bound. A branch
restricts each stage to some of its possible sets of nodes; the first one allows all. A branch is
closed when it is proved that no plan with these sets keeps the time. If all are closed, that time
is a bound.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from itertools import combinations_with_replacement, pairwise, permutations, product
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from skippipe_sched.problem.case import Case
from skippipe_sched.problem.node_subset import without_skipped_stages
from skippipe_sched.problem.rules import SHARE_TOLERANCE
from skippipe_sched.timing.averaging import all_reduce_bytes, rings_of_iteration
from skippipe_sched.timing.bound import lower_bound_s
from skippipe_sched.timing.one_node import NodeWork, busy_s
from skippipe_sched.timing.placement_trips import Box, Classes, OfPlaces, Relaxation, stage_kinds

# Limits on the sets of nodes of a stage, the orders of their rings, and the orders of stages on a
# path: a case with more has no better bound than the quick one.
MOST_SETS, MOST_RINGS, MOST_SEQUENCES = 20_000, 3_000_000, 3_000
# The search ends when the bound is known to this relative precision; its first steps are of this
# relative size.
PRECISION, STEP = 0.002, 0.04
# Branches first separate sets of data nodes whose rings differ by more than this share.
RING_SPREAD = 0.3


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
    """Branch and bound over the placements of one case."""

    def __init__(self, case: Case, path_length: int):
        """List the open choices of a case without `left_out` stages."""
        self.case = case
        self.classes = Classes(case, path_length)
        self.averaging = rings_of_iteration(case.averaging)
        counts = sorted(set(case.microbatches))
        self.places = [(0, case.microbatches.count(count), count) for count in counts]
        self.places += [(s, size, 0) for s, size in enumerate(case.stages) if s]
        self.stage_of = np.array([stage for stage, *_ in self.places])
        self.relaxation = Relaxation(case, self.classes, self.places)
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
            low[:, 0] = np.floor(self.relaxation.least * share + SHARE_TOLERANCE / 2)
            high[:, 0] = np.ceil(self.relaxation.most * share - SHARE_TOLERANCE / 2)
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
            nodes = self.relaxation.placement(self.box(branch), iteration_s)
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
