"""Hosts that agree by the production code of the control plane, under faults that a seed draws.

Each host is what it is in a run, from its listening port to the rules of `consensus`, but for the
training itself: that computes steps, takes stages from other hosts and saves checkpoints as in
`tests.consensus.simulation`, whose assertions hold here as well. What a host does when a generation
ends, an error comes or another begins, the state machine of `elastic.coordinator` decides.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from skippipe_sched.errors import TemporaryError

from skippipe_jax.cluster import membership
from skippipe_jax.cluster.ending import LINGER_S
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.cluster.position import HostPosition
from skippipe_jax.config import ClusterConfig
from skippipe_jax.config.cluster import AVERAGE, BUDDY, REWIND, SKIP, STOP
from skippipe_jax.connections import host_listener, mesh
from skippipe_jax.consensus.decisions import first_state
from skippipe_jax.consensus.generations import (
    Abandoned,
    ConsensusState,
    Decision,
    Enter,
    Event,
    Generation,
    NotMember,
    RolledBack,
    Told,
)
from skippipe_jax.training.elastic import coordinator
from skippipe_jax.training.elastic.coordinator import (
    JOINING,
    Cause,
    Confirming,
    Entered,
    Failed,
    HostPolicy,
    Opening,
    Signal,
    StateOrigin,
    StateSource,
    Suspended,
    Training,
)
from tests.cluster.virtual_network import OWN, Process, VirtualLoop, VirtualStorage
from tests.consensus import simulation as rules_alone
from tests.consensus.simulation import Simulation
from tests.consensus.test_lost_stages import options_of

CLUSTER = ClusterConfig(heartbeat_timeout_s=10.0, connect_timeout_s=60.0)
COORDINATOR = ("127.0.0.1", 9999)
STEP_S = 0.4
POLL_S = 0.1
SETTLES_S = 4 * CLUSTER.heartbeat_timeout_s
"""Within so long after the last fault the hosts go on, if they can."""


class Host(rules_alone.Process):
    """A process of a host, whose state is that of its part in the consensus."""

    def __init__(self, host: int, attended: Membership, process: Process, is_ready: bool):
        """Be in no generation."""
        self.attended, self.process = attended, process
        self.policy = HostPolicy(
            host, 1e9, 2 * CLUSTER.heartbeat_timeout_s, "any", replicas_diverge=False
        )
        self.has_cut_transfers, self.has_read = False, 0
        self.at: coordinator.CoordinatorState = JOINING
        self.applied, self.is_ready, self.entered, self.stages = [], is_ready, None, {}

    def advance(self, event: coordinator.CoordinatorEvent) -> coordinator.CoordinatorState:
        """Let an event come to what decides what this host does."""
        self.at = coordinator.advance(self.at, event, self.policy)
        return self.at

    @property
    def state(self) -> ConsensusState:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return what its part in the consensus knows."""
        return self.attended.control.state


