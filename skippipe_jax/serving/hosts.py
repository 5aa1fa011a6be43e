"""Hosts of a service on the front's side: admission, stage assignment, routes and steps."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
import ssl
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from skippipe_sched.errors import InputError, TemporaryError
from skippipe_sched.problem.plan import DATA_STAGE
from skippipe_sched.serving.case import FRONT

from skippipe_jax import log
from skippipe_jax.config import to_tree
from skippipe_jax.connections.addresses import join_address, listening_socket, require_numeric
from skippipe_jax.connections.hello import ascii_text, refuse
from skippipe_jax.connections.keys import Keys
from skippipe_jax.connections.links import LINE_BYTES, Link, Tasks, each_in_a_task
from skippipe_jax.connections.waiting import telling
from skippipe_jax.errors import PeerError, TlsMismatch
from skippipe_jax.inference.decoding import Step
from skippipe_jax.inference.model_source import ModelSource
from skippipe_jax.models.branch_scales import ScaleTable
from skippipe_jax.models.llama import stage_shapes
from skippipe_jax.profiling.devices import available_bytes
from skippipe_jax.serving.errors import Unavailable
from skippipe_jax.serving.local_stages import Slots
from skippipe_jax.serving.routing import (
    FAIL,
    SKIP,
    WAIT,
    HostView,
    LinkSpeed,
    Planner,
    Route,
    in_series,
    stages_of,
    via_front,
)
from skippipe_jax.serving.stage_host import PROTOCOL, SERVICE_THERE, STAGE_HOST, HostHello
from skippipe_jax.serving.wire import Wire

CHUNK_BYTES = 1 << 22
"""Largest part of the weights in one message, in bytes."""
AVOIDED_S = 30.0
"""Seconds during which routes avoid a broken connection."""
CLOSE_S = 2.0
"""Seconds within which hosts must close their connections at the end of the service."""
LINKS_S = 30.0
"""Most seconds to wait for the speeds of links between hosts before stages are assigned."""

Hop = tuple[int, int]
"""Source host and target host of a transfer."""


class RouteFailed(PeerError):
    """Route whose host is gone or cannot be reached by another host on it."""


@dataclass(frozen=True)
class PendingStep:
    """Step whose result has not returned.

    Attributes:
        group: group of its sequences.
        epoch: epoch of the group's route.
        number: greater than the numbers of all earlier steps.
        route: the part of the route that it runs along.
        is_decoding: whether it is a token of each sequence, not a span of a prompt.
        done: its result.
    """

    group: int
    epoch: int
    number: int
    route: Route
    is_decoding: bool
    done: Future[np.ndarray]

    @property
    def hops(self) -> set[Hop]:
        """Hops of the step, from the front and back to it."""
        return {*itertools.pairwise([FRONT, *(leg.host for leg in self.route), FRONT])}


class PendingSteps:
    """Steps whose results have not returned, by group in the order of sending."""

    def __init__(self):
        """Start without steps."""
        self._by_group: dict[int, deque[PendingStep]] = defaultdict(deque)
        self._numbers = itertools.count()

    def new(self, group: int, epoch: int, route: Route, *, is_decoding: bool) -> PendingStep:
        """Create a step to be sent; any thread may call this."""
        return PendingStep(group, epoch, next(self._numbers), route, is_decoding, Future())

    def add(self, step: PendingStep) -> None:
        """Add a step as it is sent; drop the group's steps of abandoned routes."""
        sent = self._by_group[step.group]
        while sent and sent[0].epoch < step.epoch:
            sent.popleft()
        sent.append(step)

    def take(self, group: int, number: int) -> PendingStep | None:
        """Remove and return the step whose result has arrived; None if its route was abandoned."""
        sent = self._by_group[group]
        if not sent or number < sent[0].number:
            return None
        if sent[0].number < number:
            # A host has reconnected to the next one, and the steps in between are lost.
            self.fail(sent[0].hops, "a step was lost between hosts")
            return None
        return sent.popleft()

    def fail(self, hops: set[Hop], why: str) -> None:
        """Fail all steps of each group that has a step with one of these hops."""
        for sent in self._by_group.values():
            if any(step.hops & hops for step in sent):
                while sent:
                    sent.popleft().done.set_exception(RouteFailed(why))

    def fail_host(self, host: int) -> None:
        """Fail all steps of each group that has a step on this host."""
        hops = {hop for sent in self._by_group.values() for step in sent for hop in step.hops}
        self.fail({hop for hop in hops if host in hop}, f"host {host} failed")


