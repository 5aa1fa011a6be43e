"""Many iterations without a barrier, and their mean duration.

In mode `outer` a node begins its next iteration as soon as it has ended one: all of its operations,
and the fragment that it has to apply then. Rings run in the background, and only the nodes that
apply their results wait for them. As every node keeps its order, no choice is left (`replay`).

Such a system becomes steady. The events of a cycle follow from the state in which it begins: the
times until which each node, connection and link, and the ring of each fragment, is occupied. If a
cycle increases each of these by at most some time, no later cycle takes longer on average. And if
the origins of these times, traced back through a cycle, form a circle, the cycle takes at least the
circle's mean. Once both are equal, that is the mean forever, and the simulation need not run until
the system is steady, which may take thousands of iterations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from skippipe_sched.problem.averaging import AveragingPolicy
from skippipe_sched.problem.plan import Predicted
from skippipe_sched.timing.averaging import quickest_averaging_s, rings_of_iteration
from skippipe_sched.timing.replay import Replay, Work
from skippipe_sched.timing.timeline import Averaging, TimeFactors, Timeline

# If the mean has not settled after this many cycles, or in large cases after this many operations,
# the mean of the later half is used.
LEAST_CYCLES, MOST_CYCLES = 8, 100
MOST_OPERATIONS = 2_000_000
# Cycles may alternate: up to this many are compared as one.
MOST_IN_TURN = 8
TOLERANCE = 1e-9


def steady_timeline(work: Work, stretch: TimeFactors | None = None) -> Timeline:
    """Simulate one iteration of the steady state of a plan.

    It is the iteration during which the rings run that were sent at the end of a cycle, and these
    rings are shown with it. `stretch` has factors on all times of every iteration.
    """
    run = _Iterations(work, stretch)
    iteration_s, late_s = _run_until_steady(run)
    pipeline_s = iteration_s
    if run.has_waited:
        pipeline_s, _ = _run_until_steady(_Iterations(work, stretch, without_rings=True))
    if work.case.averaging.delay:
        run.iterate()
    longest_s = max(map(run.ring_s, run.rings), default=0.0)
    return run.shown(Predicted(iteration_s, pipeline_s, longest_s, None, late_s))


def successive_s(work: Work, stretches: Iterable[TimeFactors]) -> list[float]:
    """Simulate a run: seconds from each iteration's end to the next one's, each with its stretch.

    An iteration has ended when its last node has. The first is counted from the start.
    """
    run = _Iterations(work)
    ends = [0.0]
    for stretch in stretches:
        run.set_factors(stretch)
        run.iterate()
        ends.append(max(run.free_s))
    return [after - before for before, after in pairwise(ends)]


def ring_beside_hops_s(work: Work, stage: int) -> float:
    """Compute the duration of a stage's ring, slowed by hops on its connections [s].

    Hops have priority. Where iterations wait for rings, there are no hops at the same time.
    """
    case, nodes = work.case, work.stages[stage]
    seconds = quickest_averaging_s(case, stage, tuple(nodes))
    if not case.leaves_location(nodes):
        return seconds
    busiest_s = max(work.sending_s[node] for node in nodes)
    return seconds + rings_of_iteration(case.averaging).delay * busiest_s


@dataclass
class _Ring:
    """Rings of a stage: their duration, and the times of the last one of each fragment.

    `needed_s` is when the last replica had ended the iteration at which it was sent. `origin` is
    the origin of its end (`_Iterations.origins`).
    """

    stage: int
    nodes: tuple[int, ...]
    seconds: float
    needed_s: list[float]
    start_s: list[float]
    end_s: list[float]
    origin: list[int]


class _Iterations(Replay):
    """Iterations with background rings: a node ends one when it has applied what is due."""

    def __init__(
        self, work: Work, stretch: TimeFactors | None = None, *, without_rings: bool = False
    ):
        case = work.case
        self.policy: AveragingPolicy = case.averaging
        self.number = 0
        count = self.policy.fragments
        self.rings = [
            _Ring(
                stage,
                tuple(nodes),
                0.0 if without_rings else ring_beside_hops_s(work, stage),
                needed_s=[-math.inf] * count,
                start_s=[-math.inf] * count,
                end_s=[-math.inf] * count,
                origin=[-1] * count,
            )
            for stage, nodes in enumerate(work.stages)
            if len(nodes) > 1
        ]
        self.late_s = 0.0
        self.has_waited = False
        super().__init__(work, stretch)

    def ring_s(self, ring: _Ring) -> float:
        """Return the current duration of a ring [s]."""
        return ring.seconds * self.ring_factor.item(ring.stage)

    def mark(self) -> None:
        """Begin a cycle: reset the origins of all times to the current nodes, queues and rings."""
        super().mark()
        self.late_s = 0.0
        for place, ring in enumerate(self.rings):
            first = len(self.free_s) + self.work.queues + place * len(ring.origin)
            ring.origin[:] = range(first, first + len(ring.origin))

    def state(self) -> Float[np.ndarray, " things"]:
        """Return when each node, each queue, and the last ring of each fragment is done [s]."""
        ends = [end_s for ring in self.rings for end_s in ring.end_s]
        return np.array([*self.free_s, *self.queue_free_s[:-1], *ends])

    def origins(self) -> list[int]:
        """Return for each entry of `state` the entry at the last `mark` that determined it."""
        rings = (origin for ring in self.rings for origin in ring.origin)
        return [*self.free_from, *self.queue_from[:-1], *rings]

    def iterate(self) -> None:
        """Run one more iteration."""
        self.number += 1
        self.run()
        policy = self.policy
        sent, due = policy.fragment_sent_after(self.number), None
        if self.number > policy.delay:
            due = policy.fragment_sent_after(self.number - policy.delay)
        if due is not None and policy.delay:
            self._apply(due)
        if sent is not None:
            self._send(sent)
        if due is not None and not policy.delay:
            self._apply(due)

    def _send(self, fragment: int) -> None:
        """Begin rings when the last replica is ready and the stage's previous ring is over."""
        for ring in self.rings:
            last = max(ring.nodes, key=self.free_s.__getitem__)
            start_s, origin = self.free_s[last], self.free_from[last]
            ring.needed_s[fragment] = start_s
            if ring.end_s[fragment - 1] > start_s:
                start_s, origin = ring.end_s[fragment - 1], ring.origin[fragment - 1]
            ring.start_s[fragment], ring.origin[fragment] = start_s, origin
            ring.end_s[fragment] = start_s + self.ring_s(ring)

    def _apply(self, fragment: int) -> None:
        """Let nodes wait for the fragment: a ring is late if it ends after all are ready."""
        for ring in self.rings:
            end_s = ring.end_s[fragment]
            self.late_s = max(self.late_s, end_s - max(self.free_s[node] for node in ring.nodes))
            for node in ring.nodes:
                if end_s > self.free_s[node]:
                    # Even without the ring, a node would wait for the other replicas.
                    self.has_waited |= end_s > ring.needed_s[fragment]
                    self.free_s[node], self.free_from[node] = end_s, ring.origin[fragment]

    def shown(self, steady: Predicted) -> Timeline:
        """Return the last iteration, and the rings of a cycle's last fragment, counted from 0 s."""
        rings = [(ring.stage, ring.start_s[-1], ring.end_s[-1]) for ring in self.rings]
        zero_s = min([*self.start_s, *(start_s for _, start_s, _ in rings)])
        averagings = [Averaging(s, start - zero_s, end - zero_s) for s, start, end in rings]
        return Timeline(
            len(self.work.case.nodes),
            self.runs(zero_s),
            self.transfers(zero_s),
            tuple(sorted(averagings, key=lambda averaging: averaging.start_s)),
            steady,
            tuple(began_s - zero_s for began_s in self.began_s),
        )


