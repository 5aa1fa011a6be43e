"""The hosts that hold the stages of a service, as its front sees them."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
import ssl
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import jax
import msgspec
import numpy as np
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax import log
from skippipe_jax.config import to_tree
from skippipe_jax.connections.addresses import join_address, listening_socket, require_numeric
from skippipe_jax.connections.hello import printable, refuse
from skippipe_jax.connections.keys import Keys
from skippipe_jax.connections.links import LINE_BYTES, Link, Tasks, each_in_a_task
from skippipe_jax.connections.waiting import telling
from skippipe_jax.errors import PeerError, TlsMismatch
from skippipe_jax.inference.decoding import Step
from skippipe_jax.inference.model_source import ModelSource
from skippipe_jax.models.llama import stage_shapes
from skippipe_jax.serving.errors import Unavailable
from skippipe_jax.serving.held_stages import Slots
from skippipe_jax.serving.routing import (
    DATA_STAGE,
    FAIL,
    FRONT,
    WAIT,
    Route,
    by_the_front,
    shortest_route,
    stages_of,
    stages_to_hold,
)
from skippipe_jax.serving.stage_host import PROTOCOL, STAGE_HOST, HostHello
from skippipe_jax.serving.wire import Wire

PART_BYTES = 1 << 22
"""Weights are sent in parts of at most so many bytes."""
AVOIDED_S = 30.0
"""How long no route has a connection that has broken, in seconds."""


class RouteLost(PeerError):
    """A host along a route is gone, or one that another host there does not reach."""


@dataclass
class Member:
    """A host that is there.

    Attributes:
        host: its number, which no other host had before.
        hello: what it has said of itself.
        wire: the connection with it.
        chosen: the stages that it is to hold; None before that is known.
        ready: those of them that it holds.
        seconds: how long its stages take together for a step, smoothed.
        round_trips: how long a message takes from it to other hosts and back, in seconds.
    """

    host: int
    hello: HostHello
    wire: Wire
    chosen: tuple[int, ...] | None = None
    ready: set[int] = field(default_factory=set)
    seconds: float = 0.0
    round_trips: dict[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Tell its number and name."""
        return f"host {self.host} ({printable(self.hello.name)})"


@dataclass
class _Pending:
    """A step that is under way."""

    epoch: int
    number: int
    edges: set[tuple[int, int]]
    done: Future[np.ndarray]