class ControlSimulation(Simulation):
    """Hosts of a run on a simulated clock and network."""

    live: dict[int, Host]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, hosts: int, seed: int, *, keeps_enough: bool, extra_hosts: int = 0, **options: Any
    ):
        """Start no host yet; with `keeps_enough` so many live on that they can decide.

        Other options are those of `Simulation`.
        """
        super().__init__(hosts, extra_hosts=extra_hosts, **options)
        self.keeps_enough, self.extra_hosts = keeps_enough, extra_hosts
        self.own_hosts = self.rules.hosts[:hosts]
        self.first_stages = {host: own.stages for host, own in self.live.items()}
        self.live.clear()
        self.random = random.Random(seed)
        self.loop = VirtualLoop(seed)
        self.network, self.storage = self.loop.network, VirtualStorage(self.loop)
        self.addresses: dict[int, str] = {}
        self.starting: set[int] = set()
        self.has_begun = False
        self.damaged, self.read_in = set[int](), dict[int, int]()
        self.settled_s, self.log = 0.0, list[tuple[float, int, str]]()

    # The life of a host.

    def run(self, until: Callable[[], bool], within_s: float) -> None:
        """Let time go on until something is so.

        Raises:
            AssertionError: if it does not become so.
        """
        end_s = self.loop.time() + within_s
        while not until():
            living = {host: own.state.number for host, own in self.live.items()}
            assert self.loop.time() < end_s, f"not within {within_s:g} s; generations {living}"
            self.wait(0.1)

    def wait(self, seconds: float) -> None:
        """Let time go on."""
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self.raise_errors()

    def raise_errors(self) -> None:
        """Raise the first error of a process."""
        for part in [part for part in self.loop.parts if part.done()]:
            self.loop.parts.remove(part)
            part.result()
        if self.loop.errors:
            raise self.loop.errors[0]

    def begin(self) -> None:
        """Start all hosts, which meet and begin a run."""
        for host in self.own_hosts:
            self.start(host)
        self.run(lambda: self.live.keys() >= {*self.own_hosts}, 120.0)
        self.has_begun = True

    def start(self, host: int, *, is_diskless: bool = False) -> None:
        """Start a process of a host: the first begins the run, and later ones come back to it."""
        if host in self.live or host in self.starting:
            return
        self.starting.add(host)
        process = Process(self.loop, host)
        own = Host(host, Membership(CLUSTER, host, len(self.own_hosts)), process, False)
        own.attended.process = 1000 * (host + 1) + self.processes[host]
        process.start(self._live(host, own, is_diskless))

    async def _live(self, host: int, own: Host, is_diskless: bool) -> None:
        attended = own.attended
        is_first = host in self.own_hosts and self.processes[host] == 0
        self.processes[host] += 1
        position = HostPosition(
            host, len(self.own_hosts), COORDINATOR, extra_hosts=self.extra_hosts
        )
        known = [] if is_first else [own for at, own in self.addresses.items() if at != host]
        begun: Future[None] = Future()
        own.process.start(attended._attend(position, None, known, begun))
        try:
            await asyncio.wrap_future(begun)
        except TemporaryError:
            if is_first:
                raise
        self.starting.discard(host)
        if not is_first and not attended.is_outside:
            self._start_again(host, 1.0)
            return own.process.end()
        self.addresses[host] = attended.control_address
        if is_first:
            own.is_ready, own.stages = True, self.first_stages[host]
            first = own.entered = self.decided[1]
            own.at = Opening(first, StateSource(0, StateOrigin.OWN))
            attended.inbox.follow(Enter(first))
            state = first_state(host, self.rules, first, 0)
        else:
            rules = replace(self.rules, is_diskless=is_diskless)
            state = ConsensusState(host, self.processes[host], rules)

        def follow(decision: Decision) -> None:
            attended.inbox.follow(decision)
            if self.live.get(host) is own:
                self._follow(host, decision)

        self.live[host] = own
        self.copies[host].clear()
        await attended._begin_control(state, follow, self._store)
        await self._train(host, own)

    def _store(self, generation: Generation) -> Generation:
        return self.store.setdefault(generation.number, generation)

    async def _train(self, host: int, own: Host) -> None:
        while True:
            await asyncio.sleep(self.random.uniform(0.2 * STEP_S, STEP_S))
            if self.has_ended or self.live.get(host) is not own:
                return
            if self._fails(own) and self.random.random() < 0.3:
                await self._confirm(host, own)
                continue
            if isinstance(own.at, Opening) and self._has_read(host, own):
                self.fetch(host)
                if own.has_all:
                    own.advance(Signal.OPENED)
            if isinstance(own.at, Training):
                self.compute(host)
            await asyncio.sleep(self.random.uniform(0.0, 0.2 * STEP_S))
            while self.computed:
                _, where, event = self.computed.pop(0)
                if where == host and self.live.get(host) is own:
                    self.tell(host, event)
            if isinstance(own.at, Training) and len(own.applied) % 7 == 6:
                self.save(host)

    def _has_read(self, host: int, own: Host) -> bool:
        """Read the newest checkpoint that is not damaged, once all members of a rollback can."""
        generation = own.entered
        assert generation is not None
        if not generation.is_rewound:
            return True
        number = generation.number
        if number not in self.read_in:
            there = [self.live.get(member) for member in generation.members]
            if not all(one and one.entered and one.entered.number == number for one in there):
                return False
            usable = self.checkpoints.keys() - self.damaged
            self.read_in[number] = max(step for step in usable if step <= generation.step)
        own.has_read, step = number, self.read_in[number]
        if step < generation.step:
            own.entered, self.begun_with[number] = (
                replace(generation, step=step),
                self.checkpoints[step],
            )
            if own.is_ready:
                own.applied = list(self.checkpoints[step])
                own.stages = dict.fromkeys(own.served, own.applied)
            self.tell(host, RolledBack(number, step))
        return True

    def gives(self, there: rules_alone.Process) -> bool:
        """Tell whether a member has read the checkpoint whose states it is to send."""
        assert isinstance(there, Host)
        assert there.entered is not None
        return not there.entered.is_rewound or there.has_read == there.entered.number

    def save(self, host: int) -> None:
        """All members have saved what they have applied, if all have applied the same."""
        before = self.checkpoints.copy()
        super().save(host)
        self.damaged -= {
            step for step, own in self.checkpoints.items() if before.get(step) is not own
        }

    def _fails(self, own: Host) -> bool:
        """Tell whether a transfer with another member would fail."""
        uses_transfers = self.has_begun and isinstance(own.at, Opening | Training)
        return uses_transfers and (own.has_cut_transfers or self._has_lost_peers(own))

    def _has_lost_peers(self, own: Host) -> bool:
        """Tell whether a member is gone, or has gone on to another generation."""
        assert own.entered is not None
        number = own.entered.number

        def is_lost(member: int, process: int) -> bool:
            peer = self.live.get(member)
            if peer is None or peer.state.process != process:
                return True
            last = 0 if peer.entered is None else peer.entered.number
            return last > number or (last == number and peer.state.number == 0)

        return any(map(is_lost, own.entered.members, own.entered.processes))

    async def _confirm(self, host: int, own: Host) -> None:
        """Find out what has caused an error, and make transfers again where no host has."""
        assert own.entered is not None
        members, number = own.entered.members, own.entered.number
        has_lost = self._has_lost_peers(own)
        has_stepped = len(own.applied) > own.entered.step
        state = own.advance(Failed(Cause.TRANSFER, has_stepped))
        assert isinstance(state, Confirming)
        for _ in range(int(state.seconds / POLL_S)):
            await asyncio.sleep(POLL_S)
            if self.live.get(host) is not own or not isinstance(own.at, Confirming):
                return
            if not own.attended.missed.isdisjoint(members):
                state = own.advance(Signal.MISSED)
                break
        else:
            state = own.advance(Signal.TIME_OVER)
        if isinstance(state, Suspended):
            assert state.abandons
            self.tell(host, Abandoned(number))
        else:
            there = {at: (one.state.number, type(one.at).__name__) for at, one in self.live.items()}
            assert not has_lost, f"host {host} takes a loss for its own error: {there}"
            own.has_cut_transfers = False
            if not self.keeps_enough or self._can_spare(host):
                self.crash(host)

    def take_state(self, host: int, generation: Generation) -> None:
        """A member goes on with what its state machine chooses, over new transfers."""
        own = self.live[host]
        own.has_cut_transfers = False
        if not isinstance(own.at, Suspended):
            own.advance(Signal.ENDED)
        assert isinstance(own.at, Suspended)
        has_session = own.at.source is None
        state = own.advance(Entered(generation, len(own.applied) if has_session else None))
        assert isinstance(state, Opening), state
        match state.source.origin:
            case StateOrigin.PEERS:
                self.begin_empty(host)
            case StateOrigin.CHECKPOINT:
                self.restore(host, generation)
            case StateOrigin.OWN:
                pass

    def tell(self, host: int, event: Event) -> None:
        """Tell the control plane of a host, as its training does."""
        own = self.live.get(host)
        if own is not None and own.attended._control is not None:
            own.process.context.copy().run(own.attended.control.tell, event)

    def crash(self, host: int, *, for_s: float = 5.0) -> None:
        """End the process of a host, which is started again some seconds later."""
        if host in self.live:
            self.live.pop(host).process.end()
            self._start_again(host, for_s)

    def _start_again(self, host: int, after_s: float) -> None:
        # Who has joined may come again, or another in its place; nobody starts it.
        if host in self.own_hosts:
            self.network.at(self.loop.time() + after_s, lambda: self.start(host))

    def _follow(self, host: int, decision: Decision) -> None:
        match decision:
            case Enter(generation):
                self.log.append((self.loop.time(), host, f"enters {generation.number}"))
            case NotMember() if not isinstance(self.live[host].at, Suspended):
                self.live[host].advance(Signal.ENDED)
            case _:
                pass
        own = self.live[host]
        if isinstance(decision, NotMember) and host in own.state.leaving:
            own.process.start(self._part(host, own))
        else:
            self.do(host, decision)

    async def _part(self, host: int, own: Host) -> None:
        """End a host that has left, as `Membership.leave` does: it lingers to be heard."""
        own.is_ready = False
        await own.attended._mesh.part(LINGER_S)
        if self.live.get(host) is own:
            self.crash(host)

    # Faults.

    def fault(self) -> None:
        """Let something go wrong, which may mend itself."""
        random, hosts = self.random, self.rules.hosts
        one, other = random.sample(hosts, 2)
        kind = random.choice(FAULTS)
        lasts_s = random.choice([1.0, 5.0, 15.0, 40.0])
        now_s = self.loop.time()
        match kind:
            case "die" | "leave" if self.keeps_enough and not self._can_spare(one):
                pass
            case "die":
                self.crash(one, for_s=lasts_s)
            case "leave" if one in self.live and not self.live[one].state.number:
                self.crash(one)  # Who waits to be taken in, and is told to leave, ends at once.
            case "leave":
                self.tell(one, Told())
            case "join" if self.extra_hosts:
                new = random.choice(hosts[len(self.own_hosts) :])
                self.start(new, is_diskless=random.random() < 0.5)
            case "wish" if one in self.live:
                self.wish(one, random.randrange(100))
            case "pause" if one in self.live:
                process = self.live[one].process
                process.stop()
                self.network.at(now_s + lasts_s, process.go_on)
            case "reset":
                self.network.break_all(one, other)
                for host in {one, other} & self.live.keys():
                    self.live[host].has_cut_transfers = True
            case "one way":
                self._cut_for(lasts_s, {(one, other)})
            case "black hole":
                self._cut_for(lasts_s, {(one, other), (other, one)})
            case "partition":
                side = {*random.sample(hosts, random.randint(1, len(hosts) // 2))}
                between = {(a, b) for a in side for b in hosts if b not in side}
                self._cut_for(lasts_s, between | {(b, a) for a, b in between})
            case "slow":
                self.network.slow[one, other] = random.uniform(0.5, 3.0)
                self.network.at(now_s + lasts_s, lambda: self.network.slow.pop((one, other), None))
            case "damage":
                self.damaged.add(max(self.checkpoints) or -1)  # The initial state is not stored.
            case "storage hangs":
                self.storage.hangs_until_s = now_s + lasts_s
            case "storage fails":
                self.storage.fails = lambda: random.random() < 0.5
                self.network.at(now_s + lasts_s, self._mend_storage)
            case _:
                pass
        self.log.append((now_s, one, f"{kind}, {other}, {lasts_s:g} s"))

    def _can_spare(self, host: int) -> bool:
        """Tell whether the others could go on if this host ended now."""
        there = self.live.pop(host, None)
        try:
            return self.can_go_on()
        finally:
            if there is not None:
                self.live[host] = there

    def _cut_for(self, lasts_s: float, ways: set[tuple[int, int]]) -> None:
        self.network.cut |= ways

        def heal() -> None:
            self.network.cut -= ways
            self.network.heal_some()

        self.network.at(self.loop.time() + lasts_s, heal)

    def _mend_storage(self) -> None:
        self.storage.fails = lambda: False

    def cut(self, one: int, other: int) -> None:
        """Let nothing pass between two hosts, until `mend`."""
        self.network.cut |= {(one, other), (other, one)}

    def mend(self) -> None:
        """Mend everything, and start all hosts again that do not live."""
        self.network.heal()
        self.storage.hangs_until_s = 0.0
        self._mend_storage()
        for own in [*self.live.values()]:
            own.process.go_on()
        for host in self.own_hosts:
            self.start(host)

    def require_goes_on(self) -> None:
        """Mend all. If those that live can go on, all do so together, within `SETTLES_S`.

        Raises:
            AssertionError: if they do not.
        """
        could = self.can_go_on()
        self.mend()
        if not could or self.has_ended:
            return
        mended_s = self.loop.time()

        def are_together() -> bool:
            everybody = self.live.keys() >= {*self.own_hosts}
            numbers = {own.state.number for own in self.live.values()}
            return everybody and len(numbers) == 1 and numbers != {0}

        self.run(lambda: are_together() or self.has_ended, SETTLES_S)
        before = self.steps
        self.run(lambda: self.steps > before + 2 or self.has_ended, SETTLES_S)
        self.settled_s = self.loop.time() - mended_s

    @property
    def steps(self) -> int:
        """The steps that count so far, by who has applied most."""
        return max((len(own.applied) for own in self.live.values()), default=0)


FAULTS = [
    "die", "die", "die", "leave", "join", "join", "wish", "pause", "pause", "reset", "reset",
    "one way", "black hole", "black hole", "partition", "slow", "storage hangs", "storage fails",
    "damage", "damage",
]  # fmt: skip


@contextmanager
def simulated(
    monkeypatch: pytest.MonkeyPatch, hosts: int, seed: int, **options: Any
) -> Iterator[ControlSimulation]:
    """Hosts that train together, until the block ends. An error shows the seed and the faults.

    Raises:
        AssertionError: if a host has ended by itself.
    """
    simulation = ControlSimulation(hosts, seed, **options)
    errors = simulation.loop.errors

    def listening_socket(address: str, port: int, _: str) -> Any:
        own = simulation.network.free_address(OWN.get().host)
        own.address = (address, port or own.address[1])
        return own

    async def log_and_exit(verdict: Any, *_: Any) -> None:
        errors.append(AssertionError(f"host {OWN.get().host} ends: {verdict.reason}"))

    monkeypatch.setattr(host_listener, "listening_socket", listening_socket)
    monkeypatch.setattr(mesh, "require_free", lambda *_: None)
    monkeypatch.setattr(membership, "DaemonThreads", lambda: simulation.storage)
    monkeypatch.setattr(membership, "log_and_exit", log_and_exit)
    monkeypatch.setattr(membership, "exit_on_error", lambda error, *_: errors.append(error))
    try:
        simulation.begin()
        yield simulation
    except BaseException as error:
        happened = "\n".join(
            f"{at:8.2f} s, host {host}: {what}" for at, host, what in simulation.log
        )
        error.add_note(f"seed {seed}, {hosts} hosts\n{happened}")
        raise
    finally:
        simulation.loop.finish()


def simulate(monkeypatch: pytest.MonkeyPatch, seed: int, faults: int) -> ControlSimulation:
    """Let hosts train under so many faults, all drawn from a seed, and then in calm.

    Raises:
        AssertionError: if something happens that must not, or they do not go on.
    """
    chance = random.Random(f"options of {seed}")
    options: dict[str, Any] = {"keeps_enough": chance.random() < 0.7}
    policy = chance.choice([BUDDY, AVERAGE, SKIP, *[STOP] * 2, *[REWIND] * 5])
    if policy in (STOP, REWIND):
        hosts = chance.randint(3, 5)
        options |= {"rewinds": policy == REWIND, "moves_to_safety": hosts > 3}
        options["extra_hosts"] = chance.choice([0, 0, 1, 2])
    else:
        hosts = 7
        options |= options_of(policy)
    with simulated(monkeypatch, hosts, seed, **options) as simulation:
        for _ in range(faults):
            simulation.wait(chance.choice([0.1, 1.0, 4.0, 12.0]))
            simulation.fault()
            if simulation.has_ended:
                break
        simulation.require_goes_on()
    return simulation