@dataclass(frozen=True)
class LossRules:
    """Rules for lost stages and for the stages of the front.

    Attributes:
        when_lost: treatment of sequences while no host holds a stage, one of `WHEN_LOST`.
        take_over_s: seconds until the remaining hosts load a lost stage, if they have room; None
            is never.
        most_stages: most stages of the front; None for as many as fit.
    """

    when_lost: str = SKIP
    take_over_s: float | None = None
    most_stages: int | None = None


@dataclass
class Member:
    """Connected host.

    Attributes:
        host: its number, never used before for another host.
        hello: its hello message.
        wire: the connection to it.
        assigned: stages assigned to it; None before the assignment.
        ready: assigned stages that it has loaded.
        block_s: smoothed seconds of one block in a step; None before the first measurement.
        speeds: speeds of the links from it to other hosts, and to the front.
    """

    host: int
    hello: HostHello
    wire: Wire
    assigned: tuple[int, ...] | None = None
    ready: set[int] = field(default_factory=set)
    block_s: float | None = None
    speeds: dict[int, LinkSpeed] = field(default_factory=dict)

    def view(self, held: Sequence[int]) -> HostView:
        """Return the planner's view of the host, as if it held these stages."""
        hello = self.hello
        return HostView(hello.room_bytes, hello.most_stages, self.block_s, tuple(held))

    def __str__(self) -> str:
        """Return its number and name."""
        return f"host {self.host} ({ascii_text(self.hello.name)})"


