"""A host that holds stages of a service: it runs them on what comes, and passes the rest on."""

from __future__ import annotations

import asyncio
import queue
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import jax
import msgspec
import numpy as np
from msgspec import Meta
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax import log
from skippipe_jax.config import parse_config
from skippipe_jax.connections.addresses import (
    chosen_address,
    join_address,
    listening_socket,
    parse_address,
    reachable_address,
)
from skippipe_jax.connections.hello import ShortText, refusal_in
from skippipe_jax.connections.keys import Keys
from skippipe_jax.connections.links import (
    LINE_BYTES,
    Link,
    Tasks,
    each_in_a_task,
    open_link,
    reach,
)
from skippipe_jax.connections.pulse import BEATS
from skippipe_jax.errors import TlsMismatch
from skippipe_jax.inference.decoding import Step
from skippipe_jax.inference.model_source import ModelSource
from skippipe_jax.models.llama import stage_shapes
from skippipe_jax.profiling.devices import available_bytes
from skippipe_jax.serving.held_stages import HeldStages, Slots
from skippipe_jax.serving.wire import Wire

PROTOCOL = 3
"""Hosts of another number do not understand each other."""
STAGE_HOST, PASSES = "stage-host", "pass"
"""What a host says first to the front, and to another host."""
SERVICE_THERE = "a service is there"
"""What the front says to those that are no hosts of it."""
MOST_SILENCES = 4
"""A host leaves when a step takes as many times `silent_s`: others go on without it."""
ROUND_TRIPS_S = 1.0
"""How often the front is told how far other hosts are, at least, in seconds."""
PATIENCE_S = 300.0
"""How long a host looks for the front by default."""


class HostHello(msgspec.Struct, frozen=True):
    """What a host says of itself.

    Attributes:
        name: for readers.
        address: where it takes what others pass on, ``IP:PORT``.
        room_bytes: what it may fill.
        most_stages: how many it holds at most; None for as many as it has room for.
        identity: of the weights that it has itself; None if it has none.
    """

    name: ShortText
    address: ShortText
    room_bytes: Annotated[float, Meta(gt=0)]
    most_stages: Annotated[int, Meta(ge=1)] | None
    identity: ShortText | None


