"""Host of a service's stages: it runs received steps and sends them to the next host."""

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
from skippipe_sched.serving.case import FRONT

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
    BEATS,
    LINE_BYTES,
    Link,
    Tasks,
    each_in_a_task,
    open_link,
    reach,
)
from skippipe_jax.errors import TlsMismatch
from skippipe_jax.inference.decoding import Step
from skippipe_jax.inference.model_source import ModelSource
from skippipe_jax.models.llama import stage_shapes
from skippipe_jax.profiling.devices import available_bytes
from skippipe_jax.serving.local_stages import LocalStages, Slots
from skippipe_jax.serving.wire import Wire

PROTOCOL = 4
"""Version of the protocol; hosts of different versions are incompatible."""
STAGE_HOST, PEER_HOST = "stage-host", "pass"
"""First words of a host to the front and to another host."""
SERVICE_THERE = "is the address of a service"
"""Refusal by the front of connections that are not from stage hosts."""
MOST_SILENCES = 4
"""A host leaves when a step takes this many times `silent_s`; the others continue."""
SPEEDS_S = 1.0
"""Longest interval between reports of link speeds to the front, in seconds."""
PATIENCE_S = 300.0
"""Default of the seconds within which a host must reach the front."""


class HostHello(msgspec.Struct, frozen=True):
    """Hello message of a host.

    Attributes:
        name: name for messages.
        address: address at which it accepts steps of other hosts, ``IP:PORT``.
        room_bytes: memory that it may fill.
        most_stages: most stages that it may hold; None for as many as fit.
        identity: identity of its local weights; None if it has none.
    """

    name: ShortText
    address: ShortText
    room_bytes: Annotated[float, Meta(gt=0)]
    most_stages: Annotated[int, Meta(ge=1)] | None
    identity: ShortText | None


class StageHost:
    """Host that serves stages for the front at an address, and reconnects when it is away.

    Attributes:
        address: address at which it accepts steps of other hosts; None before it listens.
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
        """Prepare to connect to the front at `coordinator`; it sends the weights without a source.

        Args:
            coordinator: address of the front.
            keys: keys with which the hosts of the service authenticate each other.
            source: local weights of this host.
            bind_address: address of this host, if other than the one towards the front.
            name: name of this host in messages, after the name of the machine.
            most_stages: most stages to hold; None for as many as fit.
            patience_s: seconds within which the front must be reached.
        """
        self._coordinator = parse_address("--coordinator", coordinator)
        self._keys, self._source, self._bind_address = keys, source, bind_address
        self._session: FrontSession | None = None
        self._patience_s, self._most_stages = patience_s, most_stages
        self.address: str | None = None
        self._name = ", ".join(filter(None, (socket.gethostname(), name)))

    async def serve(self) -> None:
        """Serve the stages that the front assigns, until it ends the service.

        Raises:
            InputError: if the front refuses this host.
            TemporaryError: if the front is not reached in time.
        """
        while True:
            link = await reach(self._coordinator, self._patience_s, self._keys)
            if self.address is None:
                self.address = await self._listen(link)
            room_bytes = available_bytes(jax.local_devices()[0], 1, 1)
            identity = None if self._source is None else self._source.identity
            hello = HostHello(self._name, self.address, room_bytes, self._most_stages, identity)
            link.send(STAGE_HOST, PROTOCOL, msgspec.to_builtins(hello))
            reply = await link.receive()
            if (refusal := refusal_in(reply)) is not None:
                link.writer.close()
                raise refusal
            match reply:
                case ["welcome", dict(welcome)]:
                    session = self._session = FrontSession(link, welcome, self._source, self._keys)
                    if await session.follow():
                        return
            log.info(f"lost the connection to the front ({link.ending}); reconnecting")
            self._session = None

    async def _listen(self, link: Link) -> str:
        local_ip = link.writer.get_extra_info("sockname")[0]
        chosen = chosen_address(self._bind_address)
        address = chosen or reachable_address(local_ip, self._coordinator[0])
        self._keys.require_allowed(address)
        listening = listening_socket(address, 0)
        handle = each_in_a_task(self._handle_connection)
        self._listening = await asyncio.start_server(handle, sock=listening, limit=LINE_BYTES)
        return join_address(address, listening.getsockname()[1])

    async def _handle_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Receive steps from another host of the service."""
        link = Link(reader, writer)
        with suppress(TlsMismatch, ssl.SSLError):
            hello = await link.hello(self._keys.listening)
            session = self._session
            if session is not None and hello == [PEER_HOST, session.service]:
                await Wire(link, session.silent_s).follow(session.take)


