"""Types of the consensus: generations, messages, events, effects and the state of a host.

`decisions` has the protocol.

A host that is gone or stopped is silent to all. If one member misses another one that others still
receive from, their link is broken, and one of the two is excluded until it is repaired. A complaint
is valid once enough heartbeats of its target have arrived since. Nothing more arrives from a lost
host, so complaints about it never become valid.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from skippipe_jax.config.cluster import AVERAGE, BUDDY, SKIP

MOST_NUMBERS = 1 << 14
"""Maximum length of a list in a message: totals, nodes of a stage, hosts."""

# Types of the fields of messages; `msgspec.convert` refuses anything else.
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
Numbers = Annotated[tuple[Number, ...], Meta(max_length=MOST_NUMBERS)]
Text = Annotated[str, Meta(max_length=MOST_NUMBERS)]
Sums = Annotated[tuple[float, ...], Meta(max_length=MOST_NUMBERS)]
"""Totals of a step; they may be infinite or NaN."""
NumbersOfStages = Annotated[tuple[Numbers, ...], Meta(max_length=MOST_NUMBERS)]
Placement = NumbersOfStages
"""Nodes of each stage."""

Ballot = tuple[Number, Annotated[int, Meta(ge=-1, lt=1 << 62)]]
"""Ballot of Paxos: the attempt, and the host id of the proposer; the greatest ballot wins."""

NO_BALLOT: Ballot = (0, -1)

Copies = Annotated[tuple[tuple[Number, Number], ...], Meta(max_length=MOST_NUMBERS)]
"""Copies of stages that a host keeps: pairs of a stage and the step of its state."""

SOURCES = {BUDDY: 1, AVERAGE: 2, SKIP: 1}
"""Number of sources from which a lost stage is rebuilt, by policy."""


@dataclass(frozen=True)
class RebuiltStage:
    """Lost stage that is rebuilt, and the data from which its members rebuild it.

    Attributes:
        stage: the stage.
        by: policy, one of the choices of `recovery.lost_stage`.
        step: step after which the source data was as it is.
        sources: members that have the source data, in the order that the policy needs.
    """

    stage: Number
    by: Text
    step: Number
    sources: Numbers

    def __post_init__(self) -> None:
        """Check the number of sources."""
        if len(self.sources) != SOURCES.get(self.by):
            raise ValueError("a lost stage has the wrong number of sources")


@dataclass(frozen=True)
class Generation:
    """Hosts that train together between two changes of membership, and their initial state.

    Raises `ValueError` if it names hosts that are not members.

    Attributes:
        number: number of the generation, from 1.
        members: member hosts, in order.
        processes: process number of each member; a restarted host has another one.
        leader: member that sums the totals.
        step: last committed step; members that have not applied it apply it with `outcome`.
        outcome: sum of all totals of that step, or None if every member has applied it.
        fresh: members without state, which get all that they need from other members.
        is_rewound: True if all members go back to the checkpoint of `step`, as a stage was lost.
        is_last: True if the run ends, because a stage was lost or no member can save.
        placement: nodes of each stage.
        cause: why the last generation ended, to print.
        start: number that identifies this start of the run, from its first leader.
        lost: stages whose state no member holds.
        remade: how lost stages are rebuilt, if the run continues without a rollback.
        holders: members that hold the state of each stage; other members that serve it get it
            from one of them. Empty if all members have the states that they serve.
        plan: digest of the plan to follow; empty for the repair plan that every member makes.
        diskless: members that cannot reach the run directory.
        left_out: stages that no member serves and that training skips.
        saved: last step whose checkpoint is complete, to the knowledge of the deciding members.
    """

    number: Number
    members: Numbers
    processes: Numbers
    leader: Number
    step: Number
    outcome: Sums | None = None
    fresh: Numbers = ()
    is_rewound: bool = False
    is_last: bool = False
    placement: Placement = ()
    cause: Text = ""
    start: Number = 0
    holders: NumbersOfStages = ()
    plan: Text = ""
    lost: Numbers = field(default=(), kw_only=True)
    remade: tuple[RebuiltStage, ...] = field(default=(), kw_only=True)
    diskless: Numbers = field(default=(), kw_only=True)
    left_out: Numbers = field(default=(), kw_only=True)
    saved: Number = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        """Check the hosts that it names, unless it is none (number 0)."""
        sources = (one.sources for one in self.remade)
        named = {self.leader, *self.fresh, *self.diskless}.union(*self.holders, *sources)
        members = self.members
        if sorted(set(members)) != [*members] or len(self.processes) != len(members):
            raise ValueError("the members are not sorted, or do not match the processes")
        if self.number and not named <= set(members):
            raise ValueError("a named host is not a member")

    def has(self, host: int, process: int) -> bool:
        """Return True if this process of a host is a member."""
        return (host, process) in zip(self.members, self.processes, strict=True)


class Standing(msgspec.Struct, frozen=True):
    """Training progress of a host.

    Attributes:
        applied: last step that it has applied.
        outcome: sum of totals of that step; None for the step that a generation began with.
        holds_next: True if it holds the averaged gradients of the next step.
        saved: last step whose checkpoint is complete.
        holds: stages whose state after step `applied` it holds.
        copies: copies of other hosts' stages that it keeps.
    """

    applied: Number
    outcome: Sums | None = None
    holds_next: bool = False
    saved: Number = 0
    holds: Numbers = ()
    copies: Copies = ()


class PlanRequest(msgspec.Struct, frozen=True):
    """Request to follow generation `number` by a placement, with the plan of digest `plan`.

    The leader proposes it after a committed step.
    """

    number: Number
    placement: Placement
    plan: Text


# Messages between hosts. `number` is the number of the generation that a message is about.


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Message as a list: the name of its type, and the values of its fields."""