class StageHost:
    """Serves stages for whichever front listens at an address.

    Attributes:
        address: where it takes what other hosts pass on; None before that is known.
    """

    def __init__(
        self,
        coordinator: str,
        keys: Keys,
        source: ModelSource | None = None,
        bind_address: str | None = None,
        name: str | None = None,
        most_stages: int | None = None,
        patience_s: float = PATIENCE_S,
    ):
        """Look for the front at `coordinator`; without a source, it sends the weights.

        Args:
            coordinator: where the front listens.
            keys: by what the hosts of the service know each other.
            source: the weights that this host has itself.
            bind_address: of this host, where it shall be another than that towards the front.
            name: what readers know this host by, beside the name of the machine.
            most_stages: how many to hold at most; None for as many as there is room for.
            patience_s: how long the front is looked for when it is away, in seconds.
        """
        self._coordinator = parse_address("--coordinator", coordinator)
        self._keys, self._source, self._bind_address = keys, source, bind_address
        self._session: Session | None = None
        self._patience_s, self._most_stages = patience_s, most_stages
        self.address: str | None = None
        self._name = ", ".join(filter(None, (socket.gethostname(), name)))

    async def serve(self) -> None:
        """Hold the stages that the front says, until it says that the service ends.

        Raises:
            InputError: if the front refuses this host.
            TemporaryError: if nobody answers there in time.
        """
        while True:
            link = await reach(self._coordinator, self._patience_s, self._keys)
            if self.address is None:
                self.address = await self._listen(link)
            room_bytes = available_bytes(jax.local_devices()[0], 1, 1)
            identity = None if self._source is None else self._source.identity
            hello = HostHello(self._name, self.address, room_bytes, self._most_stages, identity)
            link.send(STAGE_HOST, PROTOCOL, msgspec.to_builtins(hello))
            said = await link.receive()
            if (refusal := refusal_in(said)) is not None:
                link.writer.close()
                raise refusal
            match said:
                case ["welcome", dict(given)]:
                    session = self._session = Session(link, given, self._source, self._keys)
                    if await session.follow():
                        return
            log.info(f"the front is away ({link.ending}); this host looks for it")
            self._session = None

    async def _listen(self, link: Link) -> str:
        near = link.writer.get_extra_info("sockname")[0]
        chosen = chosen_address(self._bind_address)
        address = chosen or reachable_address(near, self._coordinator[0])
        self._keys.require_allowed(address)
        given = listening_socket(address, 0)
        attend = each_in_a_task(self._attend)
        self._listening = await asyncio.start_server(attend, sock=given, limit=LINE_BYTES)
        return join_address(address, given.getsockname()[1])

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take what another host of the service passes on."""
        link = Link(reader, writer)
        with suppress(TlsMismatch, ssl.SSLError):
            said = await link.hello(self._keys.listening)
            session = self._session
            if session is not None and said == [PASSES, session.service]:
                await Wire(link, session.silent_s).follow(session.take)


class Session:
    """What a host does for one front, from its welcome to its end."""

    def __init__(self, link: Link, given: dict[str, Any], source: ModelSource | None, keys: Keys):
        """Begin with what the front has said; without a source, it sends the weights."""
        self.service, self.silent_s = str(given["service"]), float(given["silent_s"])
        self._front, self._keys = Wire(link, self.silent_s), keys
        context = {"sequence_length": given["model"]["context"]}
        self._config = parse_config({"model": given["model"], "data": context}).model
        self._stages = int(given["stages"])
        self._slots = Slots(**given["slots"])
        self._held = HeldStages(self._config, self._stages, self._slots)
        self._source = source
        # By stage and leaf, the parts of arrays that have come.
        self._parts: dict[int, dict[int, list[np.ndarray]]] = defaultdict(dict)
        self._addresses: dict[int, str] = {}
        self._wires: dict[int, Wire] = {}
        self._tasks = Tasks()
        # By group: that of the last route. What was on its way along another is dropped.
        self._epochs: dict[int, int] = defaultdict(int)
        self._work = queue.SimpleQueue[tuple[dict[str, Any], np.ndarray, np.ndarray] | None]()
        # When the step that is computed has begun.
        self._began_s: float | None = None
        self._failure: BaseException | None = None
        self._has_ended = False

    async def follow(self) -> bool:
        """Do what the front says until the connection ends; tell whether the service has, too.

        Raises:
            BaseException: that by which a stage has failed here.
        """
        self._loop = asyncio.get_running_loop()
        computing = threading.Thread(target=self._compute, name="skippipe-stages", daemon=True)
        computing.start()
        telling = asyncio.create_task(self._tell_round_trips())
        watching = asyncio.create_task(self._watch_computing())
        try:
            await self._front.follow(self.take)
        finally:
            telling.cancel()
            watching.cancel()
            self._tasks.cancel()
            for wire in self._wires.values():
                wire.close()
            self._work.put(None)
        if self._failure is not None:
            raise self._failure
        return self._has_ended

    def take(self, message: list[Any], arrays: list[np.ndarray]) -> None:
        """Take a message of the front, or what another host passes on."""
        match message, arrays:
            case ["step", dict(given)], [x, positions]:
                group, epoch = given["group"], given["epoch"]
                if epoch >= self._epochs[group]:
                    self._epochs[group] = epoch
                    self._work.put((given, x, positions))
            case ["scales"], [scales]:  # Before it holds the first stage.
                self._held = HeldStages(self._config, self._stages, self._slots, scales)
            case ["hold", int(stage)], []:
                self._tasks.start(self._hold(stage))
            case ["drop", int(stage)], []:
                self._held.drop(stage)
            case ["part", int(stage), int(leaf)], [part]:
                self._parts[stage].setdefault(leaf, []).append(part)
            case ["hosts", dict(addresses)], []:
                self._addresses = {int(host): own for host, own in addresses.items()}
                for host in self._addresses.keys() - self._wires.keys():
                    self._tasks.start(self._connect(host))
            case ["end"], []:
                self._has_ended = True
                self._front.close()

    async def _hold(self, stage: int) -> None:
        """Take in a stage in a thread of its own: others run in the meantime."""
        try:
            await asyncio.to_thread(self._load, stage)
        except Exception as error:
            self._fail(error)
        else:
            self._front.send("ready", stage)

    def _load(self, stage: int) -> None:
        parts = self._parts.pop(stage, None)
        if parts is None:
            assert self._source is not None, "or its weights have come"
            return self._held.hold(stage, self._source.load(stage))
        leaves, structure = jax.tree.flatten(stage_shapes(self._config, self._stages)[stage])
        arrays = [
            jax.device_put(np.concatenate(parts[number]).reshape(leaf.shape))
            for number, leaf in enumerate(leaves)
        ]
        self._held.hold(stage, jax.tree.unflatten(structure, arrays))

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._front.close()

    async def _connect(self, host: int) -> Wire | None:
        """Connect to another host, and watch it; None if nobody answers there."""
        try:
            link = await open_link(parse_address("address", self._addresses[host]), keys=self._keys)
        # It may also have gone, or have come and this host is told of it later.
        except (KeyError, OSError, TimeoutError, InputError):
            self._front.send("unreachable", host)
            return None
        if (known := self._wires.get(host)) is not None:  # It was reached in the meantime.
            link.writer.close()
            return known
        link.send(PASSES, self.service)
        wire = self._wires[host] = Wire(link, self.silent_s)
        self._tasks.start(self._watch(host, wire))
        return wire

    async def _watch(self, host: int, wire: Wire) -> None:
        await wire.follow(lambda *_: None)  # Nothing comes this way but beats.
        if self._wires.get(host) is wire:
            del self._wires[host]
            self._front.send("unreachable", host)

    async def _tell_round_trips(self) -> None:
        while True:
            await asyncio.sleep(min(self.silent_s / BEATS, ROUND_TRIPS_S))
            times = {host: own.round_trip_s for host, own in self._wires.items()}
            known = {host: own for host, own in times.items() if own is not None}
            self._front.send("round_trips", known)

    async def _watch_computing(self) -> None:
        """Leave when a step does not end, which the beats of this host do not show."""
        most_s = MOST_SILENCES * self.silent_s
        while True:
            await asyncio.sleep(self.silent_s / BEATS)
            began_s = self._began_s
            if began_s is not None and time.monotonic() - began_s > most_s:
                problem = f"a step has not ended in {most_s:g} s: its device hangs, or is too slow"
                remedy = "Start it again, or raise cluster.heartbeat_timeout_s on the first host"
                self._fail(TemporaryError("host", socket.gethostname(), problem, remedy))
                return

    async def _pass_on(self, given: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Send what the stages here have made of a step to the next host, or to the front."""
        route = given["route"]
        if not route:
            travelled = arrays[0] if given["is_read"] else arrays[0][:0]
            self._front.send("done", given, arrays=[travelled])
            return
        host = route[0][0]
        wire = self._wires.get(host) or await self._connect(host)
        if wire is not None:
            wire.send("step", given, arrays=arrays)

    # In the thread that computes.

    def _compute(self) -> None:
        try:
            while (item := self._work.get()) is not None:
                given, x, positions = item
                if given["epoch"] < self._epochs[given["group"]]:
                    continue
                (_, stages), *rest = given["route"]
                began_s = self._began_s = time.monotonic()
                step = Step(np.zeros_like(positions), positions, given["slot"])
                x = self._held.run(given["group"], tuple(stages), x, step, given["skipped"])
                seconds = [*given["seconds"], time.monotonic() - began_s]
                self._began_s = None
                told = {**given, "route": rest, "seconds": seconds}
                self._call(self._send, told, [x, positions])
        except BaseException as error:
            self._call(self._fail, error)

    def _call(self, callback: Callable[..., None], *given: Any) -> None:
        """Call something on the event loop, if that has not ended with this session."""
        with suppress(RuntimeError):  # It is closed.
            self._loop.call_soon_threadsafe(callback, *given)

    # Of the event loop.

    def _send(self, given: dict[str, Any], arrays: list[np.ndarray]) -> None:
        self._tasks.start(self._pass_on(given, arrays))
