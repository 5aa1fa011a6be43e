"""What hosts decide on together, what they tell each other for that, and what follows from it.

The rules are those of `decisions`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from skippipe_jax.consensus.complaints import Complaints, aside, is_apart

MOST_NUMBERS = 1 << 14
"""The longest list in a message: totals, the nodes of a stage, hosts."""

# What a message may hold; `wire` refuses anything else.
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
Numbers = Annotated[tuple[Number, ...], Meta(max_length=MOST_NUMBERS)]
Text = Annotated[str, Meta(max_length=MOST_NUMBERS)]
Sums = Annotated[tuple[float, ...], Meta(max_length=MOST_NUMBERS)]
"""Totals of a step, which may be infinite or no numbers."""
NumbersOfStages = Annotated[tuple[Numbers, ...], Meta(max_length=MOST_NUMBERS)]

Ballot = tuple[Number, Annotated[int, Meta(ge=-1, lt=1 << 62)]]
"""How often a host has tried, and which host: greater ones win."""

NO_BALLOT: Ballot = (0, -1)

Copies = Annotated[tuple[tuple[Number, Number], ...], Meta(max_length=MOST_NUMBERS)]
"""Of which stages a host has a copy, and after which step they were like that."""


@dataclass(frozen=True)
class Remade:
    """A stage whose state no member holds, and what those that serve it make theirs from.

    Attributes:
        stage: which.
        by: how: by one of the choices of `recovery.lost_stage`.
        step: what it is made from is as it was after this step.
        sources: the members that have that, in the order in which it is needed.
    """

    stage: Number
    by: Text
    step: Number
    sources: Numbers


@dataclass(frozen=True)
class Generation:
    """Hosts that train together, as they begin.

    Attributes:
        number: counts generations from 1.
        members: the hosts, in order.
        processes: which process each of them is: a host that is started again is another.
        leader: the member that adds up totals.
        step: the last step that counts; members that have not applied it do so with `outcome`.
        outcome: the sum of all totals of that step, or None where no member lacks it.
        fresh: members that hold no state, and take all they need from others.
        is_rewound: all members go back to the checkpoint of `step` instead: a stage was lost.
        is_last: the run ends: a stage was lost, and that is how it was asked for.
        placement: what says which host holds which stages, as `Rules` know it; the nodes of each
            stage, where it comes from another host.
        cause: why the last generation ended, for a reader.
        start: tells this start of the run from others: a number of its first leader.
        lost: the stages whose state none of the members holds.
        remade: what those are made from, where the run goes on without going back.
        holders: the members that hold the state of each stage; who serves it and is none of them
            takes it from one. Empty where all have what they serve.
        plan: the digest of the plan by which they go on; empty for the quick one that all make.
        apart: members that do not reach the folder of the run.
        left_out: the stages that none of the members serves, without which they go on.
        saved: the last step whose checkpoint one of those that decided it knew to be whole.
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
    placement: Any = None
    cause: Text = ""
    start: Number = 0
    holders: NumbersOfStages = ()
    plan: Text = ""
    lost: Numbers = field(default=(), kw_only=True)
    remade: tuple[Remade, ...] = field(default=(), kw_only=True)
    apart: Numbers = field(default=(), kw_only=True)
    left_out: Numbers = field(default=(), kw_only=True)
    saved: Number = field(default=0, kw_only=True)

    def has(self, host: int, process: int) -> bool:
        """Tell whether this process of a host is a member."""
        return (host, process) in zip(self.members, self.processes, strict=True)


@dataclass(frozen=True)
class Standing:
    """How far a host has come.

    Attributes:
        applied: the last step that it has applied.
        outcome: with which sum of totals; None for the step that a generation began with.
        holds_next: whether it holds the averaged gradients of the step after that.
        saved: the last step whose checkpoint is whole.
        holds: the stages whose state it holds, as that step has left it.
        copies: those that it keeps of stages of others.
    """

    applied: Number
    outcome: Sums | None = None
    holds_next: bool = False
    saved: Number = 0
    holds: Numbers = ()
    copies: Copies = field(default=(), kw_only=True)


# Messages between hosts. `number` is that of the generation which a message is about.


@dataclass(frozen=True)
class Ask:
    """Asks members of the generation before for a promise, or to accept what shall be the next.

    Who promises a ballot answers no lesser one, and takes no further part in its generation.
    """

    number: Number
    ballot: Ballot
    generation: Generation | None


@dataclass(frozen=True)
class Promise:
    """How far a host had come when it first promised, and what it has accepted since."""

    number: Number
    ballot: Ballot
    standing: Standing
    accepted: tuple[Ballot, Generation] | None