class Ask(_Message, frozen=True):
    """Request to members of the last generation: to promise a ballot, or to accept a generation.

    `generation` is None in the first case. A host that promises a ballot answers no smaller one,
    and takes no further part in its generation.
    """

    number: Number
    ballot: Ballot
    generation: Generation | None


class Promise(_Message, frozen=True):
    """Promise of a ballot, with the sender's standing and the last proposal that it accepted.

    That of the leader also has its request, as another host may propose before the leader decides.
    """

    number: Number
    ballot: Ballot
    standing: Standing
    accepted: tuple[Ballot, Generation] | None
    wish: PlanRequest | None = None


class Accepted(_Message, frozen=True):
    """Acceptance of the generation that was proposed under this ballot."""

    number: Number
    ballot: Ballot


class Decided(_Message, frozen=True):
    """Announcement of the generation that was decided on."""

    generation: Generation


class Heartbeat(_Message, frozen=True):
    """Heartbeat of the consensus, with the status of the sender.

    Attributes:
        number: generation that the sender is in, or 0 if it asks to join the next one.
        process: process number of the sender.
        promised: greatest ballot for the next generation that it has answered.
        missed: hosts from which it receives nothing.
        leaves: True if it was asked to leave.
        is_diskless: True if it cannot reach the run directory.
        lacks_text: True if it does not have the training text of the run.
    """

    number: Number
    process: Number
    promised: Ballot
    missed: Numbers = ()
    leaves: bool = False
    is_diskless: bool = False
    lacks_text: bool = False


class Contribution(_Message, frozen=True):
    """Totals for the leader, from a host that holds the averaged gradients of a step."""

    number: Number
    step: Number
    totals: Sums


class Commit(_Message, frozen=True):
    """Commit of a step, with the sum of the totals of all members."""

    number: Number
    step: Number
    outcome: Sums


Message = Ask | Promise | Accepted | Decided | Heartbeat | Contribution | Commit


# Events.


class Received(msgspec.Struct, frozen=True):
    """Message from another host."""

    source: int
    message: Message


class Presence(msgspec.Struct, frozen=True):
    """Report that a host is present, or suspected: silent for too long, or its process gone."""

    host: int
    is_there: bool


class Held(msgspec.Struct, frozen=True):
    """Report that this host holds the averaged gradients of the next step.

    Attributes:
        number: generation in which they were computed. It may have ended meanwhile: then the step
            is run again, by other paths.
        step: the step.
        totals: this host's totals of the step.
        copies: copies of other hosts' stages that it keeps now.
    """

    number: int
    step: int
    totals: Any
    copies: Copies = ()


class Saved(msgspec.Struct, frozen=True):
    """Report that the checkpoint of a step is complete."""

    step: int


class RolledBack(msgspec.Struct, frozen=True):
    """Report that all members of generation `number` go back to a `step` before its own.

    They have detected together, before its first step, that a later checkpoint is damaged.
    """

    number: int
    step: int


class Abandoned(msgspec.Struct, frozen=True):
    """Report that this host takes no further part in generation `number`: transfers failed."""

    number: int


class Stored(msgspec.Struct, frozen=True):
    """Next generation that the storage holds, after this host has tried to write one."""

    generation: Generation


class Tick(msgspec.Struct, frozen=True):
    """Timer event: messages that may have been lost are sent again."""


class Told(msgspec.Struct, frozen=True):
    """Request that this host leave the run."""


class TextMissing(msgspec.Struct, frozen=True):
    """Report that this host does not have the run's training text, or has another one."""


