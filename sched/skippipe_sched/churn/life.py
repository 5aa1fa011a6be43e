"""One run under churn: what it gets done until the end, by one policy.

What is modelled. Each node is a host of its own. A loss shows after the heartbeat's timeout, until
which all wait. The step that was in hand is lost, and run again. Those left form the next
generation (`regroup_s`) and make the instant plan (`planning_s`); whoever is lost meanwhile makes
them begin anew. A host that is back, its software started and compiled, is taken in when the step
under way has counted, by a generation too, and fetches the state of its stage from a replica; all
wait for that. Checkpoints stop all hosts for `save_s` every `save_every` steps.

Where no host is left that holds a stage, the policy decides:

- `rewind`: all go back to the last checkpoint, which takes `restore_s`. Where a stage has no host
  at all, one of the fullest moves there (`without_nodes.refilled`), now and whenever else that
  happens; it goes back to its own stage when others serve that one again.
- `buddy`: a copy of each stage goes to a node of the next one, a part in each of `copy_every` steps
  of a generation, and then anew. A step takes as long as its part at least. A lost stage goes on
  from the last whole copy, the others from where they were.
- `average`: an inner stage whose neighbours both live gets the mean of their parameters.
- `skip`: the others train without the stage until a host of it is back, which reads it from the
  last checkpoint.
- `stop`: the run starts again, as by `restart` after any loss.

Where `buddy`, `average` or `skip` cannot, they rewind: the copy is lost with the stage, or never
was whole; a stage has no two neighbours; it is the data stage. So do the first two where the last
step is that of the checkpoint.

A run starts again when all its hosts are there at once. That takes `restart_s`, reading the
checkpoint included. By any policy it has to where half of the hosts of a generation or more are
lost before the next one has formed (of two hosts one goes on), or where there are fewer than
stages.

What is not modelled: links and nodes that change; a notice before a loss; the better plan that a
search finds later, but for the way back of those that have moved; hosts that are held off as they
come and go too often; what else goes over the links on which states and copies do; and what an
inexact recovery costs in loss. A microbatch is useful when its step counted and was not undone,
whichever stages it skipped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from skippipe_sched.churn.faults import Attendance, Change
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
from skippipe_sched.methods.without_nodes import refilled
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement

NOTICING = "noticing"
"""All wait for a loss to show."""
REGROUPING = "regrouping"
"""A generation forms, and states are fetched, or read from a checkpoint."""
DOWN = "down"
"""The run has ended, waits for all its hosts, and starts again."""
SPENT = (NOTICING, REGROUPING, DOWN)
IterationTime = Callable[[Placement], float]


@dataclass(frozen=True)
class Costs:
    """What churn costs besides slower iterations [s]; the module says when each is paid.

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
    """What became of a run.

    Attributes:
        steps: those that counted and were not undone.
        undone: steps that counted, and were undone by going back to a checkpoint.
        losses: hosts that were lost while they took part.
        returns: times that a step was followed by taking in hosts that were back.
        recoveries: by policy, how often a generation began without a stage that the last one had.
        spent_s: seconds that `NOTICING`, `REGROUPING` and `DOWN` took.
    """

    steps: int = 0
    undone: int = 0
    losses: int = 0
    returns: int = 0
    recoveries: dict[str, int] = field(default_factory=dict)
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SPENT, 0.0))


def live(
    plan: Plan,
    policy: str,
    costs: Costs,
    changes: tuple[Change, ...],
    end_s: float,
    iteration_s: IterationTime,
) -> Record:
    """Let a run with all nodes of a plan live by a policy; return what it has done by `end_s`.

    `iteration_s` says how long an iteration takes by who serves which stage; a stage that is
    skipped has nobody.
    """
    return _Life(plan, policy, costs, changes, end_s, iteration_s).record()


