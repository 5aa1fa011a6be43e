"""Membership of this process in a run and in its generations, and the detection of lost hosts.

The hosts form a full mesh (see `skippipe_jax.connections.mesh`). Unless the run is elastic, all
hosts end when one is lost: each prints one message and exits with `LOST_HOST_EXIT_CODE`, or as
`exit_decision` says if that host has reported its error. The first host to detect the loss
broadcasts it, so that all name the same host.

The connections belong to an event loop in a thread of its own, which watches the other hosts and
ends the process when one is lost: the main thread may be blocked indefinitely in a collective whose
peer is gone.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from skippipe_jax import log
from skippipe_jax.cluster.agreement import barrier
from skippipe_jax.cluster.ending import (
    CODES_OF_PEERS,
    LINGER_S,
    LOST_HOST_EXIT_CODE,
    REASON_CHARACTERS,
    ExitReason,
    exit_at_once,
    exit_on_error,
    log_and_exit,
    may_be_caused_by_peer,
)
from skippipe_jax.cluster.inbox import NOBODY, Counted, Inbox
from skippipe_jax.cluster.position import HostPosition
from skippipe_jax.cluster.status import status_of
from skippipe_jax.config import ClusterConfig
from skippipe_jax.connections import jax_runtime
from skippipe_jax.connections.addresses import join_address, require_free
from skippipe_jax.connections.hello import NUMBER_BITS, Hello
from skippipe_jax.connections.join_server import RUN_ENDED, JoinServer
from skippipe_jax.connections.links import BEATS, MESSAGE_CHARACTERS
from skippipe_jax.connections.mesh import Mesh
from skippipe_jax.connections.status import RunStatus, TrainingStatus
from skippipe_jax.connections.threads import DaemonThreads, result
from skippipe_jax.consensus.control import Control, Store
from skippipe_jax.consensus.decisions import first_state
from skippipe_jax.consensus.generations import (
    ConsensusRules,
    ConsensusState,
    Copies,
    Decision,
    Enter,
    Generation,
    Held,
    Placement,
    RolledBack,
    Saved,
)
from skippipe_jax.errors import GenerationEnded, PeerTimeout

T = TypeVar("T")

ANSWERS_S = 10.0
"""Seconds that the event loop may take for a call from another thread, beyond its own waiting."""

CLOCK_EXCHANGES, CLOCK_S = 8, 0.5
"""Maximum number of exchanges that compare two clocks, and maximum time for them in seconds."""

NO_GENERATION = Generation(0, (), (), 0, 0)
"""Generation of a group with fixed hosts: no host lacks a state, and no stage is lost."""

GENERATION_TIMEOUT_S = 3600.0
"""Seconds that the hosts of a generation wait for each other: long, since a wait may be for a state
over a slow link or an upload. The loss of a host ends the generation, and with it every wait."""


class Group:
    """Hosts that train together: those of a generation, or all initial hosts of a run.

    Hosts are numbered from 0, and host 0 leads, so that the operations of `agreement` work in a
    generation as in a run. A group with fixed hosts (`Membership`) is like a generation in which
    nothing changes and which does not end.

    Attributes:
        index: position of this host.
        count: number of hosts.
        hosts: host ids in the run, by position.
        generation: generation of these hosts; `NO_GENERATION` for fixed hosts.
        timeout_s: seconds that hosts wait for each other in the operations of `agreement`.
        is_distributed: whether one JAX runtime has the devices of all hosts.
    """

    is_distributed = False

    def __init__(
        self,
        membership: Membership,
        index: int,
        hosts: Sequence[int],
        generation: Generation = NO_GENERATION,
        timeout_s: float = GENERATION_TIMEOUT_S,
    ):
        """Create a group with this host at position `index`; see `Membership.group_of`."""
        self._membership, self.index, self.hosts = membership, index, hosts
        self.generation, self.timeout_s = generation, timeout_s
        self.count = len(hosts)

    @property
    def is_elastic(self) -> bool:
        """True if the group ends when a host is lost, and the other hosts continue."""
        return self.generation.number > 0

    @property
    def fresh(self) -> frozenset[int]:
        """Hosts without a state, which they receive from others."""
        return frozenset(map(self.hosts.index, self.generation.fresh))

    @property
    def diskless(self) -> frozenset[int]:
        """Diskless hosts, which do not reach the folder of the run."""
        return frozenset(map(self.hosts.index, self.generation.diskless))

    @property
    def holders(self) -> list[list[int]]:
        """Hosts that hold the state of each stage; empty if all hold what they serve."""
        return [list(map(self.hosts.index, own)) for own in self.generation.holders]

    def here(self) -> dict[str, Any]:
        """Describe this host to the others: host id, process id, address."""
        own = self._membership
        return {"host": own.index, "pid": os.getpid(), "address": own.control_address}

    def put(self, key: str, value: str) -> None:
        """Send a value to every host, replacing an earlier one; do not wait for its arrival.

        Raises:
            ValueError: if key and value together exceed `MESSAGE_CHARACTERS`.
        """
        self._membership.post(self.generation.number, key, value)

    def get(self, key: str, timeout_s: float, source: int) -> str:
        """Wait for the value of a key from a host, remove it and return it.

        Raises:
            PeerTimeout: names the key, the host, and the start of the wait.
            GenerationEnded: if the generation ends first.
        """
        number = self.generation.number
        return self._membership.inbox.take(key, timeout_s, self.hosts[source], number)

    @property
    def address(self) -> str:
        """IP address at which the others reach this host, and on which it listens."""
        mesh = self._membership.mesh
        return "127.0.0.1" if mesh is None else mesh.address

    def transfer_addresses(self) -> dict[int, str]:
        """Return the addresses of this host's transfer servers by other host, ``IP:PORT``.

        The address for a host is the same in every generation. Port 0 stands for any free one,
        unless ``cluster.transfer_port`` fixes them.

        Raises:
            InputError: if there are not enough ports for all hosts.
            TemporaryError: if a port of this host is taken.
        """
        own = self._membership
        ports = {
            rank: own.config.port(own.index, host, own.count)
            for rank, host in enumerate(self.hosts)
            if rank != self.index
        }
        for port in ports.values():
            require_free("cluster.transfer_port", self.address, port)
        return {rank: join_address(self.address, port) for rank, port in ports.items()}

    def clock_offset_s(self) -> float:
        """Measure the seconds to add to this host's `time.time()` to get that of host 0.

        The error is at most half of the shortest round trip between the two hosts. It takes at most
        about half a second, or one round trip if that is longer.

        Raises:
            PeerTimeout: if host 0 does not answer within ``connect_timeout_s``.
            GenerationEnded: if the generation ends first.
        """
        if self.index == 0:
            return 0.0
        own, leader, number = self._membership, self.hosts[0], self.generation.number
        timeout_s, began_s = own.config.connect_timeout_s, time.monotonic()
        samples: list[tuple[float, float]] = []
        while True:
            own.send(leader, "clock", time.monotonic())
            answer = own.inbox.take(f"clock/{leader}", timeout_s, leader, number)
            samples.append(tuple(json.loads(answer)))
            # The fastest exchange is the most exact.
            shortest_s, offset_s = min(samples)
            is_late = time.monotonic() - began_s + shortest_s > CLOCK_S
            if len(samples) == CLOCK_EXCHANGES or is_late:
                return offset_s

    @property
    def has_ended(self) -> bool:
        """True if the hosts have continued as another generation."""
        return self._membership.generation_number != self.generation.number

    def require_current(self) -> None:
        """Raise `GenerationEnded` if the generation has ended."""
        if self.has_ended:
            raise GenerationEnded

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call `then` when the group ends, from another thread."""
        self._membership.inbox.when_ended(self.generation.number, then)

    def contribute(
        self, step: int, totals: Sequence[float], counted: Counted, copies: Copies = ()
    ) -> None:
        """Report totals and buddy checkpoints of a step, whose averaged gradients this host holds.

        `counted` is called, maybe in another thread, with the totals of all hosts upon the commit.
        Fixed hosts sum their totals by transfers, so only a single one commits its steps here.
        """
        if not self.is_elastic:
            assert self.count == 1, "is alone"
            return counted(tuple(totals))
        number = self.generation.number
        self._membership.inbox.expect(number, counted)
        self._membership.control.tell(Held(number, step, tuple(totals), copies))

    def saved(self, step: int) -> None:
        """Report that the checkpoint of a step is complete; fixed hosts search for it later."""
        if self.is_elastic:
            self._membership.control.tell(Saved(step))

    def gone_back(self, step: int) -> Group:
        """Report the rollback of all members to an earlier step; return the group after it."""
        self._membership.control.tell(RolledBack(self.generation.number, step))
        return self._membership.group_of(replace(self.generation, step=step))


