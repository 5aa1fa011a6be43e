"""Many iterations that follow one another without a barrier, and how long each takes then.

In mode `outer` a node goes on to its next iteration as soon as it has ended one: all of its
operations, and the fragment that it has to apply then. A ring goes on behind, and only who has to
apply what it brings waits for it. As every node keeps its order, no choice is left (`replay`).

Such a system becomes steady. What happens in a cycle follows from the state in which it begins:
when each node, connection and link, and the ring of each fragment, is through. If a cycle makes
none of them later by more than some time, no later cycle takes longer in the mean. And where what
a thing waits for, traced back through a cycle, leads round in a circle, the cycle takes the
circle's mean at least. Once both are the same, that is the mean for ever, and nothing has to be
waited for that would only come right after thousands of iterations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from skippipe_sched.problem.averaging import AveragingPolicy
from skippipe_sched.timing.averaging import quickest_averaging_s, rings_of_iteration
from skippipe_sched.timing.replay import Replay, Work
from skippipe_sched.timing.timeline import Averaging, SteadyState, Stretch, Timeline

# What has not settled after so many cycles, or in large cases after so many operations, is taken as
# it is: as the mean of the later half.
LEAST_CYCLES, MOST_CYCLES = 8, 100
MOST_OPERATIONS = 2_000_000
# Cycles may differ in turn: so many are compared as one.
MOST_IN_TURN = 8
TOLERANCE = 1e-9


def steady_timeline(work: Work, stretch: Stretch | None = None) -> Timeline:
    """Simulate one iteration of the steady state of a plan.

    It is the one beside which the rings run that were sent at the end of a cycle, and the rings
    are shown with it. With `stretch` everything takes so much longer in every iteration.
    """
    run = _Iterations(work, stretch)
    iteration_s, late_s = _settled(run)
    pipeline_s = iteration_s
    if run.has_waited:
        pipeline_s, _ = _settled(_Iterations(work, stretch, without_rings=True))
    if work.case.averaging.delay:
        run.iterate()
    longest_s = max(map(run.ring_s, run.rings), default=0.0)
    return run.shown(SteadyState(iteration_s, pipeline_s, longest_s, late_s))


def successive_s(work: Work, stretches: Iterable[Stretch]) -> list[float]:
    """Simulate a run: seconds from each iteration's end to the next one's, each with its stretch.

    An iteration has ended when its last node has. The first is reckoned from the start.
    """
    run = _Iterations(work)
    ends = [0.0]
    for stretch in stretches:
        run.stretch(stretch)
        run.iterate()
        ends.append(max(run.free_s))
    return [after - before for before, after in pairwise(ends)]


def beside_hops_s(work: Work, stage: int) -> float:
    """Compute what a ring of a stage takes beside hops with which it shares connections [s].

    Hops go first. Where iterations wait for rings, there are none beside them.
    """
    case, nodes = work.case, work.stages[stage]
    seconds = quickest_averaging_s(case, stage, tuple(nodes))
    if not case.leaves_location(nodes):
        return seconds
    busiest_s = max(work.sending_s[node] for node in nodes)
    return seconds + rings_of_iteration(case.averaging).delay * busiest_s


@dataclass
class _Ring:
    """The rings of a stage: what one takes, and of each fragment when the last one was.

    `needed_s` is when the last replica had ended the iteration at which it was sent. `origin` is
    what the end waited for (`_Iterations.origins`).
    """

    stage: int
    nodes: tuple[int, ...]
    seconds: float
    needed_s: list[float]
    start_s: list[float]
    end_s: list[float]
    origin: list[int]


class _Iterations(Replay):
    """Iterations with rings behind them: a node ends one when it has applied what it has to."""

    def __init__(self, work: Work, stretch: Stretch | None = None, *, without_rings: bool = False):
        case = work.case
        self.policy: AveragingPolicy = case.averaging
        self.number = 0
        count = self.policy.fragments
        self.rings = [
            _Ring(
                stage,
                tuple(nodes),
                0.0 if without_rings else beside_hops_s(work, stage),
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
        """Tell what a ring takes now [s]."""
        return ring.seconds * self.ring_factor.item(ring.stage)

    def mark(self) -> None:
        """Begin a cycle: name what nodes, queues and rings wait for by how they are now."""
        super().mark()
        self.late_s = 0.0
        for place, ring in enumerate(self.rings):
            first = len(self.free_s) + self.work.queues + place * len(ring.origin)
            ring.origin[:] = range(first, first + len(ring.origin))

    def state(self) -> Float[np.ndarray, " things"]:
        """Tell when each node, each queue, and each ring's last one of each fragment is through."""
        ends = [end_s for ring in self.rings for end_s in ring.end_s]
        return np.array([*self.free_s, *self.queue_free_s[:-1], *ends])

    def origins(self) -> list[int]:
        """Tell for each of the `state` what of it at the last `mark` it has waited for last."""
        rings = (origin for ring in self.rings for origin in ring.origin)
        return [*self.free_from, *self.queue_from[:-1], *rings]

    def iterate(self) -> None:
        """Run one iteration more."""
        self.number += 1
        self.run()
        policy = self.policy
        sent, due = policy.sent_after(self.number), None
        if self.number > policy.delay:
            due = policy.sent_after(self.number - policy.delay)
        if due is not None and policy.delay:
            self._apply(due)
        if sent is not None:
            self._send(sent)
        if due is not None and not policy.delay:
            self._apply(due)

    def _send(self, fragment: int) -> None:
        """Begin rings when the last replica is there and the stage's ring before is over."""
        for ring in self.rings:
            last = max(ring.nodes, key=self.free_s.__getitem__)
            start_s, origin = self.free_s[last], self.free_from[last]
            ring.needed_s[fragment] = start_s
            if ring.end_s[fragment - 1] > start_s:
                start_s, origin = ring.end_s[fragment - 1], ring.origin[fragment - 1]
            ring.start_s[fragment], ring.origin[fragment] = start_s, origin
            ring.end_s[fragment] = start_s + self.ring_s(ring)

    def _apply(self, fragment: int) -> None:
        """Let nodes wait for what they apply: a ring is late if it ends after the last of them."""
        for ring in self.rings:
            end_s = ring.end_s[fragment]
            self.late_s = max(self.late_s, end_s - max(self.free_s[node] for node in ring.nodes))
            for node in ring.nodes:
                if end_s > self.free_s[node]:
                    # Without it a node would wait for the others all the same.
                    self.has_waited |= end_s > ring.needed_s[fragment]
                    self.free_s[node], self.free_from[node] = end_s, ring.origin[fragment]

    def shown(self, steady: SteadyState) -> Timeline:
        """Show the last iteration, and the rings of the last fragment of a cycle, from 0 s on."""
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