@dataclass(eq=False)
class _Life:
    """The state of a run: what time it is, who takes part, who holds what."""

    plan: Plan
    policy: str
    costs: Costs
    changes: tuple[Change, ...]
    end_s: float
    iteration_s: IterationTime

    def __post_init__(self):
        self.states = States(self.plan.case, self.costs.state_factor)
        self.hosts = Attendance(len(self.plan.case.nodes), self.changes)
        self.now_s = 0.0
        self.saved = 0
        self.stage_of = list(self.plan.stage_of)
        # Who takes part in the generation, how many did when it formed, and who of them has the
        # state of his stage.
        self.members = set(self.hosts.there)
        self.formed = len(self.members)
        self.holders = set(self.members)
        # Who has the copy of each stage, and which stages the others train without.
        self.copies: dict[int, int] = {}
        self.skipped: set[int] = set()
        self.told = Record()

    def record(self) -> Record:
        while self.now_s < self.end_s:
            lost = self.train()
            if self.now_s < self.end_s:
                self.go_on(lost=lost)
        return self.told

    # Training.

    def train(self) -> bool:
        """Make steps until a host is lost (true), or others are back and a step is at its end."""
        placement = self.placement(self.members)
        costs, iteration_s = self.costs, self.iteration_s(placement)
        if self.policy == BUDDY:
            iteration_s = max(iteration_s, self.states.copied_s(placement, costs.copy_every))
        pace = Pace(self.now_s, self.told.steps, iteration_s, costs.save_every, costs.save_s)
        join_s = float("inf")
        while True:
            next_s = self.hosts.next_s
            if min(next_s, join_s) >= self.end_s:
                self.settle(pace, placement, self.end_s)
                return False
            if join_s <= next_s:
                self.settle(pace, placement, join_s)
                self.told.returns += 1
                return False
            change = self.hosts.take()
            if self.misses(change):
                self.settle(pace, placement, change.time_s)
                return True
            if change.is_back:
                join_s = min(join_s, pace.free_after(change.time_s))
            elif self.hosts.there == self.members:
                join_s = float("inf")

    def settle(self, pace: Pace, placement: Placement, time_s: float) -> None:
        """Go on to a time: steps that count by then do, checkpoints and copies are whole."""
        self.now_s = time_s
        self.told.steps = pace.steps_by(time_s)
        saved = pace.saved_by(time_s)
        self.saved = self.saved if saved is None else saved
        if self.policy == BUDDY and self.told.steps - pace.step >= self.costs.copy_every:
            kept = buddies(placement).items()
            self.copies = {stage: node for stage, node in kept if node in self.members}

    def placement(self, nodes: set[int]) -> Placement:
        """Sort these nodes by stage: first those whose stage it is in the plan, in its order."""
        placed = [
            [node for node in stage if node in nodes and self.stage_of[node] == number]
            for number, stage in enumerate(self.plan.stages)
        ]
        for node in sorted(nodes):
            if self.stage_of[node] != self.plan.stage_of[node]:
                placed[self.stage_of[node]].append(node)
        return tuple(map(tuple, placed))

    def misses(self, change: Change) -> bool:
        """Tell whether a change is the loss of a member; drop a lost one and what he holds."""
        if change.is_back or change.node not in self.members:
            return False
        self.members.discard(change.node)
        self.holders.discard(change.node)
        self.copies = {stage: node for stage, node in self.copies.items() if node != change.node}
        self.told.losses += 1
        return True

    # The next generation.

    def go_on(self, *, lost: bool) -> None:
        """Go on after a loss, or with those that are back, until all that are there may train."""
        while self.now_s < self.end_s:
            if lost:
                if not self.wait(self.costs.heartbeat_s, NOTICING):
                    continue
                of_two = self.formed == 2 and self.members
                is_majority = 2 * len(self.members) > self.formed or of_two
                if not (POLICIES[self.policy].survives and is_majority):
                    self.start_again()
                    return
            lost = True
            if self.wait(self.costs.regroup_s + self.costs.planning_s, REGROUPING):
                seconds = self.generation_s()
                if seconds is None:
                    self.start_again()
                    return
                if self.wait(seconds, REGROUPING):
                    self.holders = set(self.members)
                    return

    def wait(self, seconds: float, what_for: str) -> bool:
        """Let time pass; false as soon as one who takes part is lost."""
        until_s = self.now_s + seconds
        while self.hosts.next_s <= until_s:
            change = self.hosts.take()
            if self.misses(change):
                self.pass_to(change.time_s, what_for)
                return False
        self.pass_to(until_s, what_for)
        return True

    def pass_to(self, time_s: float, what_for: str) -> None:
        """Go on to a time; count the time until then as spent."""
        spent_s = min(time_s, self.end_s) - min(self.now_s, self.end_s)
        self.told.spent_s[what_for] += spent_s
        self.now_s = time_s

    def generation_s(self) -> float | None:
        """Take in all that are there; seconds until they have their states.

        None where the run has to start again.
        """
        self.members = set(self.hosts.there)
        self.formed = len(self.members)
        held = [
            {node for node in self.holders if self.stage_of[node] == stage}
            for stage in range(len(self.plan.stages))
        ]
        lost = [stage for stage, holders in enumerate(held) if not holders]
        if not lost:
            self.go_home()
            return self.fetched_s(held)
        recovery = recovery_of(self.policy, lost, held, self.copies)
        if recovery in (BUDDY, AVERAGE) and self.told.steps == self.saved:
            recovery = REWIND  # Nothing is lost by it.
        if recovery == STOP or (recovery != SKIP and not self.refill()):
            return None
        if not self.skipped.issuperset(lost):
            self.count(recovery)
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
            self.states.averaged_s(stage, placed[stage], (held[stage - 1], held[stage + 1]))
            for stage in lost
        ]
        return max(self.fetched_s(held), *averaged_s)

    def fetched_s(self, held: list[set[int]]) -> float:
        """Compute the seconds until all who can take their states from holders have them."""
        placed = self.placement(self.members)
        return max(
            self.states.fetched_s(stage, placed[stage], holders)
            for stage, holders in enumerate(held)
            if holders
        )

    def refill(self) -> bool:
        """Move hosts to the stages that have none; whether there are enough of them."""
        if len(self.members) < len(self.plan.stages):
            return False
        if not all(self.placement(self.members)):
            everywhere = self.placement(set(range(len(self.stage_of))))
            moved = refilled(replace(self.plan, stages=everywhere), self.members)
            for stage, nodes in enumerate(moved):
                for node in nodes:
                    if self.stage_of[node] != stage:
                        self.stage_of[node] = stage
                        self.holders.discard(node)
        return True

    def go_home(self) -> None:
        """Send those that have moved back to their own stages, once none is without a host then."""
        own = self.plan.stage_of
        if len({own[node] for node in self.members}) == len(self.plan.stages):
            for node in self.members:
                if self.stage_of[node] != own[node]:
                    self.stage_of[node] = own[node]
                    self.holders.discard(node)

    def rewind(self) -> None:
        """Take all back to the last checkpoint; what they hold counts no more."""
        self.told.undone += self.told.steps - self.saved
        self.told.steps = self.saved
        self.holders = set()
        self.copies = {}

    def start_again(self) -> None:
        """End all, and start them together when all are there, from the last checkpoint."""
        self.count(RESTART)
        self.rewind()
        self.skipped = set()
        self.stage_of = list(self.plan.stage_of)
        while self.now_s < self.end_s:
            while len(self.hosts.there) < len(self.stage_of) and self.hosts.next_s < self.end_s:
                self.pass_to(self.hosts.take().time_s, DOWN)
            if len(self.hosts.there) < len(self.stage_of):
                self.pass_to(self.end_s, DOWN)
                return
            self.members = set(self.hosts.there)
            self.formed = len(self.members)
            if self.wait(self.costs.restart_s, DOWN):
                self.holders = set(self.members)
                return

    def count(self, recovery: str) -> None:
        self.told.recoveries[recovery] = self.told.recoveries.get(recovery, 0) + 1


