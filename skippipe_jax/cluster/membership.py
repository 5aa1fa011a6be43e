"""How this process joins the other hosts of a run, and how it learns that one of them is lost.

The hosts are connected with each other (see `skippipe_jax.connections.mesh`). When one is lost,
every other prints one message and ends with `LOST_HOST_EXIT_CODE`, or as `exit_decision` says where
the host has found why it has to end itself, until the run outlives its hosts. Who finds out first
tells the others, so that all name the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from skippipe_jax import log
from skippipe_jax.cluster.agreement import barrier
from skippipe_jax.cluster.attendance import Attendance
from skippipe_jax.cluster.board import NOBODY, Board
from skippipe_jax.cluster.ending import (
    LINGER_S,
    LOST_HOST_EXIT_CODE,
    REASON_CHARACTERS,
    Phase,
    may_stem_from_a_peer,
)
from skippipe_jax.cluster.group import Group
from skippipe_jax.cluster.place import Place
from skippipe_jax.cluster.succession import Counted, Succession
from skippipe_jax.cluster.team import Team
from skippipe_jax.config import ClusterConfig
from skippipe_jax.connections import clock, jax_runtime
from skippipe_jax.connections.addresses import join_address, require_free
from skippipe_jax.connections.links import MESSAGE_CHARACTERS
from skippipe_jax.connections.pulse import BEATS
from skippipe_jax.connections.status import TrainingStatus
from skippipe_jax.consensus.control import Control, Store
from skippipe_jax.consensus.decisions import first_state
from skippipe_jax.consensus.generations import Copies, Enter, Generation, Rules, State
from skippipe_jax.errors import GenerationEnded


class Membership(Group):
    """This host's part in a run: who it is, what hosts tell each other, and its end.

    All methods may be called from any thread.

    Attributes:
        phase: how far the run has come; set it to `TRAINING` when all is ready to train.
        count: the number of hosts that the run begins with.
        last_words: called when another host is lost, for a sentence that the final message ends
            with, such as the checkpoint to resume from. Set it to your own; it has two seconds.
        reception: tells newcomers and observers of the run.
        succession: the generations of the run, once it outlives its hosts.
    """

    def __init__(self, config: ClusterConfig, index: int, count: int, is_distributed: bool = False):
        """Start alone; `joined` connects a host that has others."""
        self.index, self.count, self.is_distributed = index, count, is_distributed
        self.hosts, self.timeout_s = range(count), config.connect_timeout_s
        self.phase = Phase.SETUP
        self._config = config
        self._board = Board()
        self.succession = Succession(self._board)
        self._attendance = Attendance(config, index, count, self._board)
        self.last_words: Callable[[], str] = str
        self._attendance.last_words = lambda: self.last_words()
        self.reception = self._attendance.reception

    @property
    def is_outside(self) -> bool:
        """Whether the others go on with a run of which this host was lost."""
        return self._attendance.is_outside

    @property
    def process(self) -> int:
        """The number of this process among all of a run; that of host 0 is the run's start."""
        return self._attendance.process

    @property
    def address(self) -> str:
        """The IP address by which the others reach this host, and on which it listens."""
        return self._attendance.address

    def enter(self, place: Place, sockets: str | None, last_addresses: Sequence[str] = ()) -> None:
        """Meet the other hosts and watch them from now on; returns when all are there.

        With addresses where they listened last, those that still do; none may.
        """
        self._attendance.enter(place, sockets, last_addresses)

    @property
    def generation_number(self) -> int:
        """That of the generation in which this host is; 0 before there is one."""
        return self._board.generation

    def put(self, key: str, value: str) -> None:
        """Tell every host a value, replacing an earlier one; returns before they know it.

        Raises:
            ValueError: if key and value together exceed `MESSAGE_CHARACTERS`.
        """
        if len(key) + len(value) > MESSAGE_CHARACTERS:
            raise ValueError(f"put({key!r}): {len(value)} characters are no small message")
        self._board.post(self.index, key, value)
        if self.count > 1:
            self._attendance.broadcast("put", key, value)

    def get(
        self, key: str, timeout_s: float, source: int | None = None, generation: int = 0
    ) -> str:
        """Return the latest value of a key, waiting for it if nobody has put it yet, and forget it.

        Args:
            key: what to read.
            timeout_s: how many seconds to wait at most.
            source: the host that should put it, where there is one, for the error message.
            generation: that in which it is waited for.

        Raises:
            PeerTimeout: says what was waited for, from whom, and since when.
            GenerationEnded: if the generation is another before it is there.
        """
        return self._board.take(key, timeout_s, source, generation)

    def show(self, training: TrainingStatus) -> None:
        """Tell those who observe the run how far training is, from now on."""
        before = self._attendance.training
        if before is not None:  # Lost hosts are where they were.
            known = {**before.locations, **training.locations}
            training = replace(training, locations=known)
        self._attendance.training = training

    def when_ended(self, then: Callable[[], None]) -> None:
        """Never call `then`: these hosts end together."""

    def contribute(
        self, step: int, totals: Sequence[float], counted: Counted, copies: Copies = ()
    ) -> None:
        """Count a step of a host that is alone; others sum their totals by transfers."""
        assert self.count == 1, "is alone"
        counted(tuple(totals))

    def saved(self, step: int) -> None:
        """Tell nobody: hosts that are always the same look for checkpoints when they resume."""

    def outlive(
        self, rules: Rules, store: Store, placement: Any, step: int, processes: Sequence[int]
    ) -> Team:
        """Begin the first generation, after `step`; all hosts call this together.

        They are the first generation, under a placement as `rules` know it, and have told each
        other the numbers of their `processes`. Of the step there is a checkpoint, unless it is 0.
        `store` is as `Control` takes it.
        """
        processes = tuple(processes)
        hosts = tuple(range(self.count))
        start = processes[0]
        first = Generation(1, hosts, processes, 0, step, placement=placement, start=start)
        self.succession.follow(Enter(first))
        state = first_state(self.index, rules, first, step)
        self._attendance.begin_control(state, self.succession.follow, store)
        return Team(self, first)

    def ask_in(self, rules: Rules, store: Store) -> None:
        """Ask those that go on with the run to take this host in: `next_team` waits for that."""
        self.phase = Phase.TRAINING
        state = State(self.index, self._attendance.process, rules)
        self._attendance.begin_control(state, self.succession.follow, store)

    def next_team(self, after: int, timeout_s: float) -> Team | None:
        """Wait for the team that follows the generation of a number, once this host is in it.

        None if there is none within `timeout_s`; `after` 0 means the first that it is in.
        """
        generation = self.succession.next(after, timeout_s)
        return None if generation is None else Team(self, generation)

    def misses(self, hosts: Collection[int]) -> bool:
        """Tell whether one of these hosts, of a generation, is gone, silent, or another process."""
        return not self._attendance.missed.isdisjoint(hosts)

    def give_up(self) -> None:
        """Wait no longer for another team: whatever still waits for the last one raises."""
        self.succession.ends()

    @property
    def leads(self) -> bool:
        """Whether this host says for all how the run goes: host 0, or the leader of those left."""
        last = self.succession.entered
        return self.index == (0 if last is None else last.leader)

    @property
    def leader_named(self) -> str:
        """Say which host leads, and where it listens, as far as this one knows."""
        last = self.succession.entered
        leader = 0 if last is None else last.leader
        address = self._attendance.address_of(leader)
        return f"host {leader}" + (f" ({address})" if address else "")

    def here(self) -> dict[str, Any]:
        """Describe this host to the others: its number in the run, its process, its address."""
        return {"host": self.index, "pid": os.getpid(), "address": self.control_address}

    @property
    def control_address(self) -> str:
        """Where this host listens for the others."""
        return self._attendance.control_address

    @property
    def control(self) -> Control:
        """This host's part in what is decided together, in a run that outlives its hosts."""
        control = self._attendance.control
        assert control is not None, "outlives its hosts"
        return control

    def transfer_addresses(self, hosts: Collection[int] | None = None) -> dict[int, str]:
        """Return where this host's transfer servers, by other host, take requests: ``IP:PORT``.

        The others are of these `hosts`; by default, of those that the run begins with.
        Port 0 stands for any free one, unless ``cluster.transfer_port`` fixes them.

        Raises:
            InputError: if there are no such ports for all hosts.
            TemporaryError: if one of this host's is taken.
        """
        ports = {
            other: self._config.port(self.index, other, self.count)
            for other in (range(self.count) if hosts is None else hosts)
            if other != self.index
        }
        for port in ports.values():
            require_free("cluster.transfer_port", self.address, port)
        return {other: join_address(self.address, port) for other, port in ports.items()}

    def clock_offset_s(self, of: int = 0, generation: int = 0) -> float:
        """Measure what to add to this host's `time.time()` to get that of host `of`.

        It is off by half of the shortest round trip between the two hosts at most. Takes about
        half a second at most, or one round trip where that is longer.

        Raises:
            PeerTimeout: if the other does not answer within ``connect_timeout_s``.
            GenerationEnded: if the generation is another before it does.
        """
        if self.index == of:
            return 0.0

        def answer() -> str:
            return self.get(clock.key(of), self._config.connect_timeout_s, of, generation)

        return clock.offset_s(partial(self._attendance.send, of, "clock"), answer)

    def leave(self) -> None:
        """Part from the others: at the end of a run, once all have come to it, or if they go on.

        Raises:
            PeerTimeout: if a host does not come to its end within ``connect_timeout_s``.
        """
        if self.count == 1:
            return
        has_left = self.generation_number == NOBODY
        if not has_left:
            self._wait_for_all_to_leave()
        if self.is_distributed:
            # Waits for all hosts once more, so that JAX's service on host 0 outlives its clients. A
            # host that is lost meanwhile ends this process by its verdict.
            jax_runtime.stop()
        self._attendance.part(LINGER_S if has_left else self._config.heartbeat_timeout_s)

    def _wait_for_all_to_leave(self) -> None:
        """Return when all hosts that are left have come to the end of the run."""
        if self.succession.entered is None:
            barrier(self, "leave", self._config.connect_timeout_s)
            return
        while True:
            last = self.succession.entered
            assert last is not None, "outlives its hosts"
            team = Team(self, last)
            try:
                return barrier(team, "leave", self._config.connect_timeout_s)
            except GenerationEnded:
                if self.generation_number == NOBODY:
                    return  # The others have come to the end without this host.
                self.next_team(team.generation.number, self._config.connect_timeout_s)

    def fail(self, what: str, code: int = LOST_HOST_EXIT_CODE) -> None:
        """Tell the others that this host ends by itself; they name it and end by `code`.

        `what` has happened to it, as "failed: the disk is full": it follows the host's name.
        Returns when they know, or after two seconds. The caller must then end the process by
        `os._exit`, as `joined` does: an ordinary exit waits for hosts that have gone.
        """
        if self.count > 1:
            self._attendance.tell_failure(what[:REASON_CHARACTERS], code)

    def stop(self, reason: str) -> NoReturn:
        """End this process by `LOST_HOST_EXIT_CODE` and one message that gives this host's reason.

        The others stop too and name it. If they stop because of another host, so does this one.
        """
        self.fail(f"failed: {reason}")
        self._attendance.end(reason)

    def explain(self, error: BaseException) -> None:
        """Find out whether an error of this host comes from the loss of another.

        If so, it does not return: the process ends with the message about the lost host. That can
        take the whole heartbeat timeout. It returns if no host was lost, and at once for an error
        that no other host can cause; raise the error then.
        """
        if self.count == 1 or not may_stem_from_a_peer(error):
            return
        # A death shows at once; only a host that hangs takes the whole timeout.
        time.sleep(LINGER_S)
        if self._attendance.control is not None:
            return  # No lost host ends this one any more, and whoever goes on has waited before.
        summary = f"{type(error).__name__}: {error}".splitlines()[0]
        own = self._attendance.name
        log.info(f"{own} is finding out whether a lost host is behind this error: {summary}")
        time.sleep(self._config.heartbeat_timeout_s * (1 + 2 / BEATS))