class StageHosts:
    """Admission of hosts, assignment of their stages, and execution of steps on them.

    Any thread may call methods that are not marked as of the event loop.

    Attributes:
        slots: slots for sequences on every host.
        scales: scales of branches, as for `StageExecutor`.
        own_stages: stages of the front, once hosts have been gathered.
        version: counter that changes whenever the available stages change.
        address: listening address, ``IP:PORT``; empty before `listen`.
    """

    def __init__(
        self,
        source: ModelSource,
        slots: Slots,
        rules: LossRules,
        keys: Keys,
        silent_s: float,
        scales: ScaleTable | None = None,
    ):
        """Start without hosts; a host is lost after `silent_s` seconds of silence."""
        self.scales = scales
        self._source, self.slots, self._rules = source, slots, rules
        self._keys, self._silent_s = keys, silent_s
        self._service = secrets.token_hex(8)
        self._probing = asyncio.Lock()
        self.address = ""
        model = source.config.model
        self._layers = model.stage_partition(source.stages)
        sizes = [
            sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
            + slots.cache_bytes(model, count)
            for shapes, count in zip(stage_shapes(model, source.stages), self._layers, strict=True)
        ]
        hop_bytes = (
            slots.each * model.width * jnp.dtype(slots.hop_dtype or model.compute_dtype).itemsize
        )
        self._planner = Planner(self._layers, sizes, slots.groups, slots.each, hop_bytes)
        room_bytes = available_bytes(jax.local_devices()[0], 1, 1)
        self._front = HostView(room_bytes, rules.most_stages, None, (DATA_STAGE,))
        self._members: dict[int, Member] = {}
        self._count = 0
        self._expected: int | None = None
        self.version = self._epochs = 0
        self._changed = threading.Condition()
        self._routes: dict[int, Route] = {}
        self._pending = PendingSteps()
        self._avoided: dict[Hop, float] = {}
        self._has_ended = False
        self._failure: InputError | None = None
        self._tasks = Tasks()
        self._thread: threading.Thread | None = None

    # Methods for the front.

    def listen(self, address: str, port: int) -> str:
        """Accept hosts at an address from now on; return ``IP:PORT``.

        Raises:
            InputError: if the keys do not allow the address, or it cannot be listened on.
        """
        self._keys.require_allowed(address)
        if (warning := self._keys.warning(address)) is not None:
            log.warning(warning)
        listening, started = listening_socket(address, port), Future[None]()
        self.address = join_address(address, listening.getsockname()[1])
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listening, started)),
            name="skippipe-hosts",
            daemon=True,
        )
        self._thread.start()
        started.result()
        return self.address

    def gather(self, count: int, timeout_s: float) -> None:
        """Wait until `count` hosts are connected and have loaded their stages.

        Raises:
            TemporaryError: if the hosts are not ready in time, or the service ends.
            InputError: if their memory is too small for all stages.
        """

        def progress(left_s: float) -> str:
            members = [*self._members.values()]
            ready = sum(map(self._is_ready, members))
            connected = f"{len(members)} of {count} hosts connected, {ready} with loaded stages"
            return f"{connected}; {left_s:.0f} s left"

        def are_ready() -> bool:
            members = self._members.values()
            return len(members) >= count and all(map(self._is_ready, members))

        with self._changed:
            self._expected = count
            self._loop.call_soon_threadsafe(self._start_assignment)
            with telling(progress, timeout_s):
                is_over = self._changed.wait_for(lambda: self._has_ended or are_ready(), timeout_s)
            if self._failure is not None:
                raise self._failure
            if is_over and not are_ready():
                remedy = "Read their messages"
                raise TemporaryError("--hosts", count + 1, "the other hosts have ended", remedy)
            if not is_over:
                members = self._members.values()
                problem = f"{len(members)} of {count} other hosts connected within {timeout_s:g} s"
                remedy = "Start the others with skippipe serve --coordinator ADDRESS"
                if len(members) >= count:
                    ready = f"{sum(map(self._is_ready, members))} of {len(members)} other hosts"
                    problem = f"{ready} loaded their stages within {timeout_s:g} s"
                    remedy = "Increase cluster.connect_timeout_s"
                raise TemporaryError("--hosts", count + 1, problem, remedy)
            if missing := self._missing():
                problem = f"stages {missing} do not fit into the memory of {count} hosts"
                remedy = "Start more hosts, or lower --max-num-seqs"
                raise InputError("--hosts", count + 1, problem, remedy)

    def close(self) -> None:
        """End the service on all hosts and wait until they have disconnected."""
        self.give_up()
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def give_up(self) -> None:
        """Stop all waiting for stages."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def status(self) -> list[dict[str, Any]]:
        """Describe the connected hosts, the front first."""
        front = {"host": FRONT, "name": socket.gethostname(), "stages": [*self.own_stages]}
        with self._changed:
            return [front] + [
                {
                    "host": member.host,
                    "name": member.hello.name,
                    "address": member.hello.address,
                    "stages": sorted(member.ready),
                    "loading": sorted({*(member.assigned or ())} - member.ready),
                    "groups": self._load(member.host),
                    "seconds_per_block": member.block_s,
                    **member.wire.speed._asdict(),
                }
                for member in self._members.values()
            ]

    # Methods for decoders.

    def route(self, group: int) -> tuple[Route, int]:
        """Choose a route for a group through all available stages; return it and its epoch.

        Epochs increase: hosts drop steps of earlier epochs.

        Raises:
            Unavailable: if a stage is lost and `when_lost` is `fail`.
        """
        with self._changed:
            if self._rules.when_lost == FAIL and (missing := self._missing()):
                raise Unavailable(f"no host currently holds stages {missing}")
            if self._rules.when_lost == WAIT:
                self._changed.wait_for(lambda: self._has_ended or not self._missing())
            views = {
                member.host: member.view(sorted(member.ready)) for member in self._members.values()
            }
            route = self._planner.route({FRONT: self._front, **views}, self._between, group)
            route = via_front(route, self._is_avoided)
            self._routes[group] = route
            self._epochs += 1
            return route, self._epochs

    def holds(self, route: Route) -> bool:
        """Return whether a route's hosts are ready and it visits all available stages."""
        with self._changed:
            members = self._members
            is_ready = all(
                leg.host in members and members[leg.host].ready >= {*leg.stages}
                for leg in route
                if leg.host != FRONT
            )
            return is_ready and self._available() == {DATA_STAGE, *stages_of(route)}

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
        """Run a step of a group along a part of a route, after its earlier steps.

        The result is empty unless `is_read`. It raises `RouteFailed` if a host of the route is lost
        first, or if an earlier step of the group was lost.
        """
        pending = self._pending.new(group, epoch, route, is_decoding=step.slot is None)
        header = {
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
        self._loop.call_soon_threadsafe(self._send, pending, header, arrays)
        return pending.done

    @property
    def own_stages(self) -> tuple[int, ...]:
        """Stages of the front."""
        return self._front.held

    def _available(self) -> set[int]:
        return set(self.own_stages).union(*(member.ready for member in self._members.values()))

    def _missing(self) -> list[int]:
        held = self._available()
        return [stage for stage in range(self._source.stages) if stage not in held]

    def _is_ready(self, member: Member) -> bool:
        return member.assigned is not None and member.ready >= {*member.assigned}

    def _load(self, host: int) -> int:
        return sum(any(leg.host == host for leg in route) for route in self._routes.values())

    def _is_avoided(self, source: int, target: int) -> bool:
        return time.monotonic() < self._avoided.get((source, target), 0.0)

    def _between(self, source: int, target: int) -> LinkSpeed:
        """Return the speed of a link, via the front where the direct connection failed."""
        if source == FRONT:
            return self._members[target].wire.speed
        if target != FRONT and self._is_avoided(source, target):
            return in_series(self._between(source, FRONT), self._between(FRONT, target))
        return self._members[source].speeds.get(target, LinkSpeed())

    # Methods of the event loop.

    async def _serve(self, listening: socket.socket, started: Future[None]) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._assigning = asyncio.Lock()
        handle = each_in_a_task(self._handle_connection)
        async with await asyncio.start_server(handle, sock=listening, limit=LINE_BYTES):
            started.set_result(None)
            await self._stopping.wait()
            for member in self._members.values():
                member.wire.send("end")
            # Each host closes its connection upon "end"; closed here, "end" might not arrive.
            until_s = self._loop.time() + CLOSE_S
            while self._members and self._loop.time() < until_s:
                await asyncio.sleep(0.01)

    def _send(self, step: PendingStep, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        if disconnected := {leg.host for leg in step.route} - self._members.keys() - {FRONT}:
            step.done.set_exception(RouteFailed(f"hosts {sorted(disconnected)} have disconnected"))
            return
        self._pending.add(step)
        self._members[step.route[0].host].wire.send("step", header, arrays=arrays)

    async def _handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Handle the connection of a host from its hello until it ends."""
        link = Link(reader, writer)
        try:
            received = await link.hello(self._keys.listening)
        except (TlsMismatch, ssl.SSLError):
            log.info("rejected a connection: it does not have the secret of this service")
            return
        match received:
            case [str(role), int(protocol), dict(fields)] if role == STAGE_HOST:
                pass
            case None:
                return
            case _:
                remedy = "Hold its stages with skippipe serve --coordinator ADDRESS"
                refuse(link, InputError("ADDRESS", self.address, SERVICE_THERE, remedy))
                return
        if protocol != PROTOCOL:
            problem = f"hosts of this service use protocol {PROTOCOL}"
            refuse(link, InputError("skippipe-jax", protocol, problem, "Install the same version"))
            return
        try:
            hello = msgspec.convert(fields, HostHello)
            require_numeric(hello.address)
        except ValueError as error:
            log.info(f"rejected a host, its hello is invalid: {error}")
            return
        self._count += 1
        member = Member(self._count, hello, Wire(link, self._silent_s, self._probing))
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
        if self.scales is not None:
            member.wire.send("scales", arrays=[self.scales])
        with self._changed:
            self._members[member.host] = member
            self._changed.notify_all()
        self._start_assignment()
        self._send_addresses()
        await member.wire.follow(lambda message, arrays: self._take(member, message, arrays))
        self._remove(member)

    def _take(self, member: Member, message: list[Any], arrays: list[np.ndarray]) -> None:
        match message, arrays:
            case ["done", dict(header)], [x]:
                self._finish(header, x)
            case ["ready", int(stage)], []:
                with self._changed:
                    member.ready.add(stage)
                    self.version += 1
                    self._changed.notify_all()
                if self._is_ready(member):
                    held = sorted(member.ready)
                    log.info(f"{member} serves stages {held}")
            case ["unreachable", int(host)], [] if host in self._members:
                self._avoided[member.host, host] = time.monotonic() + AVOIDED_S
                self._pending.fail(
                    {(member.host, host)}, f"host {member.host} cannot reach host {host}"
                )
            case ["speeds", dict(speeds)], []:
                member.speeds = {int(host): LinkSpeed(*speed) for host, speed in speeds.items()}

    def _finish(self, header: dict[str, Any], x: np.ndarray) -> None:
        """Complete the pending step with its result."""
        step = self._pending.take(header["group"], header["number"])
        if step is not None:
            self._update_block_s(header["seconds"], step)
            step.done.set_result(x)

    def _update_block_s(self, seconds: Sequence[float], step: PendingStep) -> None:
        """Update `block_s` of the hosts of a route from the seconds of a decoding step."""
        for leg, taken_s in zip(step.route, seconds, strict=True):
            member = self._members.get(leg.host)
            if member is not None and step.is_decoding:
                each_s = taken_s / sum(self._layers[stage] for stage in leg.stages)
                known_s = member.block_s
                member.block_s = each_s if known_s is None else 0.9 * known_s + 0.1 * each_s

    def _remove(self, member: Member) -> None:
        with self._changed:
            del self._members[member.host]
            self.version += 1
            self._changed.notify_all()
        self._avoided = {
            hop: until_s for hop, until_s in self._avoided.items() if member.host not in hop
        }
        # Also at the end of the service, which waits for pending steps.
        self._pending.fail_host(member.host)
        if self._has_ended:
            return
        held = f"stages {sorted(member.ready)}" if member.ready else "no stages"
        why = member.wire.ending
        log.info(f"{member}, which held {held}, failed: {why}")
        if self._rules.take_over_s is not None:
            self._loop.call_later(self._rules.take_over_s, self._take_over)
        self._send_addresses()

    def _send_addresses(self) -> None:
        for member in self._members.values():
            others = {
                other.host: other.hello.address
                for other in self._members.values()
                if other is not member
            }
            member.wire.send("hosts", others)

    def _start_assignment(self) -> None:
        """Assign stages to hosts without any, once the expected number is connected."""
        if self._expected is None or len(self._members) < self._expected:
            return
        self._tasks.start(self._assign())

    async def _assign(self) -> None:
        """Assign stages by the planner and the measurements so far, and let hosts load them."""
        async with self._assigning:
            is_first, self._expected = self._expected != 0, 0
            if is_first:
                await self._wait_for_speeds()
            members = {**self._members}
            hosts = {host: member.view(member.assigned or ()) for host, member in members.items()}
            arguments = {FRONT: self._front, **hosts}, self._speeds(), is_first
            try:
                assigned = await asyncio.to_thread(self._planner.place, *arguments)
            except InputError as error:
                self._failure = error
                self.give_up()
                return
            if is_first:
                # The front keeps its stages: the programs of its groups are compiled with them.
                self._front = replace(self._front, held=assigned[FRONT], room_bytes=0.0)
            for host, member in members.items():
                new = {*assigned[host]} - {*(member.assigned or ())}
                self._tasks.start(self._follow(member, {*assigned[host]}, sorted(new)))
                member.assigned = assigned[host]
            with self._changed:
                self._changed.notify_all()

    async def _follow(self, member: Member, chosen: set[int], new: Sequence[int]) -> None:
        """Let a host drop the stages it no longer needs, then load the new ones."""
        if dropped := member.ready - chosen:
            with self._changed:
                member.ready -= dropped
                self.version += 1
            # Pending steps may still need the left-out stages.
            await asyncio.sleep(self._silent_s)
            for stage in dropped:
                member.wire.send("drop", stage)
        for stage in new:
            await self._load_stage(member, stage)

    async def _wait_for_speeds(self) -> None:
        """Wait until the speeds of all links are known, or for a limited time."""
        clock = asyncio.get_running_loop()
        until_s = clock.time() + LINKS_S
        while clock.time() < until_s:
            pairs = itertools.permutations([FRONT, *self._members], 2)
            if all(None not in self._between(*pair) for pair in pairs):
                return
            await asyncio.sleep(LINKS_S / 300)

    def _speeds(self) -> Callable[[int, int], LinkSpeed]:
        """Return a function of two hosts that gives the current speed of their link."""
        known = {
            pair: self._between(*pair)
            for pair in itertools.permutations([FRONT, *self._members], 2)
        }
        return lambda source, target: known[source, target]

    def _take_over(self) -> None:
        """Assign stages that no host is to hold to the remaining hosts."""
        assigned = set(self.own_stages).union(
            *(member.assigned or () for member in self._members.values())
        )
        if len(assigned) < self._source.stages and not self._has_ended:
            self._tasks.start(self._assign())

    async def _load_stage(self, member: Member, stage: int) -> None:
        """Let a host load a stage; send it the weights if it does not have them."""
        if member.hello.identity != self._source.identity:
            parameters = await asyncio.to_thread(self._source.load, stage)
            for number, leaf in enumerate(jax.tree.leaves(parameters)):
                flat = np.asarray(leaf).reshape(-1)
                each = CHUNK_BYTES // flat.itemsize
                for start in range(0, flat.size, each):
                    chunk = flat[start : start + each]
                    member.wire.send("part", stage, number, arrays=[chunk])
                    await member.wire.drained()
        member.wire.send("hold", stage)
