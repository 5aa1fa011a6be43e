"""Simulation of one run under churn, by one policy.

The model: each node is a host of its own. A loss is detected after the heartbeat timeout, until
which all hosts wait. The step in progress is lost and run again. The remaining hosts form the next
generation (`regroup_s`) and make the repair plan (`planning_s`); a further loss meanwhile restarts
this. A returning host, with its software started and compiled, is admitted when the current step
has committed, also by a new generation, and fetches the state of its stage from a replica; all
hosts wait for that. Checkpoints stop all hosts for `save_s` every `save_every` steps.

When no remaining host holds a stage, the policy decides:

- `rewind`: all hosts return to the last checkpoint, which takes `restore_s`. If a stage has no host
  at all, a host of one of the fullest stages moves there (`repair.fill_empty_stages`), now and
  whenever this happens again; it returns to its own stage when others serve the new one again.
- `buddy`: a node of the next stage receives a copy of each stage, one part in each of `copy_every`
  steps of a generation, and then again from the start. A step takes at least as long as its part. A
  lost stage continues from the last complete copy, the other stages from their current state.
- `average`: an inner stage whose two neighbors both live gets the mean of their parameters.
- `skip`: the others train without the stage until one of its hosts is back, which reads it from the
  last checkpoint.
- `stop`: the run restarts, as under `restart` after any loss.

Where `buddy`, `average` or `skip` is impossible, the run rewinds: the copy is lost with the stage
or was never complete; a stage lacks one of its neighbors; it is the data stage. `buddy` and
`average` also rewind if the last step is that of the checkpoint.

A run restarts when all its hosts are present at once. That takes `restart_s`, including reading the
checkpoint. Under every policy it must restart if at least half of the hosts of a generation are
lost before the next one has formed (of two hosts, one remaining host suffices), or if there are
fewer hosts than stages.

Not modeled: changes of links and nodes; notice before a loss; the better plan that a search finds
later, except that moved hosts return; rejection of hosts that come and go too often; other traffic
on the links that carry states and copies; and the loss in quality due to an inexact recovery. A
microbatch is useful if its step committed and was not undone, whichever stages it skipped.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from skippipe_sched.churn.policies import (
    AVERAGE,
    BUDDY,
    POLICIES,
    RESTART,
    REWIND,
    SKIP,
    STOP,
    recovery_of,
)
from skippipe_sched.methods.repair import fill_empty_stages
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement

DETECTING = "noticing"
"""Activity in which all hosts wait until a loss is detected."""
REGROUPING = "regrouping"
"""Activity in which a generation forms, and states are fetched or read from a checkpoint."""
DOWN = "down"
"""Activity in which the run has ended, waits for all its hosts, and restarts."""
ACTIVITIES = (DETECTING, REGROUPING, DOWN)
IterationTime = Callable[[Placement], float]


class Change(NamedTuple):
    """Loss or return of a node at a time [s]."""

    time_s: float
    node: int
    is_return: bool


def draw_changes(
    nodes: int, mtbf_s: float, repair_s: float, end_s: float, seed: int
) -> tuple[Change, ...]:
    """Draw all changes before `end_s`, in order of time; all nodes are present at first.

    A present node fails after an exponentially distributed time with mean `mtbf_s`, so its faults
    are a Poisson process while it is present. It returns `repair_s` later. Each node has its own
    random numbers, the same at every rate: with half the `mtbf_s`, each of its lives is half as
    long.
    """
    lives = (_changes_of_node(node, mtbf_s, repair_s, end_s, seed) for node in range(nodes))
    return tuple(heapq.merge(*lives))


def _changes_of_node(
    node: int, mtbf_s: float, repair_s: float, end_s: float, seed: int
) -> Iterator[Change]:
    random = np.random.default_rng((seed, node))
    time_s = mtbf_s * random.standard_exponential()
    while time_s < end_s:
        yield Change(time_s, node, is_return=False)
        time_s += repair_s
        if time_s >= end_s:
            return
        yield Change(time_s, node, is_return=True)
        time_s += mtbf_s * random.standard_exponential()


@dataclass(frozen=True)
class ChurnCosts:
    """Costs of churn other than slower iterations [s]; the module says when each is paid.

    `state_factor` is a stage's state as a multiple of its `stage_bytes`.
    """

    heartbeat_s: float
    regroup_s: float
    restore_s: float
    restart_s: float
    save_every: int
    save_s: float
    copy_every: int
    state_factor: float
    planning_s: float = 0.0


@dataclass
class Record:
    """Result of a run.

    Attributes:
        steps: steps that committed and were not undone.
        undone: steps that committed and were undone by a return to a checkpoint.
        losses: members of the run that were lost.
        returns: number of times that returning hosts were admitted after a step.
        recoveries: by policy, how often a generation began without a stage that the last one had.
        spent_s: seconds that `DETECTING`, `REGROUPING` and `DOWN` took.
    """

    steps: int = 0
    undone: int = 0
    losses: int = 0
    returns: int = 0
    recoveries: Counter[str] = field(default_factory=Counter)
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACTIVITIES, 0.0))


def simulate_run(
    plan: Plan,
    policy: str,
    costs: ChurnCosts,
    changes: tuple[Change, ...],
    end_s: float,
    iteration_s: IterationTime,
) -> Record:
    """Simulate a run with all nodes of a plan under a policy; return its record at `end_s`.

    `iteration_s` gives the duration of an iteration by placement; a skipped stage has no nodes.
    """
    return _Simulation(plan, policy, costs, changes, end_s, iteration_s).record()


@dataclass(eq=False)
class _Simulation:
    """State of a run: the time, present nodes, members, and holders of states and copies."""

    plan: Plan
    policy: str
    costs: ChurnCosts
    changes: tuple[Change, ...]
    end_s: float
    iteration_s: IterationTime

    def __post_init__(self):
        self.state_bytes = [self.costs.state_factor * size for size in self.plan.case.stage_bytes]
        self.coming = deque(self.changes)
        self.present = set(range(len(self.plan.case.nodes)))
        self.now_s = 0.0
        self.saved = 0
        self.stage_of = list(self.plan.stage_of)
        # Members of the generation, their number when it formed, and the members that have the
        # state of their stage.
        self.members = set(self.present)
        self.formed = len(self.members)
        self.holders = set(self.members)
        # Holder of the copy of each stage, and the stages that the others train without.
        self.copies: dict[int, int] = {}
        self.skipped: set[int] = set()
        self.result = Record()

    @property
    def next_s(self) -> float:
        """Time of the next change [s]; infinite if there is none."""
        return self.coming[0].time_s if self.coming else float("inf")

    def apply_next(self) -> Change:
        """Apply the next change to the present nodes and return it."""
        change = self.coming.popleft()
        (self.present.add if change.is_return else self.present.discard)(change.node)
        return change

    def record(self) -> Record:
        while self.now_s < self.end_s:
            lost = self.train()
            if self.now_s < self.end_s:
                self.next_generation(lost=lost)
        return self.result

    # Training.

    def train(self) -> bool:
        """Run steps until a host is lost (true), or a step ends after others have returned."""
        placement = self.placement(self.members)
        costs, iteration_s = self.costs, self.iteration_s(placement)
        if self.policy == BUDDY:
            iteration_s = max(iteration_s, self.copied_s(placement, costs.copy_every))
        pace = StepSchedule(
            self.now_s, self.result.steps, iteration_s, costs.save_every, costs.save_s
        )
        join_s = float("inf")
        while True:
            next_s = self.next_s
            if min(next_s, join_s) >= self.end_s:
                self.settle(pace, placement, self.end_s)
                return False
            if join_s <= next_s:
                self.settle(pace, placement, join_s)
                self.result.returns += 1
                return False
            change = self.apply_next()
            if self.drop_lost(change):
                self.settle(pace, placement, change.time_s)
                return True
            if change.is_return:
                join_s = min(join_s, pace.free_after(change.time_s))
            elif self.present == self.members:
                join_s = float("inf")

    def settle(self, pace: StepSchedule, placement: Placement, time_s: float) -> None:
        """Advance to a time: steps commit, checkpoints and copies complete, if due by then."""
        self.now_s = time_s
        self.result.steps = pace.steps_by(time_s)
        saved = pace.saved_by(time_s)
        self.saved = self.saved if saved is None else saved
        if self.policy == BUDDY and self.result.steps - pace.step >= self.costs.copy_every:
            kept = copy_holders(placement).items()
            self.copies = {stage: node for stage, node in kept if node in self.members}

    def placement(self, nodes: set[int]) -> Placement:
        """Sort these nodes by stage: first those that the plan puts there, in its order."""
        placed = [
            [node for node in stage if node in nodes and self.stage_of[node] == number]
            for number, stage in enumerate(self.plan.stages)
        ]
        for node in sorted(nodes):
            if self.stage_of[node] != self.plan.stage_of[node]:
                placed[self.stage_of[node]].append(node)
        return tuple(map(tuple, placed))

    def drop_lost(self, change: Change) -> bool:
        """Return whether a change is the loss of a member; drop the member and what it holds."""
        if change.is_return or change.node not in self.members:
            return False
        self.members.discard(change.node)
        self.holders.discard(change.node)
        self.copies = {stage: node for stage, node in self.copies.items() if node != change.node}
        self.result.losses += 1
        return True

    # The next generation.

    def next_generation(self, *, lost: bool) -> None:
        """Continue after a loss, or with returning hosts, until all present hosts may train."""
        while self.now_s < self.end_s:
            if lost:
                if not self.wait(self.costs.heartbeat_s, DETECTING):
                    continue
                of_two = self.formed == 2 and self.members
                is_majority = 2 * len(self.members) > self.formed or of_two
                if not (POLICIES[self.policy].survives and is_majority):
                    self.restart()
                    return
            lost = True
            if self.wait(self.costs.regroup_s + self.costs.planning_s, REGROUPING):
                seconds = self.generation_s()
                if seconds is None:
                    self.restart()
                    return
                if self.wait(seconds, REGROUPING):
                    self.holders = set(self.members)
                    return

    def wait(self, seconds: float, activity: str) -> bool:
        """Let time pass; return false as soon as a member is lost."""
        until_s = self.now_s + seconds
        while self.next_s <= until_s:
            change = self.apply_next()
            if self.drop_lost(change):
                self.advance_to(change.time_s, activity)
                return False
        self.advance_to(until_s, activity)
        return True

    def advance_to(self, time_s: float, activity: str) -> None:
        """Advance to a time; add the time until then to the time spent."""
        spent_s = min(time_s, self.end_s) - min(self.now_s, self.end_s)
        self.result.spent_s[activity] += spent_s
        self.now_s = time_s

    def generation_s(self) -> float | None:
        """Admit all present hosts; return the seconds until they have their states.

        None if the run has to restart.
        """
        self.members = set(self.present)
        self.formed = len(self.members)
        held = [
            {node for node in self.holders if self.stage_of[node] == stage}
            for stage in range(len(self.plan.stages))
        ]
        lost = [stage for stage, holders in enumerate(held) if not holders]
        if not lost:
            self.return_moved()
            return self.fetched_s(held)
        recovery = recovery_of(self.policy, lost, held, self.copies)
        if recovery in (BUDDY, AVERAGE) and self.result.steps == self.saved:
            recovery = REWIND  # No steps are lost.
        if recovery == STOP or (recovery != SKIP and not self.refill()):
            return None
        if not self.skipped.issuperset(lost):
            self.result.recoveries[recovery] += 1
        placed = self.placement(self.members)
        self.skipped = set()
        if recovery == SKIP:
            self.skipped = {stage for stage in lost if not placed[stage]}
            is_read = len(self.skipped) < len(lost)
            return max(self.fetched_s(held), self.costs.restore_s if is_read else 0.0)
        if recovery == REWIND:
            self.rewind()
            return self.costs.restore_s
        if recovery == BUDDY:
            held = [holders or {self.copies[stage]} for stage, holders in enumerate(held)]
            return self.fetched_s(held)
        averaged_s = [
            self.averaged_s(stage, placed[stage], (held[stage - 1], held[stage + 1]))
            for stage in lost
        ]
        return max(self.fetched_s(held), *averaged_s)

    def fetched_s(self, held: list[set[int]]) -> float:
        """Compute the seconds until all members that can fetch states from holders have them."""
        placed = self.placement(self.members)
        return max(
            self.transferred_s(self.state_bytes[stage], placed[stage], holders)
            for stage, holders in enumerate(held)
            if holders
        )

    def refill(self) -> bool:
        """Move hosts to the empty stages; return whether there are enough hosts."""
        if len(self.members) < len(self.plan.stages):
            return False
        if not all(self.placement(self.members)):
            all_placed = self.placement(set(range(len(self.stage_of))))
            moved = fill_empty_stages(replace(self.plan, stages=all_placed), self.members)
            for stage, nodes in enumerate(moved):
                for node in nodes:
                    if self.stage_of[node] != stage:
                        self.stage_of[node] = stage
                        self.holders.discard(node)
        return True

    def return_moved(self) -> None:
        """Return moved hosts to their own stages, if no stage is then without a host."""
        own = self.plan.stage_of
        if len({own[node] for node in self.members}) == len(self.plan.stages):
            for node in self.members:
                if self.stage_of[node] != own[node]:
                    self.stage_of[node] = own[node]
                    self.holders.discard(node)

    def rewind(self) -> None:
        """Return all hosts to the last checkpoint; drop the states that they hold."""
        self.result.undone += self.result.steps - self.saved
        self.result.steps = self.saved
        self.holders = set()
        self.copies = {}

    def restart(self) -> None:
        """End all hosts and restart them from the last checkpoint when all are present."""
        self.result.recoveries[RESTART] += 1
        self.rewind()
        self.skipped = set()
        self.stage_of = list(self.plan.stage_of)
        while self.now_s < self.end_s:
            while len(self.present) < len(self.stage_of) and self.next_s < self.end_s:
                self.advance_to(self.apply_next().time_s, DOWN)
            if len(self.present) < len(self.stage_of):
                self.advance_to(self.end_s, DOWN)
                return
            self.members = set(self.present)
            self.formed = len(self.members)
            if self.wait(self.costs.restart_s, DOWN):
                self.holders = set(self.members)
                return

    # Transfers of states, each over the best link from one of its holders. They run in parallel
    # and none waits for another: a set of them takes as long as its longest.

    def averaged_s(self, stage: int, targets: Sequence[int], sources: Sequence[set[int]]) -> float:
        """Compute the seconds until all `targets` have both neighbors' parameters, in turn.

        `sources` are the nodes that hold the stage before and the stage after; equal stages have
        equal numbers of bytes.
        """
        size = self.plan.case.stage_bytes[stage]
        return sum(self.transferred_s(size, targets, holders) for holders in sources)

    def copied_s(self, placement: Sequence[Sequence[int]], parts: int) -> float:
        """Compute the seconds until the buddies of all stages have one part of their copies."""
        return max(
            (
                self.transferred_s(self.state_bytes[stage] / parts, [node], placement[stage][:1])
                for stage, node in copy_holders(placement).items()
            ),
            default=0.0,
        )

    def transferred_s(self, size: float, targets: Sequence[int], holders: Collection[int]) -> float:
        """Compute the seconds until all `targets` have data of this size from the `holders`."""
        missing = [node for node in targets if node not in holders]
        if not missing:
            return 0.0
        latency_s, bandwidth = self.plan.case.link_matrices
        # From each holder (row) to each target (column).
        pairs = np.ix_(sorted(holders), missing)
        each_s = latency_s[pairs] + size / bandwidth[pairs]
        return float(each_s.min(axis=0).max())


# Bound on the steps of a run; the range that is bisected must have a machine-word length.
MOST_STEPS = 10**15


@dataclass(frozen=True)
class StepSchedule:
    """Schedule of steps of `iteration_s` each, from `start_s` on, after `step` steps.

    After every `save_every` steps a checkpoint stops all hosts for `save_s`.
    """

    start_s: float
    step: int
    iteration_s: float
    save_every: int
    save_s: float

    def commit_s(self, step: int) -> float:
        """Return the time at which a later step commits [s]."""
        return self._time_s(step, step - 1)

    def free_s(self, step: int) -> float:
        """Return the time at which a step and its checkpoint, if it has one, are complete [s]."""
        return self._time_s(step, step)

    def _time_s(self, step: int, saved: int) -> float:
        checkpoints = saved // self.save_every - self.step // self.save_every
        return self.start_s + (step - self.step) * self.iteration_s + checkpoints * self.save_s

    def steps_by(self, time_s: float) -> int:
        """Return the last step that commits by this time."""
        most = min(MOST_STEPS, int((time_s - self.start_s) / self.iteration_s) + 1)
        later = range(self.step + 1, self.step + most + 1)
        return self.step + bisect_right(later, time_s, key=self.commit_s)

    def saved_by(self, time_s: float) -> int | None:
        """Return the last of these steps whose checkpoint is complete by this time, if any."""
        step = self.steps_by(time_s) // self.save_every * self.save_every
        if step > self.step and self.free_s(step) > time_s:
            step -= self.save_every
        return step if step > self.step else None

    def free_after(self, time_s: float) -> float:
        """Return the time at which the step or checkpoint in progress at a time is done [s]."""
        step = self.steps_by(time_s)
        return self.free_s(step) if self.free_s(step) >= time_s else self.free_s(step + 1)


def copy_holders(placement: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return the holder of each stage's copy: the first node of the next non-empty stage, cyclic.

    The copy is sent by the first node of the stage itself, as in a run.
    """
    holders = {}
    for stage, nodes in enumerate(placement):
        others = chain(*placement[stage + 1 :], *placement[:stage])
        holder = next(others, None)
        if nodes and holder is not None:
            holders[stage] = holder
    return holders