# No run has more of them; what is looked through has a length that fits into a word.
MOST_STEPS = 10**15


@dataclass(frozen=True)
class Pace:
    """Steps of `iteration_s` each, from `start_s` on, when `step` of them have been made.

    After every `save_every` steps a checkpoint stops all for `save_s`.
    """

    start_s: float
    step: int
    iteration_s: float
    save_every: int
    save_s: float

    def counts_s(self, step: int) -> float:
        """Tell when a later step counts [s]."""
        return self._time_s(step, step - 1)

    def free_s(self, step: int) -> float:
        """Tell when a step has counted, and its checkpoint is whole if it has one [s]."""
        return self._time_s(step, step)

    def _time_s(self, step: int, saved: int) -> float:
        checkpoints = saved // self.save_every - self.step // self.save_every
        return self.start_s + (step - self.step) * self.iteration_s + checkpoints * self.save_s

    def steps_by(self, time_s: float) -> int:
        """Find the last step that counts by then."""
        most = min(MOST_STEPS, int((time_s - self.start_s) / self.iteration_s) + 1)
        later = range(self.step + 1, self.step + most + 1)
        return self.step + bisect_right(later, time_s, key=self.counts_s)

    def saved_by(self, time_s: float) -> int | None:
        """Find the last of these steps whose checkpoint is whole by then, if there is one."""
        step = self.steps_by(time_s) // self.save_every * self.save_every
        if step > self.step and self.free_s(step) > time_s:
            step -= self.save_every
        return step if step > self.step else None

    def free_after(self, time_s: float) -> float:
        """Tell when the step or checkpoint that is under way at a time is done [s]."""
        step = self.steps_by(time_s)
        return self.free_s(step) if self.free_s(step) >= time_s else self.free_s(step + 1)