Event = (
    Received
    | Presence
    | Held
    | Saved
    | Stored
    | Tick
    | Told
    | TextMissing
    | RolledBack
    | Abandoned
    | PlanRequest
)


# Effects.


class Send(msgspec.Struct, frozen=True):
    """Message to send to a host; it may be lost."""

    target: int
    message: Message


class Apply(msgspec.Struct, frozen=True):
    """Step to apply, with the sum of the totals of all members."""

    step: int
    outcome: Any


class Enter(msgspec.Struct, frozen=True):
    """Generation to enter; the last one has ended."""

    generation: Generation


class NotMember(msgspec.Struct, frozen=True):
    """Generation of which this host is not a member; it asks to join the next one."""

    generation: Generation


class Writes(msgspec.Struct, frozen=True):
    """Generation to write where only the first write succeeds; `Stored` reports what is there."""

    generation: Generation


Decision = Apply | Enter | NotMember
"""Effects that the run has to follow."""

Effect = Send | Writes | Decision

HostsOfStages = Sequence[frozenset[int]]
"""Hosts that serve each stage, or that hold its state."""

Remakes = Callable[[HostsOfStages, Mapping[int, Copies], int], tuple[RebuiltStage, ...]]
"""Function (hosts that hold each stage, copies that each host keeps, last committed step) -> how
the lost stages are rebuilt; raises `RebuildImpossible` if they cannot be."""


@dataclass(frozen=True, kw_only=True)
class ConsensusRules:
    """Parameters and functions of the run that are the same on all hosts, but for `is_diskless`.

    Attributes:
        host_of: host of each node, including those of extra places.
        stages: number of stages.
        placed: (placement, hosts, diskless, left_out) -> another placement, by which these hosts
            serve all stages but `left_out`, or None; those that are `diskless` do not newly serve
            stage 0.
        add_up: totals of all members, by host -> their sum.
        fits: returns True for a valid placement of this run.
        safest: (placement, hosts, diskless) -> placement that also covers all stages, and loses
            less if another host is lost.
        without_text: (placement, hosts) -> placement in which these hosts do not serve the data
            stage.
        rewinds: True if a run that has lost a stage goes back to its last checkpoint; else it ends.
        leaves_out: True if the run continues without a lost stage instead.
        remakes: rebuilds lost stages without a rollback; None under other policies.
        is_diskless: True if this host cannot reach the run directory.
    """

    host_of: tuple[int, ...]
    stages: int
    placed: Callable[
        [Placement, frozenset[int], Collection[int], Collection[int]], Placement | None
    ]
    add_up: Callable[[Mapping[int, Any]], Any]
    fits: Callable[[Placement], bool] = lambda placement: True
    safest: Callable[[Placement, frozenset[int], Collection[int]], Placement] = lambda own, *_: own
    without_text: Callable[[Placement, Collection[int]], Placement] = lambda own, _: own
    rewinds: bool = True
    leaves_out: bool = False
    remakes: Remakes | None = None
    is_diskless: bool = False

    @functools.cached_property
    def hosts(self) -> range:
        """Ids of all possible hosts."""
        return range(max(self.host_of) + 1)

    def serves(self, placement: Placement, host: int) -> frozenset[int]:
        """Return the stages that a host serves under a placement."""
        serving = self.serving(placement, (host,))
        return frozenset(stage for stage, hosts in enumerate(serving) if hosts)

    def serving(self, placement: Placement, hosts: Iterable[int]) -> HostsOfStages:
        """Return which of these hosts serve each stage under a placement."""
        among = frozenset(hosts)
        return [among.intersection(self.host_of[node] for node in nodes) for nodes in placement]


class Proposal(msgspec.Struct, frozen=True):
    """Proposal of a host for the next generation.

    Attributes:
        ballot: its ballot.
        without: live members that are not asked, because of broken links.
        promises: promises so far, by host.
        generation: the proposed generation, once enough hosts have promised.
        accepted_by: hosts that have accepted it.
    """

    ballot: Ballot
    without: frozenset[int] = frozenset()
    promises: Mapping[int, Promise] = msgspec.field(default_factory=dict)
    generation: Generation | None = None
    accepted_by: frozenset[int] = frozenset()


# Broken links between live hosts, and the choice of the hosts to exclude for them.

Complaints = Mapping[tuple[int, int], int]
"""Number of heartbeats received here since the complaint, by (complaining host, missed host)."""

BROKEN_AFTER = 4
"""Heartbeats of the missed host after which a complaint is valid: the link counts as broken."""