def _settled(run: _Iterations) -> tuple[float, float]:
    """Run until steady; return an iteration's mean seconds, and by how much rings are late then."""
    nodes, every = len(run.free_s), run.policy.every
    states, late = [], []
    mean_s = None
    while len(states) <= _most_cycles(run):
        run.mark()
        for _ in range(every):
            run.iterate()
        states.append(run.state())
        late.append(run.late_s)
        if len(states) == 1:
            continue
        # No later cycle takes longer in the mean than the least of these says.
        most_s = {
            number: float((states[-1] - states[-1 - number]).max()) / number
            for number in range(1, min(MOST_IN_TURN + 1, len(states)))
        }
        number = min(most_s, key=lambda number: most_s[number])
        least_s = _slowest_circle_s(run.origins(), states[-1] - states[-2])
        if most_s[number] - least_s > TOLERANCE * most_s[number]:
            continue
        mean_s = most_s[number] / every
        # Rings may set a pace that nodes come to feel only when all their delay is used up.
        if mean_s - _mean_s(states[-1 - number :], nodes, every) <= TOLERANCE * mean_s:
            return mean_s, max(late[-number:])
    half = len(states) // 2
    return mean_s or _mean_s(states[half:], nodes, every), max(late[half:])


def _most_cycles(run: _Iterations) -> int:
    operations = len(run.work.operations) * run.policy.every
    return int(np.clip(MOST_OPERATIONS // operations, LEAST_CYCLES, MOST_CYCLES))


def _mean_s(states: Sequence[Float[np.ndarray, " things"]], nodes: int, every: int) -> float:
    """Compute an iteration's mean seconds from those after which first and last states are."""
    first_s, last_s = (float(state[:nodes].max()) for state in (states[0], states[-1]))
    return (last_s - first_s) / (len(states) - 1) / every


def _slowest_circle_s(origins: Sequence[int], longer_s: Float[np.ndarray, " things"]) -> float:
    """Find the greatest mean delay of things in a circle, each the origin of the next."""
    greatest_s = 0.0
    walked = [-1] * len(origins)
    for start in range(len(origins)):
        place, way = start, []
        while walked[place] < 0:
            walked[place] = start
            way.append(place)
            place = origins[place]
        if walked[place] == start:
            circle = way[way.index(place) :]
            greatest_s = max(greatest_s, float(longer_s[circle].mean()))
    return greatest_s