@dataclass(frozen=True)
class Accepted:
    """The host has accepted what it was asked to under this ballot."""

    number: Number
    ballot: Ballot


@dataclass(frozen=True)
class Decided:
    """This is the generation that was decided on."""

    generation: Generation


@dataclass(frozen=True)
class Beat:
    """The generation that the sender is in, or 0 for a process that wants to be in the next.

    `promised` is the greatest ballot for the next generation that it has answered, `missed` are
    the hosts that it does not hear, and it `leaves` if it was told to. `is_apart` tells that it
    does not reach the folder of the run, `lacks_text` that it has not the text that the run reads.
    """

    number: Number
    process: Number
    promised: Ballot
    missed: Numbers = ()
    leaves: bool = False
    is_apart: bool = False
    lacks_text: bool = False


@dataclass(frozen=True)
class Contribution:
    """The totals of a host that holds the averaged gradients of a step; for the leader."""

    number: Number
    step: Number
    totals: Sums


@dataclass(frozen=True)
class Counts:
    """A step counts, with this sum of the totals of all members."""

    number: Number
    step: Number
    outcome: Sums


Message = Ask | Promise | Accepted | Decided | Beat | Contribution | Counts


# Events.


@dataclass(frozen=True)
class Received:
    """A message has come from another host."""

    source: int
    message: Message


@dataclass(frozen=True)
class Presence:
    """A host is there, or may be lost: it was silent for too long, or its process has gone."""

    host: int
    is_there: bool


@dataclass(frozen=True)
class Held:
    """This host holds the averaged gradients of the next step, and adds these totals.

    It has computed them in the generation of that `number`, which may have ended meanwhile: those
    of another generation have the step run again, by other paths. By now it keeps these `copies`.
    """

    number: int
    step: int
    totals: Any
    copies: Copies = ()


@dataclass(frozen=True)
class Saved:
    """The checkpoint of a step is whole."""

    step: int


@dataclass(frozen=True)
class WentBack:
    """All members of the generation of that `number` go back to an earlier `step` than its own.

    They have found out together, before its first step, that a later checkpoint is damaged.
    """

    number: int
    step: int


@dataclass(frozen=True)
class Abandoned:
    """This host takes no further part in the generation of that `number`: transfers have failed."""

    number: int


@dataclass(frozen=True)
class Stored:
    """What the storage holds as the next generation, after this host has tried to write there."""

    generation: Generation


@dataclass(frozen=True)
class Tick:
    """Time has passed: what may have been lost is sent again."""


@dataclass(frozen=True)
class Told:
    """This host was told to leave."""


@dataclass(frozen=True)
class TextMissing:
    """This host has not the text that the run reads, or has another."""


@dataclass(frozen=True)
class Wish:
    """To go on after the generation of that `number` under a placement, by the plan of a digest.

    The leader takes it up when a step counts.
    """

    number: int
    placement: Any
    plan: str


Event = (
    Received
    | Presence
    | Held
    | Saved
    | Stored
    | Tick
    | Told
    | TextMissing
    | WentBack
    | Abandoned
    | Wish
)


# Effects.


@dataclass(frozen=True)
class Send:
    """Send a message, which may be lost."""

    target: int
    message: Message


@dataclass(frozen=True)
class Apply:
    """Apply a step with the sum of the totals of all."""

    step: int
    outcome: Any


@dataclass(frozen=True)
class Enter:
    """Leave the last generation, and go on in this one."""

    generation: Generation


@dataclass(frozen=True)
class LeftOut:
    """The others go on without this host, which asks to be a member again."""

    generation: Generation


@dataclass(frozen=True)
class Writes:
    """Write this generation where only the first can, and tell what is there then: `Stored`."""

    generation: Generation


Decision = Apply | Enter | LeftOut
"""What the run has to follow."""

Effect = Send | Writes | Decision