def after_heartbeat(complaints: Complaints, source: int, missed: Iterable[int]) -> Complaints:
    """Update the complaints by a heartbeat of `source`, which misses the hosts `missed`."""
    of_source = {(source, other): complaints.get((source, other), 0) for other in missed}
    rest = {
        (host, other): heard + (other == source)
        for (host, other), heard in complaints.items()
        if host != source
    }
    return rest | of_source


def excluded_by(complaints: Complaints, present: Collection[int]) -> frozenset[int]:
    """Choose the present hosts to exclude, so that no link between the others is broken.

    The host with the most broken links is excluded first; in a tie, the larger id.
    """
    cut = {
        frozenset(pair)
        for pair, heard in complaints.items()
        if heard >= BROKEN_AFTER and set(pair) <= set(present)
    }
    without: set[int] = set()
    while cut:
        links = Counter(host for pair in cut for host in pair)
        most = max(links, key=lambda host: (links[host], host))
        without.add(most)
        cut = {pair for pair in cut if most not in pair}
    return frozenset(without)


def has_broken_link(complaints: Complaints, host: int, others: Collection[int]) -> bool:
    """Return True if a host misses one of the others, or one of them misses it."""
    return any((host, other) in complaints or (other, host) in complaints for other in others)


class ConsensusState(msgspec.Struct, frozen=True):
    """State of the consensus on a host.

    Attributes:
        host: id of this host.
        process: process number of this host.
        rules: rules of the run.
        generation: last generation that this host has seen decided, or None.
        is_member: True if it is a member of that generation.
        standing: training progress.
        totals: its totals of the step whose gradients it holds.
        heard: on the leader, totals of members for the next step to commit.
        promised: greatest ballot for the next generation that it has answered.
        accepted: last proposal of the next generation that it has accepted, with its ballot.
        proposal: its own proposal, if there is one.
        highest: greatest ballot for the next generation that it has seen.
        suspected: hosts that may be lost.
        waiting: processes that are in no generation and ask to join the next, by host.
        diskless: waiting hosts that cannot reach the run directory.
        textless: hosts that do not have the training text.
        complaints: pairs of hosts of which the first does not receive from the second.
        leaving: hosts that were asked to leave, with the number of their heartbeats since then.
        wish: on the leader, requested placement and plan of the next generation.
    """

    host: int
    process: int
    rules: ConsensusRules
    generation: Generation | None = None
    is_member: bool = False
    standing: Standing = Standing(0)
    totals: Any = None
    heard: Mapping[int, Any] = msgspec.field(default_factory=dict)
    promised: Ballot = NO_BALLOT
    accepted: tuple[Ballot, Generation] | None = None
    proposal: Proposal | None = None
    highest: Ballot = NO_BALLOT
    suspected: frozenset[int] = frozenset()
    waiting: Mapping[int, int] = msgspec.field(default_factory=dict)
    diskless: frozenset[int] = frozenset()
    textless: frozenset[int] = frozenset()
    complaints: Complaints = msgspec.field(default_factory=dict)
    leaving: Mapping[int, int] = msgspec.field(default_factory=dict)
    wish: PlanRequest | None = None

    @property
    def number(self) -> int:
        """Number of the generation of which this host is a member; 0 for none."""
        return self.generation.number if self.generation is not None and self.is_member else 0

    @property
    def members(self) -> tuple[int, ...]:
        """Members of the last generation that this host has seen decided."""
        return () if self.generation is None else self.generation.members

    @property
    def takes_part(self) -> bool:
        """True if this host may still commit steps of its generation."""
        return self.number > 0 and self.promised == NO_BALLOT

    @property
    def leads(self) -> bool:
        """True if this host is the leader of its last generation."""
        return self.generation is not None and self.generation.leader == self.host

    def is_remaining(self, host: int) -> bool:
        """Return True if a member is present, and is still the process that became a member."""
        return host == self.host or not (host in self.suspected or host in self.waiting)

    @property
    def cut_off(self) -> frozenset[int]:
        """Live members to exclude because of broken links, unless too few would be left."""
        remaining = [host for host in self.members if self.is_remaining(host)]
        without = excluded_by(self.complaints, remaining)
        is_enough = 2 * (len(remaining) - len(without)) > len(self.members)
        return without if is_enough else frozenset()

    @property
    def joining(self) -> Mapping[int, int]:
        """Waiting hosts that have working links in both directions to all remaining members."""
        remaining = [host for host in self.members if self.is_remaining(host)]
        return {
            host: process
            for host, process in self.waiting.items()
            if host not in self.leaving and not has_broken_link(self.complaints, host, remaining)
        }

    def to_others(self, message: Message, hosts: Iterable[int]) -> list[Effect]:
        """Return the effects that send a message to these hosts, except this one."""
        return [Send(host, message) for host in hosts if host != self.host]