class FrontSession:
    """Session of a host with one front, from its welcome to its end."""

    def __init__(self, link: Link, welcome: dict[str, Any], source: ModelSource | None, keys: Keys):
        """Begin with the front's welcome message; the front sends the weights without a source."""
        self.service, self.silent_s = str(welcome["service"]), float(welcome["silent_s"])
        # Of this host's connections, one is measured at a time.
        self._probing = asyncio.Lock()
        self._front, self._keys = Wire(link, self.silent_s, self._probing), keys
        context = {"sequence_length": welcome["model"]["context"]}
        self._config = parse_config({"model": welcome["model"], "data": context}).model
        self._stages = int(welcome["stages"])
        self._slots = Slots(**welcome["slots"])
        self._held = LocalStages(self._config, self._stages, self._slots)
        self._source = source
        # By stage and leaf, the received parts of arrays.
        self._parts: dict[int, dict[int, list[np.ndarray]]] = defaultdict(dict)
        self._addresses: dict[int, str] = {}
        self._wires: dict[int, Wire] = {}
        self._tasks = Tasks()
        # By group, the epoch of the newest route; steps of earlier epochs are dropped.
        self._epochs: dict[int, int] = defaultdict(int)
        self._work = queue.SimpleQueue[tuple[dict[str, Any], np.ndarray, np.ndarray] | None]()
        # Start time of the running step.
        self._began_s: float | None = None
        self._failure: BaseException | None = None
        self._has_ended = False

    async def follow(self) -> bool:
        """Follow the front until the connection ends; return whether the service has ended.

        Raises:
            BaseException: the error with which a stage has failed on this host.
        """
        self._loop = asyncio.get_running_loop()
        computing = threading.Thread(target=self._compute, name="skippipe-stages", daemon=True)
        computing.start()
        reporting = asyncio.create_task(self._report_speeds())
        watching = asyncio.create_task(self._watch_computing())
        try:
            await self._front.follow(self.take)
        finally:
            reporting.cancel()
            watching.cancel()
            self._tasks.cancel()
            for wire in self._wires.values():
                wire.close()
            self._work.put(None)
        if self._failure is not None:
            raise self._failure
        return self._has_ended

    def take(self, message: list[Any], arrays: list[np.ndarray]) -> None:
        """Handle a message of the front, or a step of another host."""
        match message, arrays:
            case ["step", dict(header)], [x, positions]:
                group, epoch = header["group"], header["epoch"]
                if epoch >= self._epochs[group]:
                    self._epochs[group] = epoch
                    self._work.put((header, x, positions))
            case ["scales"], [scales]:  # Sent before the first stage.
                self._held.scales = scales
            case ["hold", int(stage)], []:
                self._tasks.start(self._hold(stage))
            case ["drop", int(stage)], []:
                self._held.drop(stage)
            case ["part", int(stage), int(leaf)], [part]:
                self._parts[stage].setdefault(leaf, []).append(part)
            case ["hosts", dict(addresses)], []:
                self._addresses = {int(host): address for host, address in addresses.items()}
                for host in self._addresses.keys() - self._wires.keys():
                    self._tasks.start(self._connect(host))
            case ["end"], []:
                self._has_ended = True
                self._front.close()

    async def _hold(self, stage: int) -> None:
        """Load a stage in a separate thread, while other stages run."""
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
        """Connect to another host and watch the connection; return None if that fails."""
        try:
            link = await open_link(parse_address("address", self._addresses[host]), keys=self._keys)
        # The host may also have left, or have joined before this host got its address.
        except (KeyError, OSError, TimeoutError, InputError):
            self._front.send("unreachable", host)
            return None
        if (known := self._wires.get(host)) is not None:  # Connected in the meantime.
            link.writer.close()
            return known
        link.send(PEER_HOST, self.service)
        wire = self._wires[host] = Wire(link, self.silent_s, self._probing)
        self._tasks.start(self._watch(host, wire))
        return wire

    async def _watch(self, host: int, wire: Wire) -> None:
        await wire.follow(lambda *_: None)  # Only heartbeats arrive in this direction.
        if self._wires.get(host) is wire:
            del self._wires[host]
            self._front.send("unreachable", host)

    async def _report_speeds(self) -> None:
        while True:
            await asyncio.sleep(min(self.silent_s / BEATS, SPEEDS_S))
            wires = {FRONT: self._front, **self._wires}
            self._front.send("speeds", {host: wire.speed for host, wire in wires.items()})

    async def _watch_computing(self) -> None:
        """Leave when a step does not end; heartbeats would continue regardless."""
        most_s = MOST_SILENCES * self.silent_s
        while True:
            await asyncio.sleep(self.silent_s / BEATS)
            began_s = self._began_s
            if began_s is not None and time.monotonic() - began_s > most_s:
                problem = f"a step took over {most_s:g} s: the device hangs or is too slow"
                remedy = "Restart the host, or raise cluster.heartbeat_timeout_s on the first host"
                self._fail(TemporaryError("host", socket.gethostname(), problem, remedy))
                return

    async def _forward(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Send the output of a step to the next host, or to the front."""
        route = header["route"]
        if not route:
            travelled = arrays[0] if header["is_read"] else arrays[0][:0]
            self._front.send("done", header, arrays=[travelled])
            return
        host = route[0][0]
        wire = self._wires.get(host) or await self._connect(host)
        if wire is not None:
            wire.send("step", header, arrays=arrays)

    # In the compute thread.

    def _compute(self) -> None:
        try:
            while (item := self._work.get()) is not None:
                header, x, positions = item
                if header["epoch"] < self._epochs[header["group"]]:
                    continue
                (_, stages), *rest = header["route"]
                began_s = self._began_s = time.monotonic()
                step = Step(np.zeros_like(positions), positions, header["slot"])
                x = self._held.run(header["group"], tuple(stages), x, step, header["skipped"])
                seconds = [*header["seconds"], time.monotonic() - began_s]
                self._began_s = None
                forwarded = {**header, "route": rest, "seconds": seconds}
                self._call(self._send, forwarded, [x, positions])
        except BaseException as error:
            self._call(self._fail, error)

    def _call(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop, unless the loop has ended with this session."""
        with suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(callback, *arguments)

    # Methods of the event loop.

    def _send(self, header: dict[str, Any], arrays: list[np.ndarray]) -> None:
        self._tasks.start(self._forward(header, arrays))