Remakes = Callable[[Mapping[int, Collection[int]], Mapping[int, Copies], int], tuple[Remade, ...]]
"""(the stages whose states hosts hold, the copies that they keep, the step that counts last) ->
what stages that nobody holds are made from, unless it raises `RebuildImpossible`."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What all hosts know from the start.

    Attributes:
        hosts: all that there may be.
        stages: how many there are.
        serves: the stages that a host serves under a placement.
        placed: another placement, by which some hosts serve all stages but those left out, or None;
            those apart do not newly serve stage 0.
        add_up: the sum of the totals of all members, by host.
        fits: whether something is a placement of this run.
        safest: one that covers as well, and loses less if another host is lost.
        without_text: a placement, in which some hosts serve other stages than the data stage.
        rewinds: whether a run that has lost a stage goes back to its last checkpoint, or ends.
        leaves_out: whether it goes on without the stage instead.
        remakes: what stages are made from that nobody holds, if the run does not go back for them.
        is_apart: whether this host alone does not reach the folder of the run.
    """

    hosts: tuple[int, ...]
    stages: int
    serves: Callable[[Any, int], frozenset[int]]
    placed: Callable[[Any, frozenset[int], Collection[int], Collection[int]], Any]
    add_up: Callable[[Mapping[int, Any]], Any]
    fits: Callable[[Any], bool] = lambda placement: placement is not None
    safest: Callable[[Any, frozenset[int], Collection[int]], Any] = lambda placement, *_: placement
    without_text: Callable[[Any, Collection[int]], Any] = lambda placement, _: placement
    rewinds: bool = True
    leaves_out: bool = False
    remakes: Remakes | None = None
    is_apart: bool = False


@dataclass(frozen=True)
class Proposal:
    """What a host has under way for the next generation, `without` members that are not heard."""

    ballot: Ballot
    without: frozenset[int] = frozenset()
    promises: Mapping[int, Promise] = field(default_factory=dict)
    generation: Generation | None = None
    accepted_by: frozenset[int] = frozenset()


@dataclass(frozen=True)
class State:
    """What a host knows.

    Attributes:
        host: this one.
        process: which process of it this is.
        rules: see there.
        generation: the last that this host knows to be decided, or None.
        is_member: whether it takes part in that one.
        standing: how far it has come.
        totals: those that it adds to the step whose gradients it holds.
        heard: as the leader, the totals of members for the step after the last that counts.
        promised: the greatest ballot answered for the next generation.
        accepted: the next generation that was accepted last, and for which ballot.
        proposal: what it has under way itself.
        highest: the greatest ballot for the next generation that it knows of.
        suspected: hosts that may be lost.
        waiting: hosts that are in none and want to be in the next, with their processes.
        apart: those of them that do not reach the folder of the run.
        textless: hosts that have not the text of the run.
        complaints: which of the others miss which.
        leaving: hosts that were told to leave, and how often each was heard of since.
        wish: as the leader, what it would go on under.
    """

    host: int
    process: int
    rules: Rules
    generation: Generation | None = None
    is_member: bool = False
    standing: Standing = Standing(0)
    totals: Any = None
    heard: Mapping[int, Any] = field(default_factory=dict)
    promised: Ballot = NO_BALLOT
    accepted: tuple[Ballot, Generation] | None = None
    proposal: Proposal | None = None
    highest: Ballot = NO_BALLOT
    suspected: frozenset[int] = frozenset()
    waiting: Mapping[int, int] = field(default_factory=dict)
    apart: frozenset[int] = frozenset()
    textless: frozenset[int] = frozenset()
    complaints: Complaints = field(default_factory=dict)
    leaving: Mapping[int, int] = field(default_factory=dict)
    wish: Wish | None = None

    @property
    def number(self) -> int:
        """That of the generation it takes part in; 0 for none."""
        return self.generation.number if self.generation is not None and self.is_member else 0

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the last generation that it knows of."""
        return () if self.generation is None else self.generation.members

    @property
    def takes_part(self) -> bool:
        """Whether steps of its generation may still count for it."""
        return self.number > 0 and self.promised == NO_BALLOT

    @property
    def leads(self) -> bool:
        """Whether it adds up the totals of its generation."""
        return self.generation is not None and self.generation.leader == self.host

    def is_left(self, host: int) -> bool:
        """Tell whether a member is there, and is the process that became one."""
        return host == self.host or not (host in self.suspected or host in self.waiting)

    @property
    def cut_off(self) -> frozenset[int]:
        """Members that live and are done without, unless too few would be left."""
        left = [host for host in self.members if self.is_left(host)]
        without = aside(self.complaints, left)
        is_enough = 2 * (len(left) - len(without)) > len(self.members)
        return without if is_enough else frozenset()

    @property
    def joining(self) -> Mapping[int, int]:
        """Those of `waiting` that hear all members that are left, and are heard by them."""
        left = [host for host in self.members if self.is_left(host)]
        return {
            host: process
            for host, process in self.waiting.items()
            if host not in self.leaving and not is_apart(self.complaints, host, left)
        }

    def to_others(self, message: Message, hosts: Iterable[int]) -> list[Effect]:
        """Send a message to those of some hosts that are others."""
        return [Send(host, message) for host in hosts if host != self.host]
