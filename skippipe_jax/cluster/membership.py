"""How this process joins the other hosts of a run, and how it learns that one of them is lost.

The hosts are connected through a hub on host 0 (see `skippipe_jax.cluster.hub`), which judges who
is lost. A verdict makes every other host print one message and end with `LOST_HOST_EXIT_CODE`, or
like the culprit where its input was wrong or a user interrupted it. When the hub itself goes, each
host reaches that verdict alone.

All of this runs on an event loop in a thread of its own, since the main thread may be blocked for
ever in a collective whose peer is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import NoReturn

from skippipe_sched.errors import INPUT_ERROR_EXIT_CODE, InputError, as_input_error

from skippipe_jax.cluster import jax_runtime
from skippipe_jax.cluster.addresses import (
    BIND_VARIABLE,
    chosen_address,
    first_address,
    join_address,
    reachable_address,
    require_free,
)
from skippipe_jax.cluster.agreement import DeadlinePassed, barrier
from skippipe_jax.cluster.ending import (
    LINGER_S,
    LOST_HOST_EXIT_CODE,
    Verdict,
    exit_at_once,
    exit_code_of,
    exit_code_of_others,
)
from skippipe_jax.cluster.hub import (
    BEATS,
    HELLO_S,
    MESSAGE_CHARACTERS,
    Hub,
    Link,
    admission,
    each_in_a_task,
    reach,
    relay_jax,
    say,
    silence,
)
from skippipe_jax.cluster.place import Place, chosen_runtime, find_place, require_same_runtime
from skippipe_jax.config import ClusterConfig
from skippipe_jax.config.cluster import DISTRIBUTED, LAST_PORT

_CLOCK_EXCHANGES = 8
_CLOCK_S = 0.5
"""How often a host asks for host 0's clock, and how long it goes on asking."""


@contextlib.contextmanager
def joined(
    config: ClusterConfig,
    coordinator: str | None = None,
    hosts: int | None = None,
    host_id: int | None = None,
    distributed: bool = False,
) -> Iterator[Membership]:
    """Be one of the run's hosts for the length of a block, begun before JAX's backend starts.

    Hosts come from ``coordinator``, ``hosts`` and ``host_id`` where given; else from SLURM (a step
    of several tasks) or a TPU pod (several workers) as JAX detects them, or, with ``distributed``,
    from any cluster that JAX detects. Otherwise the membership has one host. Among several hosts,
    and as ``cluster.runtime`` says, each has its own JAX, or `jax.distributed` connects them.

    A block that ends well leaves. One that raises ends the whole process, unless the host is alone:
    if the error came from a lost host then with `LOST_HOST_EXIT_CODE` and the message about that
    host; else the error is printed, the others learn it, and the exit code is that of an
    `InputError`, 130 for an interrupt and 1 for anything else. `DeadlinePassed` ends the process of
    a host that is alone as well: its message is printed and the code is `LOST_HOST_EXIT_CODE`.

    Args:
        config: the timeouts.
        coordinator: ``HOST:PORT`` on host 0 that all hosts can reach.
        hosts: number of processes in the run.
        host_id: this process's index among them.
        distributed: ask JAX to detect the cluster, even if nothing here hints at one.

    Raises:
        InputError: for arguments that contradict each other.
        TemporaryError: for an address that does not answer, a port that is taken, and hosts that do
            not appear within ``connect_timeout_s``.
    """
    place = find_place(config, coordinator, hosts, host_id, distributed)
    membership = _join(config, place, chosen_runtime(config, distributed))
    try:
        yield membership
        membership.leave()
    except BaseException as error:
        _abandon(membership, error)
        raise


def _join(config: ClusterConfig, place: Place | None, runtime: str) -> Membership:
    if place is None or place.count == 1:
        return Membership(config, 0, 1)
    membership = Membership(config, place.index, place.count, runtime == DISTRIBUTED)
    with jax_runtime.sockets() if membership.is_distributed else nullcontext() as sockets:
        membership._enter(place, sockets)
        try:
            require_same_runtime(membership, config, runtime)
        except BaseException as error:
            _abandon(membership, error)
            raise
        if sockets is not None:
            jax_runtime.start(config, place.index, place.count, sockets, membership.address)
    return membership