class StageHosts:
    """Takes in hosts, gives them stages, and runs steps along them.

    What is not marked as of the event loop may be called by any thread.

    Attributes:
        slots: for sequences, on every host.
        address: where it listens, ``IP:PORT``, once it does.
    """

    def __init__(
        self, source: ModelSource, slots: Slots, when_lost: str, keys: Keys, silent_s: float
    ):
        """Expect no host yet; one counts as lost after so many seconds of silence."""
        self._source, self.slots, self._when_lost = source, slots, when_lost
        self._keys, self._silent_s = keys, silent_s
        self._service = secrets.token_hex(8)
        self.address = ""
        self._shapes = stage_shapes(source.config.model, source.stages)
        layers = source.config.model.layers_of_stages(source.stages)
        self._stage_bytes = [
            sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
            + slots.cache_bytes(source.config.model, count)
            for shapes, count in zip(self._shapes, layers, strict=True)
        ]
        self._members: dict[int, Member] = {}
        self._count = 0
        self._expected: int | None = None
        self._version = self._epochs = 0
        self._changed = threading.Condition()
        self._routes: dict[int, Route] = {}
        # By group, in the order in which they were sent, and come back.
        self._pending: dict[int, deque[_Pending]] = defaultdict(deque)
        self._numbers = itertools.count()
        self._avoided: dict[tuple[int, int], float] = {}
        self._has_ended = False
        self._tasks = Tasks()
        self._thread: threading.Thread | None = None

    # For the front.

    def listen(self, address: str, port: int) -> str:
        """Take in hosts at an address from now on; return ``IP:PORT``.

        Raises:
            InputError: if it may not by its keys, or cannot.
        """
        self._keys.require_allowed(address)
        if (warning := self._keys.warning(address)) is not None:
            log.warning(warning)
        given, begun = listening_socket(address, port), Future[None]()
        self.address = join_address(address, given.getsockname()[1])
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(given, begun)),
            name="skippipe-hosts",
            daemon=True,
        )
        self._thread.start()
        begun.result()
        return self.address

    def gather(self, count: int, timeout_s: float) -> None:
        """Wait until so many hosts are there, and hold the stages that they are given.

        Raises:
            TemporaryError: if they are not in time.
            InputError: if they have too little memory for all stages.
        """

        def told(left_s: float) -> str:
            members = [*self._members.values()]
            ready = sum(map(self._is_ready, members))
            there = f"{len(members)} of {count} hosts are there, {ready} of them with their stages"
            return f"{there}; {left_s:.0f} s left"

        def are_ready() -> bool:
            members = self._members.values()
            return len(members) >= count and all(map(self._is_ready, members))

        with self._changed:
            self._expected = count
            self._loop.call_soon_threadsafe(self._give_stages)
            with telling(told, timeout_s):
                is_over = self._changed.wait_for(lambda: self._has_ended or are_ready(), timeout_s)
            if is_over and not are_ready():
                remedy = "Their messages say why"
                raise TemporaryError("--hosts", count + 1, "the others have ended", remedy)
            if not is_over:
                problem = f"{len(self._members)} hosts have come in {timeout_s:g} s"
                remedy = "Start them by skippipe serve --coordinator ADDRESS"
                raise TemporaryError("--hosts", count + 1, problem, remedy)
            if missing := self._missing():
                problem = f"the memory of {count} hosts does not hold stages {missing}"
                remedy = "Start more, or lower --max-num-seqs"
                raise InputError("--hosts", count + 1, problem, remedy)

    def close(self) -> None:
        """Tell all hosts that the service ends."""
        self.give_up()
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()

    def give_up(self) -> None:
        """Wait for no stage any more."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def status(self) -> list[dict[str, Any]]:
        """Describe the hosts that are there, the front first."""
        front = {"host": FRONT, "name": socket.gethostname(), "stages": [DATA_STAGE]}
        with self._changed:
            return [front] + [
                {
                    "host": member.host,
                    "name": member.hello.name,
                    "address": member.hello.address,
                    "stages": sorted(member.ready),
                    "loading": sorted({*(member.chosen or ())} - member.ready),
                    "groups": self._load(member.host),
                    "seconds_per_step": member.seconds,
                    "round_trip_s": member.wire.round_trip_s,
                }
                for member in self._members.values()
            ]

    # For those that decode.

    @property
    def version(self) -> int:
        """Return a number that is another whenever other stages can be had."""
        return self._version

    def route(self, group: int) -> tuple[Route, int]:
        """Choose a way for a group through all stages that somebody holds; return its epoch, too.

        The epoch is greater than those of all routes before: hosts drop what comes along these.

        Raises:
            Unavailable: if a stage is lost, and sequences shall fail then.
        """
        with self._changed:
            if self._when_lost == FAIL and (missing := self._missing()):
                raise Unavailable(f"no host holds stages {missing} at the moment")
            if self._when_lost == WAIT:
                self._changed.wait_for(lambda: self._has_ended or not self._missing())
            holders: dict[int, list[int]] = {}
            for member in self._members.values():
                for stage in member.ready:
                    holders.setdefault(stage, []).append(member.host)
            self._routes.pop(group, None)
            found = shortest_route(holders, self._seconds, self._between)
            found = by_the_front(found, self._is_avoided)
            self._routes[group] = found
            self._epochs += 1
            return found, self._epochs

    def holds(self, route: Route) -> bool:
        """Tell whether all hosts of a route are there, and all stages that can be had are in it."""
        with self._changed:
            members = self._members
            is_whole = all(
                leg.host in members and members[leg.host].ready >= {*leg.stages}
                for leg in route
                if leg.host != FRONT
            )
            ready = set().union(*(member.ready for member in members.values()))
            return is_whole and ready == {*stages_of(route)}

    def start(
        self,
        group: int,
        epoch: int,
        route: Route,
        travelling: np.ndarray,
        step: Step,
        skipped: Sequence[Sequence[int]],
        *,
        is_read: bool,
    ) -> Future[np.ndarray]:
        """Run a step of a group along a part of a route, behind those that have been started.

        What comes back is nothing unless it is read. The result raises `RouteLost` if a host of the
        route is lost before, or a step of the group that was started before has got lost.
        """
        hosts = [FRONT, *(leg.host for leg in route), FRONT]
        pending = _Pending(epoch, next(self._numbers), {*pairwise(hosts)}, Future())
        given = {
            "group": group,
            "epoch": epoch,
            "number": pending.number,
            "slot": step.slot,
            "route": [[leg.host, leg.stages] for leg in route],
            "skipped": skipped,
            "is_read": is_read,
            "seconds": [],
        }
        arrays = [travelling, step.positions]
        self._loop.call_soon_threadsafe(self._send, pending, given, arrays)
        return pending.done

    def _missing(self) -> list[int]:
        ready = set().union(*(member.ready for member in self._members.values()))
        return [stage for stage in range(1, self._source.stages) if stage not in ready]

    def _is_ready(self, member: Member) -> bool:
        return member.chosen is not None and member.ready >= {*member.chosen}

    def _load(self, host: int) -> int:
        return sum(any(leg.host == host for leg in route) for route in self._routes.values())

    def _seconds(self, host: int, stage: int) -> float:
        """Return how long a host takes for a stage, with the groups that it serves already."""
        member = self._members[host]
        each = max(member.seconds, 1e-6) / max(len(member.ready), 1)
        return each * (1 + self._load(host))

    def _is_avoided(self, source: int, target: int) -> bool:
        return time.monotonic() < self._avoided.get((source, target), 0.0)

    def _between(self, source: int, target: int) -> float:
        """Return how long a message takes, by the front if they do not reach each other."""
        if source == FRONT:
            return (self._members[target].wire.round_trip_s or 0.0) / 2
        if target == FRONT:
            return (self._members[source].wire.round_trip_s or 0.0) / 2
        if self._is_avoided(source, target):
            return self._between(source, FRONT) + self._between(FRONT, target)
        return self._members[source].round_trips.get(target, 0.0) / 2

    # Of the event loop.

    async def _serve(self, listening: socket.socket, begun: Future[None]) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        attend = each_in_a_task(self._attend)
        async with await asyncio.start_server(attend, sock=listening, limit=LINE_BYTES):
            begun.set_result(None)
            await self._over.wait()
            wires = [member.wire for member in self._members.values()]
            for wire in wires:
                wire.send("end")
            await asyncio.gather(*(wire.drained() for wire in wires))

    def _send(self, pending: _Pending, given: dict[str, Any], arrays: list[np.ndarray]) -> None:
        first = self._members.get(given["route"][0][0])
        gone = {host for edge in pending.edges for host in edge} - self._members.keys() - {FRONT}
        if first is None or gone:
            pending.done.set_exception(RouteLost(f"hosts {sorted(gone)} are gone"))
            return
        under_way = self._pending[given["group"]]
        while under_way and under_way[0].epoch < pending.epoch:
            under_way.popleft()  # Of a route that was given up: nobody waits for it.
        under_way.append(pending)
        first.wire.send("step", given, arrays=arrays)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take in a host, as long as it is there."""
        link = Link(reader, writer)
        try:
            said = await link.hello(self._keys.listening)
        except (TlsMismatch, ssl.SSLError):
            log.info("refused a connection: it does not have the secret of this service")
            return
        match said:
            case [str(who), int(protocol), dict(given)] if who == STAGE_HOST:
                pass
            case None:
                return
            case _:
                remedy = "Hold stages for it by skippipe serve --coordinator ADDRESS"
                refuse(link, InputError("ADDRESS", self.address, "a service is there", remedy))
                return
        if protocol != PROTOCOL:
            problem = f"hosts of this service speak protocol {PROTOCOL}"
            refuse(link, InputError("skippipe-jax", protocol, problem, "Install the same version"))
            return
        try:
            hello = msgspec.convert(given, HostHello)
            require_numeric(hello.address)
        except ValueError as error:
            log.info(f"refused a host, whose hello {error}")
            return
        self._count += 1
        member = Member(self._count, hello, Wire(link, self._silent_s))
        link.send(
            "welcome",
            {
                "service": self._service,
                "silent_s": self._silent_s,
                "model": to_tree(self._source.config.model),
                "stages": self._source.stages,
                "slots": asdict(self.slots),
            },
        )
        with self._changed:
            self._members[member.host] = member
            self._changed.notify_all()
        self._give_stages()
        self._tell_addresses()
        await member.wire.follow(lambda message, arrays: self._take(member, message, arrays))
        self._lose(member)

    def _take(self, member: Member, message: list[Any], arrays: list[np.ndarray]) -> None:
        match message, arrays:
            case ["done", dict(given)], [x]:
                self._finish(given, x)
            case ["ready", int(stage)], []:
                with self._changed:
                    member.ready.add(stage)
                    self._version += 1
                    self._changed.notify_all()
                if self._is_ready(member):
                    held = sorted(member.ready)
                    log.info(f"{member} serves stages {held}")
            case ["unreachable", int(host)], []:
                self._avoided[member.host, host] = time.monotonic() + AVOIDED_S
                self._break({(member.host, host)}, f"{member.host} does not reach {host}")
            case ["round_trips", dict(known)], []:
                member.round_trips = {int(host): own or 0.0 for host, own in known.items()}

    def _finish(self, given: dict[str, Any], x: np.ndarray) -> None:
        """Take what has come back of a step, unless its route was given up."""
        under_way = self._pending[given["group"]]
        if not under_way or given["number"] < under_way[0].number:
            return
        if under_way[0].number < given["number"]:
            # A host has connected anew to the next one, and what was on its way there is lost.
            self._break(under_way[0].edges, "a step has got lost between hosts")
            return
        pending = under_way.popleft()
        self._learn(given["seconds"], pending)
        pending.done.set_result(x)

    def _learn(self, seconds: Sequence[float], pending: _Pending) -> None:
        """Note how long the hosts of a route took."""
        following = dict(pending.edges)
        host = FRONT
        for taken_s in seconds:
            host = following[host]
            member = self._members.get(host)
            if member is not None:
                known_s = member.seconds
                member.seconds = taken_s if not known_s else 0.9 * known_s + 0.1 * taken_s

    def _lose(self, member: Member) -> None:
        with self._changed:
            del self._members[member.host]
            self._version += 1
            self._changed.notify_all()
        if self._has_ended:
            return
        held = f"stages {sorted(member.ready)}" if member.ready else "no stage yet"
        why = member.wire.ending
        log.info(f"{member}, which had {held}, is lost: {why}")
        edges = {edge for own in self._pending.values() for step in own for edge in step.edges}
        self._break({edge for edge in edges if member.host in edge}, f"host {member.host} is lost")
        self._tell_addresses()

    def _break(self, edges: set[tuple[int, int]], why: str) -> None:
        for under_way in self._pending.values():
            if any(pending.edges & edges for pending in under_way):
                while under_way:
                    under_way.popleft().done.set_exception(RouteLost(why))

    def _tell_addresses(self) -> None:
        for member in self._members.values():
            others = {
                other.host: other.hello.address
                for other in self._members.values()
                if other is not member
            }
            member.wire.send("hosts", others)

    def _give_stages(self) -> None:
        """Choose stages for hosts that have none, once as many are there as are expected."""
        if self._expected is None or len(self._members) < self._expected:
            return
        self._expected = 0
        members = [*self._members.values()]
        new = {own.host: own.hello.room_bytes for own in members if own.chosen is None}
        held = {own.host: own.chosen for own in members if own.chosen is not None}
        for host, stages in stages_to_hold(new, self._stage_bytes, held).items():
            member = self._members[host]
            member.chosen = stages
            for stage in stages:
                self._tasks.start(self._give(member, stage))

    async def _give(self, member: Member, stage: int) -> None:
        """Let a host hold a stage, and send it the weights if it does not have them itself."""
        if member.hello.identity != self._source.identity:
            parameters = await asyncio.to_thread(self._source.load, stage)
            for number, leaf in enumerate(jax.tree.leaves(parameters)):
                flat = np.asarray(leaf).reshape(-1)
                each = PART_BYTES // flat.itemsize
                for start in range(0, flat.size, each):
                    part = flat[start : start + each]
                    member.wire.send("part", stage, number, arrays=[part])
                    await member.wire.drained()
        member.wire.send("hold", stage)