def _run_until_steady(run: _Iterations) -> tuple[float, float]:
    """Run until steady; return an iteration's mean seconds, and by how much rings are late then."""
    nodes, every = len(run.free_s), run.policy.every
    states, late = [], []
    mean_s = None
    operations = len(run.work.operations) * every
    while len(states) <= np.clip(MOST_OPERATIONS // operations, LEAST_CYCLES, MOST_CYCLES):
        run.mark()
        for _ in range(every):
            run.iterate()
        states.append(run.state())
        late.append(run.late_s)
        if len(states) == 1:
            continue
        # No later cycle takes longer on average than the least of these.
        most_s = {
            number: float((states[-1] - states[-1 - number]).max()) / number
            for number in range(1, min(MOST_IN_TURN + 1, len(states)))
        }
        number = min(most_s, key=lambda number: most_s[number])
        least_s = _slowest_cycle_s(run.origins(), states[-1] - states[-2])
        if most_s[number] - least_s > TOLERANCE * most_s[number]:
            continue
        mean_s = most_s[number] / every
        # Rings may limit the pace, which nodes notice only when all their delay is used up.
        if mean_s - _mean_s(states[-1 - number :], nodes, every) <= TOLERANCE * mean_s:
            return mean_s, max(late[-number:])
    half = len(states) // 2
    return mean_s or _mean_s(states[half:], nodes, every), max(late[half:])


def _mean_s(states: Sequence[Float[np.ndarray, " things"]], nodes: int, every: int) -> float:
    """Compute an iteration's mean seconds between the first and the last of these states."""
    first_s, last_s = (float(state[:nodes].max()) for state in (states[0], states[-1]))
    return (last_s - first_s) / (len(states) - 1) / every


def _slowest_cycle_s(origins: Sequence[int], longer_s: Float[np.ndarray, " things"]) -> float:
    """Find the greatest mean delay of a circle of entries, each the origin of the next."""
    greatest_s = 0.0
    walked = [-1] * len(origins)
    for start in range(len(origins)):
        place, visited = start, []
        while walked[place] < 0:
            walked[place] = start
            visited.append(place)
            place = origins[place]
        if walked[place] == start:
            cycle = visited[visited.index(place) :]
            greatest_s = max(greatest_s, float(longer_s[cycle].mean()))
    return greatest_s