def _abandon(membership: Membership, error: BaseException) -> None:
    """End this process because of an error of its own, or of the host that caused it.

    It returns on a host that is alone, unless a deadline has passed.
    """
    if isinstance(error, DeadlinePassed):
        membership.stop(str(error))
    if membership.count == 1:
        return
    membership.explain(error)
    told = as_input_error(error)
    if told is not None:
        say(f"error: {told}")
    elif isinstance(error, KeyboardInterrupt):
        say("interrupted at once")
    else:
        traceback.print_exception(error)
    code, ending = exit_code_of(error), told or error
    reason = f"{type(ending).__name__}: {ending}".removesuffix(": ")
    membership.fail(reason, exit_code_of_others(code))
    # Not by raising: at exit JAX waits for collectives and hosts that will never come.
    exit_at_once(code)


class Membership:
    """This host's part in a run: who it is, what hosts tell each other, and its end.

    All methods may be called from any thread.

    Attributes:
        index: this host among the others, from 0.
        count: the number of hosts.
        is_distributed: whether one JAX has the devices of all hosts.
        address: the IP address by which the others reach this host, and on which it listens.
        last_words: called when another host is lost, for a sentence that the final message ends
            with, such as the checkpoint to resume from. Set it to your own; it has two seconds.
    """

    def __init__(self, config: ClusterConfig, index: int, count: int, is_distributed: bool = False):
        """Start alone; `joined` connects a host that has others."""
        self.index = index
        self.count = count
        self.is_distributed = is_distributed
        self.address = "127.0.0.1"
        self.last_words: Callable[[], str] = str
        self._config = config
        self._name = f"host {index} (process {os.getpid()} on {socket.gethostname()})"
        self._board: dict[str, str] = {}
        self._news = threading.Condition()
        # The rest belongs to the event loop's thread, and exists only among several hosts.
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self._link: Link
        self._hub_name: str
        self._hub: Hub | None = None
        self._leaving = False
        self._clock_samples: asyncio.Queue[tuple[float, float]] = asyncio.Queue()
        self._failing = threading.Event()
        self._failure_is_known = threading.Event()

    def put(self, key: str, value: str) -> None:
        """Tell every host a value, replacing an earlier one; returns before they know it.

        Raises:
            ValueError: if key and value together exceed 2**17 characters.
        """
        if len(key) + len(value) > MESSAGE_CHARACTERS:
            raise ValueError(f"put({key!r}): {len(value)} characters are no small message")
        if self.count == 1:
            self._post(key, value)
        else:
            self._loop.call_soon_threadsafe(self._link.send, "put", key, value)

    def get(self, key: str, timeout_s: float, source: int | None = None) -> str:
        """Return the latest value of a key, waiting for it if nobody has put it yet.

        Args:
            key: what to read.
            timeout_s: how many seconds to wait at most.
            source: the host that should put it, where there is one, for the error message.

        Raises:
            DeadlinePassed: says what was waited for, from whom, and since when.
        """
        since = time.strftime("%H:%M:%S")
        with self._news:
            if not self._news.wait_for(lambda: key in self._board, timeout_s):
                sender = "any host" if source is None else f"host {source}"
                raise DeadlinePassed(
                    f"this host has waited for {key!r} from {sender} since {since}, "
                    f"{timeout_s:g} s, in vain"
                )
            return self._board[key]

    def transfer_addresses(self) -> tuple[str, str]:
        """Where this host's transfer servers take requests and send arrays: ``IP:PORT`` each.

        Port 0 stands for any free one, unless ``cluster.transfer_port`` fixes them. Then these are
        the ports of the server for host 0, and that for host h has those 2h above.

        Raises:
            InputError: if there are no such ports for all hosts, or one of this host's is taken.
        """
        first, field = self._config.transfer_port, "cluster.transfer_port"
        if first is None:
            return join_address(self.address, 0), join_address(self.address, 0)
        needed = 2 * self.count**2
        if first + needed - 1 > LAST_PORT:
            remedy = f"write at most {LAST_PORT + 1 - needed}"
            problem = f"too high for {needed} ports, 2 for each pair of {self.count} hosts"
            raise InputError(field, first, problem, remedy)
        own = first + 2 * self.count * self.index
        for port in range(own, own + 2 * self.count):
            require_free(field, self.address, port)
        return join_address(self.address, own), join_address(self.address, own + 1)

    def clock_offset_s(self) -> float:
        """What to add to this host's `time.time()` to get host 0's.

        It is off by half of the shortest round trip between the two hosts at most. Takes about
        half a second at most, or one round trip where that is longer.
        """
        if self.index == 0:
            return 0.0
        return asyncio.run_coroutine_threadsafe(self._compare_clocks(), self._loop).result()

    def leave(self) -> None:
        """Part from the others at the end of a run, once all of them have come to it.

        Raises:
            DeadlinePassed: if a host does not come to its end within ``connect_timeout_s``.
        """
        if self.count == 1:
            return
        barrier(self, "leave", self._config.connect_timeout_s)
        if self.is_distributed:
            # Waits for all hosts once more, so that JAX's service on host 0 outlives its clients. A
            # host that is lost meanwhile ends this process by its verdict.
            jax_runtime.stop()
        asyncio.run_coroutine_threadsafe(self._depart(), self._loop).result()
        self._thread.join()

    def fail(self, reason: str, code: int = LOST_HOST_EXIT_CODE) -> None:
        """Tell the others that this host ends by its own fault; they name it and end by `code`.

        Returns when they know, or after four seconds. The caller must then end the process by
        `os._exit`, as `joined` does: an ordinary exit waits for hosts that have gone.
        """
        if self.count == 1:
            return
        self._failing.set()
        self._loop.call_soon_threadsafe(self._link.send, "fail", reason[:MESSAGE_CHARACTERS], code)
        self._failure_is_known.wait(2 * LINGER_S)

    def stop(self, reason: str) -> NoReturn:
        """End this process by `LOST_HOST_EXIT_CODE` and one message that gives this host's reason.

        The others stop too and name it. If they stop because of another host, so does this one.
        """
        self.fail(reason)
        ending = self._end(Verdict(f"{self._name}: {reason}"))
        if self.count == 1:
            asyncio.run(ending)
        else:
            asyncio.run_coroutine_threadsafe(ending, self._loop).result()
        exit_at_once(LOST_HOST_EXIT_CODE)

    def explain(self, error: BaseException) -> None:
        """Find out whether an error of this host comes from the loss of another.

        If so, it does not return: the process ends with the message about the lost host. That can
        take the whole heartbeat timeout. It returns if no host was lost, and at once for an error
        that no other host can cause; raise the error then.
        """
        if self.count == 1 or not jax_runtime.may_stem_from_a_peer(error):
            return
        # A death shows at once; only a host that hangs takes the whole timeout.
        time.sleep(LINGER_S)
        summary = f"{type(error).__name__}: {error}".splitlines()[0]
        say(f"{self._name} is finding out whether a lost host is behind this error: {summary}")
        time.sleep(self._config.heartbeat_timeout_s * (1 + 2 / BEATS))

    def _post(self, key: str, value: str) -> None:
        with self._news:
            self._board[key] = value
            self._news.notify_all()

    def _enter(self, place: Place, sockets: str | None) -> None:
        """Meet the other hosts and watch them from now on; returns when all are there."""
        entered: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._attend(place, sockets, entered)),
            name="skippipe-cluster",
            daemon=True,
        )
        self._thread.start()
        entered.result()

    async def _attend(self, place: Place, sockets: str | None, entered: Future[None]) -> None:
        """The life of the event loop: meet the others, then watch them until the end."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._meet(place, sockets)
        except Exception as error:
            entered.set_exception(error)
            return
        entered.set_result(None)
        try:
            watches = {asyncio.create_task(self._listen()), asyncio.create_task(self._beat())}
            finished, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            for watch in finished:
                verdict = watch.result()
                if verdict is not None:
                    await self._end(verdict)
        except Exception:
            # A host that watches no longer would hang at the next loss.
            traceback.print_exc()
            exit_at_once(1)

    async def _meet(self, place: Place, sockets: str | None) -> None:
        name, port = place.coordinator
        chosen = chosen_address(self._config.bind_address)
        if place.index == 0:
            self._hub = Hub(
                place.count,
                sockets and f"{sockets}/service",
                heartbeat_timeout_s=self._config.heartbeat_timeout_s,
                connect_timeout_s=self._config.connect_timeout_s,
            )
            near = chosen or first_address(name)
            self.address = chosen or reachable_address(near, name)
            if self.address != near:
                say(
                    f"{name} is {near} here, so this host listens on {self.address} as well. "
                    f"{BIND_VARIABLE} chooses another address."
                )
            # Other hosts on this machine may look for host 0 where its name leads them.
            addresses = list(dict.fromkeys([self.address, near]))
            self._link = await self._hub.open(addresses, port)
        else:
            self._link = Link(*await reach(place.coordinator, self._config.connect_timeout_s))
            near = self._link.writer.get_extra_info("sockname")[0]
            self.address = chosen or reachable_address(near, name)
            if sockets is not None:
                relay = partial(relay_jax, place.coordinator)
                await asyncio.start_unix_server(each_in_a_task(relay), f"{sockets}/relay")
        self._link.send("join", place.index, place.count, self._name)
        # The hub keeps the deadline; this one is for a hub that hangs.
        patience = self._config.connect_timeout_s + HELLO_S
        self._hub_name = await admission(self._link, place.coordinator, patience)

    async def _listen(self) -> Verdict | None:
        """Take in what the hub sends; return a verdict that ends this host, or None at its end."""
        while (message := await self._link.receive()) is not None:
            match message:
                case ["put", str(key), str(value)]:
                    self._post(key, value)
                case ["clock", float(sent), float(theirs)]:
                    # Cristian's algorithm: host 0 looked at its clock half a round trip ago.
                    round_trip = time.monotonic() - sent
                    offset = theirs + round_trip / 2 - time.time()
                    self._clock_samples.put_nowait((round_trip, offset))
                case ["verdict", int(culprit), str(text), int(code)]:
                    if culprit != self.index:
                        return Verdict(text, code)
                    if not self._failing.is_set():
                        return Verdict(f"{text}; that is this host, it was stopped or cut off")
                    if self._hub is not None:
                        await self._hub.disperse(LINGER_S)
                    self._failure_is_known.set()
        if self._leaving:
            return None
        return Verdict(f"{self._hub_name} is lost: {self._link.ending}")

    async def _beat(self) -> Verdict:
        """Show the others that this host lives; return when the hub has been silent too long."""
        # Silence is counted in beats of this host: one that was itself stopped for a while wakes up
        # with a single beat counted, and reads what the others sent before it blames them.
        while True:
            await asyncio.sleep(self._config.heartbeat_timeout_s / BEATS)
            self._link.send("beat")
            if self._link.is_silent():
                silent = silence(self._config.heartbeat_timeout_s)
                self._link.send("hub lost", silent)  # should it only have been stopped
                return Verdict(f"{self._hub_name} is lost: {silent}")
            if self._hub is not None:
                self._hub.beat()

    async def _compare_clocks(self) -> float:
        """Host 0's clock less this host's, from the exchange with the shortest round trip."""
        samples: list[tuple[float, float]] = []
        began = time.monotonic()
        while True:
            self._link.send("clock", time.monotonic())
            samples.append(await self._clock_samples.get())
            shortest, offset = min(samples)
            next_end = time.monotonic() - began + shortest
            if len(samples) == _CLOCK_EXCHANGES or next_end > _CLOCK_S:
                return offset

    async def _end(self, verdict: Verdict) -> NoReturn:
        """Say why, and end the process whatever its main thread is doing."""
        try:
            words = await asyncio.wait_for(asyncio.to_thread(self.last_words), LINGER_S)
        except Exception as error:  # the reason matters more than a fault in the last words
            words = f"What to resume from could not be told: {error!r}"
        reason, code = verdict
        if code == INPUT_ERROR_EXIT_CODE:
            words = ""  # Started again, all would end in the same way.
        ending = f"{self._name} stops, exit code {code}."
        try:
            say("\n".join([f"{reason.removesuffix('.')}.", f"{ending} {words}".strip()]))
            if self._hub is not None:
                await self._hub.disperse(LINGER_S)
        finally:
            exit_at_once(code)

    async def _depart(self) -> None:
        self._leaving = True
        self._link.send("leave")
        if self._hub is not None:
            await self._hub.disperse(self._config.heartbeat_timeout_s)
        self._link.writer.close()