def buddies(placement: Sequence[Sequence[int]]) -> dict[int, int]:
    """Tell who keeps copies of stages: the first node of the next stage that has one, in a circle.

    The copy comes from the first node of the stage itself, as in a run.
    """
    further = {
        stage: [*placement[stage + 1 :], *placement[:stage]]
        for stage, nodes in enumerate(placement)
        if nodes
    }
    first = {
        stage: [node for nodes in others for node in nodes] for stage, others in further.items()
    }
    return {stage: nodes[0] for stage, nodes in first.items() if nodes}


class States:
    """Fetches of the states of a case's stages. Each comes over the best link to one who has it.

    Fetches go side by side, and none waits for another: a set of them takes as long as its longest.
    A state is `factor` times `stage_bytes`, which are the gradients that its replicas average.
    """

    def __init__(self, case: Case, factor: float):
        """Take a `factor`; with 0, states take no longer than the latency of a link."""
        self._factor = factor
        self._stage_bytes = case.stage_bytes
        self._latency_s, self._bandwidth = case.link_matrices

    def fetched_s(self, stage: int, targets: Iterable[int], holders: Collection[int]) -> float:
        """Compute the seconds until all `targets` have the state of a stage from its `holders`."""
        return self._seconds(self._factor * self._stage_bytes[stage], targets, holders)

    def averaged_s(self, stage: int, targets: Iterable[int], beside: Sequence[set[int]]) -> float:
        """Compute the seconds until all `targets` have both neighbours' parameters, in turn.

        `beside` are the nodes that hold the stage before and the stage after; equal stages have as
        many bytes.
        """
        targets, size = list(targets), self._stage_bytes[stage]
        return sum(self._seconds(size, targets, holders) for holders in beside)

    def copied_s(self, placement: Sequence[Sequence[int]], parts: int) -> float:
        """Compute the seconds until the buddies of all stages have one part of their copies."""
        return max(
            (
                self._seconds(
                    self._factor * self._stage_bytes[stage] / parts, [node], placement[stage][:1]
                )
                for stage, node in buddies(placement).items()
            ),
            default=0.0,
        )

    def _seconds(self, size: float, targets: Iterable[int], holders: Collection[int]) -> float:
        lacking = [node for node in targets if node not in holders]
        if not lacking:
            return 0.0
        return float(self._each_s(size, lacking, holders).min(axis=0).max())

    def _each_s(self, size: float, targets: Sequence[int], holders: Collection[int]) -> np.ndarray:
        """Compute the seconds from each holder (row) to each target."""
        pairs = np.ix_(sorted(holders), targets)
        return self._latency_s[pairs] + size / self._bandwidth[pairs]