class Membership(Group):
    """Membership of this host in a run: its identity, its messages, and its exit.

    All public methods may be called from any thread.

    Attributes:
        name: name of this host in messages.
        process: random number of this process; that of host 0 identifies the start of the run.
        is_training: set it to True when all hosts are ready to train; see `exit_decision`.
        count: number of hosts at the start of the run.
        config: the timeouts and ports.
        mesh: connections to the other hosts; None for a single host.
        is_outside: True if the run continues without this host, which it has lost.
        resume_hint: function that returns the end of the final message when another host is lost,
            such as the checkpoint to resume from. Set it to your own; it has two seconds.
        join_server: server for joining hosts and observers.
        inbox: values from other hosts, and the generations of an elastic run.
    """

    def __init__(self, config: ClusterConfig, index: int, count: int, is_distributed: bool = False):
        """Start unconnected; `connect` connects the host to the others."""
        super().__init__(self, index, range(count), timeout_s=config.connect_timeout_s)
        self.config, self.is_distributed = config, is_distributed
        self.name = f"host {index} (pid {os.getpid()} on {socket.gethostname()})"
        self.process = secrets.randbits(NUMBER_BITS)
        self.is_training = False
        self.is_outside = False
        self.resume_hint: Callable[[], str] = str
        self.join_server = JoinServer(self._status)
        self.inbox = Inbox()
        self.mesh: Mesh | None = None
        self._training: TrainingStatus | None = None
        # The rest exists only with several hosts, and belongs to the event loop's thread.
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self._control: Control | None = None
        self._verdict: asyncio.Future[ExitReason]
        self._is_failing = self._was_stopped = False
        self._last_beat_s = math.inf

    @property
    def control_address(self) -> str:
        """Address at which this host listens for the others."""
        return self._mesh.directory.hello.address

    @property
    def control(self) -> Control:
        """This host's part in the consensus of an elastic run."""
        assert self._control is not None, "outlives its hosts"
        return self._control

    @property
    def generation_number(self) -> int:
        """Number of this host's generation; 0 before the first."""
        return self.inbox.generation

    @property
    def missed(self) -> frozenset[int]:
        """Hosts that are gone or silent, or whose processes are waiting to join."""
        waiting = () if self._control is None else self._control.state.waiting
        return self._mesh.missed.union(waiting)

    def misses(self, hosts: Collection[int]) -> bool:
        """Return whether one of these hosts is gone or silent, or its new process waits to join."""
        return not self.missed.isdisjoint(hosts)

    @property
    def _leader(self) -> int:
        last = self.inbox.entered
        return 0 if last is None else last.leader

    @property
    def leads(self) -> bool:
        """True if this host leads the run: host 0, or the leader of the newest generation."""
        return self.index == self._leader

    @property
    def leader_named(self) -> str:
        """Name of the leader with its address, if known."""
        address = self._mesh.directory.addresses.get(self._leader)
        return f"host {self._leader}" + (f" ({address})" if address else "")

    def show(self, training: TrainingStatus) -> None:
        """Set the training status for observers of the run."""
        if self._training is not None:  # Keep the locations of lost hosts.
            known = {**self._training.locations, **training.locations}
            training = replace(training, locations=known)
        self._training = training

    # Messages, groups and generations.

    def post(self, generation: int, key: str, value: str) -> None:
        """Send a value to all hosts of the run, this one among them: `Group.put` of a generation.

        Raises:
            ValueError: if key and value together exceed `MESSAGE_CHARACTERS`.
        """
        if len(key) + len(value) > MESSAGE_CHARACTERS:
            raise ValueError(f"put({key!r}): {len(value)} characters exceed {MESSAGE_CHARACTERS}")
        self.inbox.post(self.index, generation, key, value)
        if self.count > 1:
            self._loop.call_soon_threadsafe(self._mesh.broadcast, "put", generation, key, value)

    def send(self, host: int, *message: Any) -> None:
        """Send a message to a host; do not wait for its arrival."""
        self._loop.call_soon_threadsafe(self._mesh.send, host, *message)

    def group_of(self, generation: Generation) -> Group:
        """Return the group of a generation's members, this host among them."""
        leader = generation.leader
        hosts = (leader, *(host for host in generation.members if host != leader))
        return Group(self, hosts.index(self.index), hosts, generation)

    def outlive(
        self,
        rules: ConsensusRules,
        store: Store,
        placement: Placement,
        step: int,
        processes: Sequence[int],
    ) -> Group:
        """Make the run elastic: begin the first generation after `step`; all hosts call this.

        All hosts are its members, with these `processes`, exchanged before. The step has a
        checkpoint unless it is 0. `store` is as in `Control`.
        """
        processes = tuple(processes)
        hosts = tuple(range(self.count))
        start = processes[0]
        first = Generation(1, hosts, processes, 0, step, placement=placement, start=start)
        self.inbox.follow(Enter(first))
        state = first_state(self.index, rules, first, step)
        self._done(self._begin_control(state, self.inbox.follow, store))
        return self.group_of(first)

    def request_admission(self, rules: ConsensusRules, store: Store) -> None:
        """Ask the hosts of a running job to admit this host; `next_group` waits for that."""
        self.is_training = True
        state = ConsensusState(self.index, self.process, rules)
        self._done(self._begin_control(state, self.inbox.follow, store))

    def next_group(self, after: int, timeout_s: float) -> Group | None:
        """Wait for this host's next group after the generation number `after`; 0 is for the first.

        Return None if there is none within `timeout_s`.
        """
        generation = self.inbox.next(after, timeout_s)
        return None if generation is None else self.group_of(generation)

    # The end.

    def leave(self) -> None:
        """Disconnect: at the end of a run, once all hosts have reached it, or if they continue.

        Raises:
            PeerTimeout: if a host does not reach the end within ``connect_timeout_s``.
        """
        if self.count == 1:
            return
        has_left = self.generation_number == NOBODY
        if not has_left:
            self._wait_for_all_to_leave()
        if self.is_distributed:
            # Waits for all hosts once more, so that JAX's service on host 0 outlives its clients.
            # If a host is lost meanwhile, the verdict about it ends this process.
            jax_runtime.stop()
        self.part(LINGER_S if has_left else self.config.heartbeat_timeout_s)

    def _wait_for_all_to_leave(self) -> None:
        """Wait until all remaining hosts have reached the end of the run."""
        if self.inbox.entered is None:
            barrier(self, "leave", self.config.connect_timeout_s)
            return
        while True:
            group = self.group_of(self.inbox.entered)
            try:
                return barrier(group, "leave", self.config.connect_timeout_s)
            except GenerationEnded:
                if self.generation_number == NOBODY:
                    return  # The others have reached the end without this host.
                self.next_group(group.generation.number, self.config.connect_timeout_s)

    def part(self, patience_s: float) -> None:
        """Send a farewell; end the thread when the others have left too, or after `patience_s`."""
        self._done(self._mesh.part(patience_s), patience_s)
        self._loop.call_soon_threadsafe(self._verdict.cancel)
        self._thread.join(ANSWERS_S)

    def fail(self, what: str, code: int = LOST_HOST_EXIT_CODE) -> None:
        """Report the failure of this host to the others, which name it and exit with `code`.

        `what` follows the host's name, for example "failed: the disk is full". It returns when the
        report is sent, or after two seconds. The caller must then end the process by `os._exit`, as
        `connect` does: a normal exit waits for hosts that are gone.
        """
        if self.count > 1:
            with suppress(PeerTimeout):
                self._done(self._report_failure(what[:REASON_CHARACTERS], code))

    def stop(self, reason: str) -> NoReturn:
        """End this process with `LOST_HOST_EXIT_CODE` and one message with this host's reason.

        The others stop too and name this host. If they stop because of another host, so does it.
        """
        self.fail(f"failed: {reason}")
        ending = self._end(ExitReason(f"{self.name}: {reason}"))
        if self.count == 1:
            asyncio.run(ending)
        with suppress(PeerTimeout):
            self._done(ending)
        exit_at_once(LOST_HOST_EXIT_CODE)

    def explain(self, error: BaseException) -> None:
        """Wait to see whether the loss of another host caused an error of this host.

        If so, it does not return: the process ends with the message about the lost host. That can
        take the whole heartbeat timeout. It returns if no host was lost, and at once for an error
        that no other host can cause; the caller must then raise the error.
        """
        if self.count == 1 or not may_be_caused_by_peer(error):
            return
        # A dead process is detected at once; only a host that hangs takes the whole timeout.
        time.sleep(LINGER_S)
        if self._control is not None:
            return  # A lost host does not end an elastic run, whose callers have waited before.
        summary = f"{type(error).__name__}: {error}".splitlines()[0]
        log.info(f"{self.name}: checking whether a failed host caused this error: {summary}")
        time.sleep(self.config.heartbeat_timeout_s * (1 + 2 / BEATS))

    # The event loop.

    def enter(
        self, position: HostPosition, sockets: str | None, last_addresses: Sequence[str] = ()
    ) -> None:
        """Connect to the other hosts and watch them from now on; return when all are connected.

        With `last_addresses`, connect to the hosts that still listen there, if any.
        """
        log.configure()
        entered: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._attend(position, sockets, last_addresses, entered)),
            name="skippipe-cluster",
            daemon=True,
        )
        self._thread.start()
        result(entered)

    def _done(self, coroutine: Coroutine[Any, Any, T], patience_s: float = 0.0) -> T:
        """Run a coroutine on the event loop and return its result.

        Raises:
            PeerTimeout: if there is no result within `patience_s` + `ANSWERS_S`, as the loop hangs
                or has ended.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(patience_s + ANSWERS_S)
        except FutureTimeout as late:
            if future.done():
                raise
            future.cancel()
            problem = f"has not answered for {patience_s + ANSWERS_S:g} s"
            raise PeerTimeout(f"the control thread of this host {problem}") from late

    async def _attend(
        self,
        position: HostPosition,
        sockets: str | None,
        last_addresses: Sequence[str],
        begun: Future[None],
    ) -> None:
        """Run the event loop: connect to the others, then watch them until the end."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._end_by_fault)
        self._verdict = self._loop.create_future()
        mesh = self.mesh = self._new_mesh(position, sockets)
        try:
            if last_addresses:
                name, _ = position.coordinator
                self.is_outside = await mesh.come_back(last_addresses, name)
                if not self.is_outside:
                    mesh.close()
                    return begun.set_result(None)
            else:
                await mesh.start(position.coordinator, sockets and f"{sockets}/relay")
        except Exception as error:
            mesh.close()
            return begun.set_exception(error)
        begun.set_result(None)
        try:
            watches = [self._verdict, asyncio.create_task(self._beat())]
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            if not self._verdict.cancelled():
                await self._end(self._verdict.result())
        except Exception as error:
            # Without the watch this host would hang when the next host is lost.
            exit_on_error(error, self.name, self.resume_hint)
        finally:
            mesh.close()  # New connections would go unanswered while the loop ends.

    @property
    def _mesh(self) -> Mesh:
        assert self.mesh is not None, "has others"
        return self.mesh

    def _new_mesh(self, position: HostPosition, sockets: str | None) -> Mesh:
        return Mesh(
            Hello(
                self.index,
                position.count,
                self.process,
                self.name,
                "",
                position.run,
                extra_hosts=position.extra_hosts,
            ),
            self.config,
            received=self._received,
            lost=self._report_lost,
            found=self._report_found,
            goes_on_without=self._goes_on_without,
            join_server=self.join_server,
            service=f"{sockets}/service" if sockets and position.index == 0 else None,
            keys=position.keys,
        )

    def _status(self) -> RunStatus:
        mesh, control = self._mesh, self._control
        state = None if control is None else control.state
        return status_of(mesh.directory, mesh.connected, mesh.left, state, self._training)

    def _received(self, source: int, message: list[Any]) -> bool:
        """Handle a message of another host; return whether it is valid."""
        match message:
            case ["put", int(number), str(key), str(value)] if (
                len(key) + len(value) <= MESSAGE_CHARACTERS
            ):
                self.inbox.post(source, number, key, value)
            case ["clock", float(sent)] if math.isfinite(sent):
                self._mesh.send(source, "clock", sent, time.time())
            case ["clock", float(sent), float(theirs)] if math.isfinite(sent + theirs):
                # Cristian's algorithm: the peer read its clock half a round trip ago.
                round_trip_s = time.monotonic() - sent
                sample = json.dumps([round_trip_s, theirs + round_trip_s / 2 - time.time()])
                self.inbox.post(source, self.generation_number, f"clock/{source}", sample)
            case ["verdict", int(culprit), str(text), int(code)] if code in CODES_OF_PEERS:
                return self._receive_verdict(source, culprit, text[:REASON_CHARACTERS], code)
            case ["control", list(given)]:
                return self._control is None or self._control.received(source, given)
            case _:
                return False
        return True

    def _receive_verdict(self, source: int, culprit: int, text: str, code: int) -> bool:
        is_lost, control = code == LOST_HOST_EXIT_CODE, self._control
        is_a_host = 0 <= culprit < self._mesh.directory.hello.places
        if control is not None and (is_lost or control.goes_on_without(source)):
            # The end of its process will be detected.
            log.info(f"{text.removesuffix('.')}; remaining hosts continue")
        elif is_a_host:
            self._judge(culprit, text, code)
        return is_a_host

    def _report_lost(self, host: int, how: str) -> None:
        if self._control is not None:
            self._control.is_missed(host)
        elif not self._mesh.directory.outlives:
            # A suspended host may find the others gone before it reads their verdict.
            culprit = self.index if self._was_stopped or self._was_suspended() else host
            self._judge(culprit, f"{self._mesh.directory.names[culprit]} failed: {how}")

    def _report_found(self, host: int) -> None:
        if self._control is not None:
            self._control.is_there(host)

    def _goes_on_without(self, host: int) -> bool:
        return self._control is not None and self._control.goes_on_without(host)

    def _judge(self, culprit: int, text: str, code: int = LOST_HOST_EXIT_CODE) -> None:
        """End because of a host with this verdict and broadcast it, unless one exists already."""
        if self._verdict.done() or self._is_failing:
            return
        self._mesh.broadcast("verdict", culprit, text, code)
        if culprit == self.index:
            why = "suspended or disconnected for over cluster.heartbeat_timeout_s"
            text = f"{text}; this host was declared failed: {why}"
        self._verdict.set_result(ExitReason(text, code))

    async def _beat(self) -> None:
        """Send heartbeats, and detect hosts that were silent for too long."""
        timeout_s = self.config.heartbeat_timeout_s
        while True:
            self._last_beat_s = self._loop.time()
            await asyncio.sleep(timeout_s / BEATS)
            self._was_stopped |= self._was_suspended()
            if self.inbox.generation > 0:
                self._mesh.directory.is_outside = False  # It is in a generation (again).
            asks = self._control is not None and self.inbox.entered is None
            if asks and self._mesh.have_all_parted and not self._verdict.done():
                self._verdict.set_result(ExitReason(f"{self.name}: {RUN_ENDED}"))
            self._mesh.beat()

    def _was_suspended(self) -> bool:
        return self._loop.time() - self._last_beat_s > self.config.heartbeat_timeout_s

    async def _report_failure(self, what: str, code: int) -> None:
        self._is_failing = True
        self._mesh.broadcast("verdict", self.index, f"{self.name} {what}", code)
        await self._mesh.drained(LINGER_S)

    async def _begin_control(
        self, state: ConsensusState, follow: Callable[[Decision], None], store: Store
    ) -> None:
        """Start the consensus: from now on the run is elastic."""
        self._mesh.directory.outlives = True
        self._control = Control(state, self._mesh.send, follow, store, DaemonThreads())
        for host in self._mesh.missed:
            self._control.is_missed(host)

    async def _end(self, verdict: ExitReason) -> NoReturn:
        mesh = self._mesh if self.count > 1 else None
        await log_and_exit(verdict, self.name, self.resume_hint, mesh and mesh.drained)

    def _end_by_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the process upon an unexpected error, after which no host would be watched."""
        error = context.get("exception")
        if error is None or isinstance(error, OSError):
            return log.info(f"{context['message']}: {error!r}")
        exit_on_error(error, self.name, self.resume_hint)
