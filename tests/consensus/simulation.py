"""Hosts that agree by the rules of `decisions`, on a network that may do anything to messages.

The rules are driven alone, without sockets or clocks. Hosts hold stages, take those that they lack
only from who has them, and begin with a step only once all have what they serve. Whatever happens
to them, what must hold is asserted on the way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from skippipe_jax.config.cluster import BUDDY, SKIP
from skippipe_jax.consensus.decisions import advance, first_state
from skippipe_jax.consensus.generations import (
    Abandoned,
    Apply,
    ConsensusRules,
    ConsensusState,
    Effect,
    Enter,
    Event,
    Generation,
    Held,
    NotMember,
    Placement,
    PlanRequest,
    Presence,
    RebuiltStage,
    Received,
    Remakes,
    Saved,
    Send,
    Stored,
    Tick,
    Told,
    Writes,
)
from skippipe_jax.consensus.next_generation import (
    HEARTBEATS_BEFORE_LEAVING,
    can_decide,
    is_readable,
)

STAGES = 2


def serves(placement: Placement, host: int) -> frozenset[int]:
    return frozenset(stage for stage, own in enumerate(placement) if host in own)


def moved(placement: Placement, to: Mapping[int, Collection[int]]) -> Placement:
    """The placement under which some hosts serve other stages."""
    return tuple(
        tuple(sorted({*own} - to.keys() | {host for host in to if stage in to[host]}))
        for stage, own in enumerate(placement)
    )


def by_stage(to: Mapping[int, Collection[int]], stages: int = STAGES) -> Placement:
    """The placement of hosts that serve these stages."""
    return moved(((),) * stages, to)


def covers(placement: Placement, hosts: frozenset[int]) -> bool:
    return all(map(hosts.intersection, placement)) and hosts <= {*chain(*placement)}


def placed(
    placement: Placement,
    hosts: frozenset[int],
    diskless: Collection[int] = (),
    left_out: Collection[int] = (),
) -> Placement:
    """The living hosts share the stages, one of them each, so a last one does not serve all.

    Those that are diskless do not newly get stage 0. Those that serve nothing get a stage.
    """
    idle = moved(placement, {host: {1} for host in hosts.difference(*placement)})
    if idle != placement and covers(idle, hosts):
        return idle
    barred = {*diskless}.difference(placement[0])
    alive = sorted(hosts, key=lambda host: (host in barred, host))
    return moved(
        placement, {host: {1 if host in barred else p % STAGES} for p, host in enumerate(alive)}
    )


def safest(placement: Placement, hosts: frozenset[int], diskless: Collection[int]) -> Placement:
    """Where one host alone serves a stage, another comes to it from one that three serve."""
    serving = [len(hosts.intersection(own)) for own in placement]
    for stage in range(len(placement)):
        barred = diskless if stage == 0 else ()
        free = [
            host
            for host in sorted({*hosts}.difference(barred))
            if min(serving[own] for own in serves(placement, host)) > 2
        ]
        if serving[stage] == 1 and free:
            return moved(placement, {free[-1]: {stage}})
    return placement


def unmoved(placement: Placement, *_: Any) -> Placement:
    return placement


def add_up(totals: Mapping[int, Any]) -> tuple[float, ...]:
    """Each host, and what it has told: its generation and step."""
    return tuple(number for host, own in sorted(totals.items()) for number in (host, *own))


@dataclass
class Process:
    """A process of a host: its state, and the steps that it has applied, by their sums.

    `stages` are those whose state it has, and the steps that are in it.
    """

    state: ConsensusState
    applied: list[Any] = field(default_factory=list)
    is_ready: bool = True
    entered: Generation | None = None
    stages: dict[int, list[Any]] = field(default_factory=dict)

    @property
    def served(self) -> frozenset[int]:
        placement = () if self.entered is None else self.entered.placement
        return serves(placement, self.state.host)

    @property
    def has_all(self) -> bool:
        return self.is_ready and self.served <= self.stages.keys()


class Simulation:
    """Hosts and a network, and what must hold whatever happens.

    At first host h holds stage h modulo the number of stages. More may come to extra places.
    Where stages may be remade, hosts keep copies of others' as well.
    """

    def __init__(
        self,
        hosts: int,
        *,
        stages: int = STAGES,
        placed: Callable[..., Placement | None] = placed,
        remakes: Remakes | None = None,
        leaves_out: bool = False,
        rewinds: bool = True,
        extra_hosts: int = 0,
        moves_to_safety: bool = False,
    ):
        everybody, beginning = tuple(range(hosts + extra_hosts)), tuple(range(hosts))
        self.rules = ConsensusRules(
            host_of=everybody,
            stages=stages,
            placed=placed,
            add_up=add_up,
            rewinds=rewinds,
            leaves_out=leaves_out,
            remakes=remakes,
            safest=safest if moves_to_safety else unmoved,
        )
        self.stages = stages
        self.processes = Counter[int]()
        placement = by_stage({host: {host % stages} for host in beginning}, stages)
        first = Generation(1, beginning, (0,) * hosts, 0, 0, placement=placement)
        self.live = {
            host: Process(
                first_state(host, self.rules, first, 0),
                entered=first,
                stages={host % stages: []},
            )
            for host in beginning
        }
        self.messages: list[tuple[int, Send]] = []
        self.decided = {1: first}
        self.begun_with: dict[int, list[Any]] = {1: []}
        self.checkpoints: dict[int, list[Any]] = {0: []}
        self.store: dict[int, Generation] = {}
        self.computed: list[tuple[int, int, Held]] = []
        self.copies: dict[int, set[tuple[int, int]]] = defaultdict(set)
        self.has_ended = False

    def tell(self, host: int, event: Event) -> None:
        """An event comes to a host, if it lives."""
        if host not in self.live:
            return
        own = self.live[host]
        own.state, effects = advance(own.state, event)
        for effect in effects:
            if self.live.get(host) is own:  # It may have left.
                self.do(host, effect)
        if own.state.number and not self.has_ended:
            for stage in own.state.standing.holds:
                assert own.stages[stage] == own.applied, "who says that it holds a stage does"

    def do(self, host: int, effect: Effect) -> None:
        own = self.live[host]
        match effect:
            case Send():
                assert effect.target != host
                self.messages.append((host, effect))
            case Apply(step, outcome):
                assert own.has_all
                assert step == len(own.applied) + 1, "no step twice, and none left out"
                assert len({*outcome[1::3]}) == 1, (
                    "totals of one generation are added up, and no others"
                )
                assert all(own.stages[stage] == own.applied for stage in own.served)
                own.applied = [*own.applied, outcome]
                own.stages = dict.fromkeys(own.served, own.applied)
            case Writes(generation):
                there = self.store.setdefault(generation.number, generation)
                self.tell(host, Stored(there))
            case NotMember():
                own.is_ready = False
                self.copies[host].clear()
                if host in own.state.leaving:
                    self.crash(host)
            case Enter(generation):
                self.enter(host, generation)

    def enter(self, host: int, generation: Generation) -> None:
        own = self.live[host]
        same = self.decided.setdefault(generation.number, generation)
        assert generation == same, "one generation of each number, and one leader of each"
        assert generation.leader in generation.members
        assert host in generation.members
        assert own.state.rules.is_diskless == (host in generation.diskless)
        if generation.is_last:
            self.has_ended = True
            return
        own.entered = generation
        members, fresh = frozenset(generation.members), frozenset(generation.fresh)
        assert members <= {*chain(*generation.placement)}, "all serve"
        before = self.decided[generation.number - 1].placement
        assert is_readable(self.rules, before, generation.placement, generation.diskless)
        assert generation.leader not in generation.diskless, "who leads writes"
        assert generation.leader not in fresh or members - fresh <= {*generation.diskless}
        self.take_state(host, generation)
        served = {stage for member in members for stage in serves(generation.placement, member)}
        assert served.isdisjoint(generation.left_out)
        is_covered = {*served, *generation.left_out} == {*range(self.stages)}
        assert is_covered or generation.is_rewound
        for stage, holders in enumerate(generation.holders):
            is_told = stage in (*generation.lost, *generation.left_out)
            assert holders or is_told, "a stage that nobody holds is lost"
            assert host not in holders or own.stages[stage] == own.applied
        assert own.is_ready or host in fresh, "nobody goes on without a state"
        assert not own.is_ready or len(own.applied) == generation.step
        if own.is_ready:
            begun = self.begun_with.setdefault(generation.number, own.applied)
            assert begun == own.applied, "replicas go on with the same steps"
        self.require_remade(host, generation)

    def take_state(self, host: int, generation: Generation) -> None:
        """A member goes on with what it holds, from a checkpoint, or with nothing."""
        if host in generation.fresh:
            self.begin_empty(host)
        elif generation.is_rewound:
            self.restore(host, generation)

    def begin_empty(self, host: int) -> None:
        """A member holds nothing, and takes all it needs from others."""
        own = self.live[host]
        own.is_ready, own.stages = False, {}

    def restore(self, host: int, generation: Generation) -> None:
        """A member reads the checkpoint of the step that its generation begins with."""
        assert host not in generation.diskless, "it cannot read a checkpoint"
        own = self.live[host]
        own.applied, own.is_ready = list(self.checkpoints[generation.step]), True
        own.stages = dict.fromkeys(own.served, own.applied)

    def require_remade(self, host: int, generation: Generation) -> None:
        """Stages are made anew that nobody holds, from what those have who are to give it."""
        if generation.is_rewound or host in generation.fresh:
            self.copies[host].clear()
        assert not (generation.is_rewound and generation.remade)
        made_anew = {made.stage for made in generation.remade}
        assert made_anew in (set(), {*generation.lost} - {*generation.left_out})
        for made in generation.remade:
            assert not generation.holders[made.stage]
            if host in made.sources:
                self.require_source(host, made)

    def require_source(self, host: int, made: RebuiltStage) -> None:
        """Who is said to have what a stage is made from has it, and as of the right step."""
        if made.by == BUDDY:
            assert (made.stage, made.step) in self.copies[host]
            return
        if made.by == SKIP:
            assert 0 < made.step in self.checkpoints
            return
        own, beside = self.live[host], made.stage + (-1, 1)[made.sources.index(host)]
        assert own.stages[beside] == own.applied
        assert len(own.applied) == made.step

    def fetch(self, host: int) -> None:
        """A member takes the stages that it lacks from those that hold them, if they live.

        Those that nobody holds it makes anew, if all live that have what they are made from.
        """
        own = self.live[host]
        number = own.state.number
        if not number or own.entered is None or own.entered.is_last:
            return
        for stage in own.served - own.stages.keys():
            for holder in own.entered.holders[stage]:
                there = self.live.get(holder)
                if there is None or there.state.number != number or stage not in there.stages:
                    continue
                if not self.gives(there):
                    continue
                own.stages[stage] = there.stages[stage]
                assert len(own.stages[stage]) == own.entered.step
        for made in own.entered.remade:
            there = [self.live.get(source) for source in made.sources]
            lives = all(one is not None and one.state.number == number for one in there)
            if made.stage in own.served - own.stages.keys() and lives:
                own.stages[made.stage] = self.begun_with[number]
        if own.served <= own.stages.keys() and not own.is_ready:
            own.applied, own.is_ready = self.begun_with[number], True

    def gives(self, there: Process) -> bool:
        """Tell whether a member of the same generation sends what it holds: here always."""
        return True

    def hold(self, host: int) -> None:
        """A member has computed the next step."""
        self.compute(host)
        self.hear_of_computed(len(self.computed) - 1)

    def compute(self, host: int) -> None:
        """A member computes the next step, of which its part in the decisions may hear later."""
        if host not in self.live:
            return
        self.fetch(host)
        own = self.live[host]
        if own.has_all and own.state.number:
            number, step = own.state.number, len(own.applied) + 1
            if self.rules.remakes is not None:
                self.copies[host].add(((min(own.served) + 2) % self.stages, step - 1))
            event = Held(number, step, (number, step), tuple(sorted(self.copies[host])))
            self.computed.append((own.state.process, host, event))

    def hear_of_computed(self, place: int) -> None:
        """The part of a host in the decisions hears of what this process of it has computed."""
        if self.computed:
            process, host, event = self.computed.pop(place % len(self.computed))
            if host in self.live and self.live[host].state.process == process:
                self.tell(host, event)

    def deliver(self, place: int, *, keep: bool) -> None:
        if self.messages:
            place %= len(self.messages)
            source, sent = self.messages[place]
            if not keep:
                del self.messages[place]
            self.show(sent.target, source, is_there=True)  # Whatever comes from a host shows that.
            self.tell(sent.target, Received(source, sent.message))

    def show(self, host: int, other: int, *, is_there: bool) -> None:
        """A host notices whether another is there, if it took it to be otherwise."""
        own = self.live.get(host)
        if own is not None and is_there == (other in own.state.suspected):
            self.tell(host, Presence(other, is_there=is_there))

    def save(self, host: int) -> None:
        """All members have saved what they have applied, if all have applied the same."""
        if host not in self.live or not self.live[host].has_all:
            return
        own = self.live[host]
        there = [self.live.get(member) for member in own.state.members]
        numbers = {None if one is None else one.state.number for one in there}
        alike = all(one is not None and one.has_all and one.applied == own.applied for one in there)
        if alike and numbers == {own.state.number} and own.state.number:
            self.checkpoints[len(own.applied)] = own.applied
            self.tell(host, Saved(len(own.applied)))

    def crash(self, host: int) -> None:
        self.live.pop(host, None)

    def start(self, host: int, *, is_diskless: bool = False) -> None:
        if host not in self.live:
            self.copies[host].clear()
            self.processes[host] += 1
            rules = replace(self.rules, is_diskless=is_diskless)
            state = ConsensusState(host, self.processes[host], rules)
            self.live[host] = Process(state, is_ready=False)

    def act(self, kind: str, a: int, b: int) -> None:
        """Something happens; what the numbers mean depends on what."""
        hosts = self.rules.hosts
        one, other = hosts[a % len(hosts)], hosts[b % len(hosts)]
        match kind:
            case "deliver":
                self.deliver(a, keep=False)
            case "double":
                self.deliver(a, keep=True)
            case "lose" if self.messages:
                del self.messages[a % len(self.messages)]
            case "tick":
                self.tell(one, Tick())
            case "hold":
                self.hold(one)
            case "compute":
                self.compute(one)
            case "computed":
                self.hear_of_computed(a)
            case "save":
                self.save(one)
            case "suspect" if one != other:
                self.tell(one, Presence(other, is_there=False))
            case "hear" if one != other:
                self.tell(one, Presence(other, is_there=True))
            case "crash":
                self.crash(one)
            case "start":
                self.start(one)
            case "leave":
                self.tell(one, Told())
            case "wish" if one in self.live:
                self.wish(one, a)
            case "abandon" if one in self.live:
                self.tell(one, Abandoned(self.live[one].state.number))
            case "join":
                self.start(one, is_diskless=True)

    def wish(self, host: int, number: int) -> None:
        """A host wants all to go on under some placement; only the wish of a leader counts."""
        wanted = {
            other: {s for s in range(self.stages) if (number * 7 + other * 3 + s) % 3 != 0} or {0}
            for other in self.rules.hosts
        }
        placement = by_stage(wanted, self.stages)
        self.tell(host, PlanRequest(self.live[host].state.number, placement, f"plan {number}"))

    def settle(self) -> None:
        """All that live do what is their part, and hear of it, but compute nothing."""
        for host in [*self.live]:
            self.tell(host, Tick())
        for _ in range(200):  # An answer may be asked for again by another answer.
            self.deliver(0, keep=False)

    def calm(self, rounds: int) -> None:
        """From now on nothing is lost, and who lives is known."""
        while self.computed:
            self.hear_of_computed(0)
        for _ in range(rounds):
            for host in [*self.live]:
                for other in self.rules.hosts:
                    if other != host:
                        self.show(host, other, is_there=other in self.live)
                self.hold(host)
                self.tell(host, Tick())
            for _ in range(len(self.messages)):
                self.deliver(0, keep=False)

    def can_go_on(self) -> bool:
        """Whether so many members of the last generation live, as they were then, as it takes."""
        last = self.decided[max(self.decided)]
        known = [
            host
            for host, process in zip(last.members, last.processes, strict=True)
            if host in self.live and self.live[host].state.process == process
        ]
        entered = any(self.live[host].state.number == last.number for host in known)
        two = len(last.members) == 2 and not last.diskless
        return entered and (can_decide(last, known) or (two and bool(known)))


KINDS = [
    *["deliver"] * 50, *["tick"] * 12, *["hold"] * 14, *["compute"] * 8, *["computed"] * 3,
    "double", "double", "lose", "lose", "suspect", "suspect", "hear", "hear", "save", "save",
    "crash", "start", "start", "join", "leave", "wish", "wish", "abandon",
]  # fmt: skip


def require_goes_on(simulation: Simulation) -> None:
    """From now on all is calm: those that live go on together, if they can."""
    goes_on = simulation.can_go_on()
    before = max(len(own.applied) for own in simulation.live.values()) if simulation.live else 0
    simulation.calm(30)
    if simulation.has_ended or not (goes_on and simulation.can_go_on()):
        return
    # Nobody takes in who is about to leave.
    staying = [
        own
        for host, own in simulation.live.items()
        if own.state.number or host not in own.state.leaving
    ]
    assert len({own.state.number for own in staying}) == 1, "all that live go on together"
    assert staying[0].state.number
    applied = sorted((own.applied for own in staying), key=len)
    assert all(own == applied[-1][: len(own)] for own in applied)
    assert len(applied[-1]) - len(applied[0]) <= 1
    last = simulation.decided[max(simulation.decided)]
    assert len(applied[-1]) > (before if not last.is_rewound else last.step)


def run(simulation: Simulation) -> None:
    """Deliver all that is under way, in order."""
    while simulation.messages:
        simulation.deliver(0, keep=False)


def stepped(hosts: int, **options: Any) -> Simulation:
    """Hosts that have made a step together."""
    simulation = Simulation(hosts, **options)
    step(simulation)
    assert all(len(own.applied) == 1 for own in simulation.live.values())
    return simulation


def lose(simulation: Simulation, host: int) -> None:
    simulation.crash(host)
    for other in simulation.live:
        simulation.tell(other, Presence(host, is_there=False))


def restart(simulation: Simulation, host: int) -> None:
    """Start a host again, of which the others notice."""
    simulation.start(host)
    for other in {*simulation.live} - {host}:
        simulation.tell(other, Presence(host, is_there=True))


def tick(simulation: Simulation) -> None:
    for host in [*simulation.live]:
        simulation.tell(host, Tick())


def pass_time(simulation: Simulation, ticks: int = 1) -> None:
    """All tick so often, and hear each time what others send."""
    for _ in range(ticks):
        tick(simulation)
        run(simulation)


def lose_all(simulation: Simulation, *hosts: int) -> Generation:
    """The generation that follows when hosts are lost, at once."""
    for host in hosts:
        lose(simulation, host)
    pass_time(simulation)
    return last_of(simulation)


def generations(simulation: Simulation) -> set[int]:
    return {own.state.number for own in simulation.live.values()}


def tell_to_leave(simulation: Simulation, *hosts: int) -> None:
    """Some hosts are told to leave, and the others have heard of it long enough."""
    for host in hosts:
        simulation.tell(host, Told())
    pass_time(simulation, HEARTBEATS_BEFORE_LEAVING)


def step(simulation: Simulation, *hosts: int) -> None:
    """Some hosts compute the next step, or all, and hear of each other."""
    for host in hosts or [*simulation.live]:
        simulation.hold(host)
    run(simulation)


def last_of(simulation: Simulation) -> Generation:
    return simulation.decided[max(simulation.decided)]
