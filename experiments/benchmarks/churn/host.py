"""One host of a run that is to be struck: the real command, which notes how far it is.

    python -m experiments.benchmarks.churn.host FOLDER HOST train --config FILE ...
    python -m experiments.benchmarks.churn.host FOLDER HOST join ADDRESS ...

Functions of the package are wrapped in this process alone. Each that begins or ends a phase of a
step looks for an aim in FOLDER, which `churn` leaves there; where it is its own it notes that and
strikes: it ends this process, stops it, or waits until `churn` has cut links. What follows from
that the package has to deal with, which knows nothing of it. All that happens is noted in a file
of the process, one line of JSON each.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import faulthandler
import functools
import hashlib
import io
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from skippipe_sched.errors import run_command
from skippipe_sched.problem.plan import Operation

from experiments.benchmarks.churn import faults
from experiments.benchmarks.churn.faults import AFTER, ASK, BEFORE, FETCH, REGROUP, aim_of
from skippipe_jax.cli import join, train
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.connections.addresses import parse_address, sever
from skippipe_jax.connections.mesh import Mesh
from skippipe_jax.consensus.control import Control
from skippipe_jax.consensus.generations import Commit
from skippipe_jax.runtime.background_sync import BackgroundSync
from skippipe_jax.runtime.exact_iteration import ExactIteration
from skippipe_jax.runtime.iteration import TrainingIteration
from skippipe_jax.runtime.operations import TrainingOperations
from skippipe_jax.runtime.outer_iteration import OuterIteration
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.runtime.state import StageState
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.runtime.transport import Transfers
from skippipe_jax.training.elastic.join_search import JoinSearch
from skippipe_jax.training.elastic.runner import ElasticRunner
from skippipe_jax.training.session import Session

CUT_S = 10.0
"""So long a host waits at most for its links to be cut, or another host to be killed."""


class FailingFolder:
    """The folders that hosts train in, which fail for a while as those of a network do."""

    CALLS = (
        *((io, "open"), (os, "open"), (os, "write"), (os, "fsync")),
        *((os, "replace"), (os, "rename"), (os, "link")),
    )

    def __init__(self, folder: Path):
        """`folder` holds those folders."""
        self._starts = tuple(str(folder.resolve() / name) for name in ("run", "joined"))
        self._until_s = 0.0
        for module, name in self.CALLS:
            setattr(module, name, self._failing(getattr(module, name)))

    def begin(self) -> None:
        """Fail from now on, for `STORAGE_S`."""
        self._until_s = time.monotonic() + faults.STORAGE_S

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def outer(file: Any, *given: Any, **named: Any) -> Any:
            if time.monotonic() < self._until_s:
                path = f"/proc/self/fd/{file}" if isinstance(file, int) else os.fspath(file)
                if os.path.realpath(path).startswith(self._starts):
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
            return call(file, *given, **named)

        return outer


class Witness:
    """Notes what happens in this process, and strikes where it is told to."""

    def __init__(self, folder: Path, host: int):
        """`folder` is that of the aims and notes."""
        self._aim = aim_of(folder, host)
        path = folder / f"notes{host}-{os.getpid()}.jsonl"
        self._notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.step = 0
        self.mesh: tuple[Mesh, asyncio.AbstractEventLoop] | None = None
        self.transfers: Transfers | None = None
        self.failing = FailingFolder(folder)

    def connections(self) -> list[tuple[int, asyncio.StreamWriter]]:
        """Return the connections for messages, each with the other host."""
        links = {} if self.mesh is None else self.mesh[0]._links
        return [(host, link.writer) for host, link in [*links.items()]]

    def ports(self) -> dict[int, list[int]]:
        """The ports of connections for messages, at this end and at the other."""
        found = {}
        for host, writer in self.connections():
            names = (writer.get_extra_info(name) for name in ("sockname", "peername"))
            found[host] = [name[1] for name in names if name is not None]
        return {host: ports for host, ports in found.items() if len(ports) == 2}

    def reset(self) -> None:
        """Reset all connections for messages: what waits to be sent or read is lost."""
        if self.mesh is None:
            return

        def abort(writer: asyncio.StreamWriter) -> None:
            if (own := writer.get_extra_info("socket")) is not None:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

        for _, writer in self.connections():
            self.mesh[1].call_soon_threadsafe(abort, writer)

    def sever(self) -> None:
        """Cut all connections for transfers: what is under way fails at both ends."""
        servers = {} if self.transfers is None else self.transfers.servers
        sever([parse_address("", server.address()) for server in servers.values()])

    def note(self, what: str, **more: Any) -> None:
        """Write a line, which outlives the process."""
        line = {"what": what, "at": time.time(), **more}
        os.write(self._notes, (json.dumps(line) + "\n").encode())

    def reach(self, phase: str, edge: str) -> None:
        """A phase begins or ends; strike if that was aimed at."""
        try:
            aim = json.loads(self._aim.read_text())
        except FileNotFoundError:  # Nothing is aimed at, or another thread was here first.
            return
        if (aim["phase"], aim["edge"]) != (phase, edge):
            return
        claimed = self._aim.with_suffix(".struck")
        try:
            self._aim.rename(claimed)
        except FileNotFoundError:  # Another thread was here first.
            return
        self.note("struck", phase=phase, edge=edge, step=self.step, ports=self.ports())
        match aim["act"]:
            case None:
                pass
            case faults.RESET:
                return self.reset()
            case faults.SEVER:
                return self.sever()
            case faults.STORAGE:
                return self.failing.begin()
            case name:
                return os.kill(os.getpid(), signal.Signals[name])
        deadline = time.monotonic() + CUT_S
        while claimed.exists() and time.monotonic() < deadline:
            time.sleep(0.005)

    def watch(self, owner: type, name: str, phase: str) -> None:
        """Take a method for a phase."""

        def watched(inner: Callable[..., Any], *given: Any, **named: Any) -> Any:
            self.reach(phase, BEFORE)
            result = inner(*given, **named)
            self.reach(phase, AFTER)
            return result

        wrap(owner, name, watched)


def wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Call `around` with a method and its arguments wherever the method is called."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*given: Any, **named: Any) -> Any:
        return around(inner, *given, **named)

    setattr(owner, name, outer)


def digest_of(state: StageState) -> str:
    """Of what a replica has in common with the others of its stage, every bit of it.

    That are parameters and optimizer state, or where replicas go apart, what they apply.
    """
    outer = state.outer
    common = state.to_save() if outer is None else (outer.anchor, outer.momentum)
    digest = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(common):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def stages_of(topology: Topology) -> list[int]:
    """Those that this host serves."""
    return sorted({topology.stage_of[node] for node in topology.nodes})


def wrap_package(witness: Witness) -> None:
    """Have the package's functions tell the witness; nothing that they do changes."""

    def read(inner: Callable[..., Any], session: Session, iteration: int) -> Any:
        witness.step = iteration + 1
        given = inner(session, iteration)
        team: Any = session.group
        microbatches = [session.microbatches_read + microbatch for microbatch in given]
        number = team.generation.number
        witness.note("read", generation=number, step=iteration + 1, microbatches=microbatches)
        return given

    def dispatched(inner: Callable[..., Any], own: Any, operation: Operation, *given: Any) -> Any:
        if operation.kind != "F":
            return inner(own, operation, *given)
        witness.reach("forward", BEFORE)
        result = inner(own, operation, *given)
        witness.reach("forward", AFTER)
        return result

    def ran(inner: Callable[..., Any], live: TrainingIteration, *given: Any, **named: Any) -> Any:
        """A plan may leave a host nothing to compute: it comes to no forward, but is struck."""
        if all(operation.kind != "F" for operation in live.computes):
            witness.reach("forward", BEFORE)
            witness.reach("forward", AFTER)
        return inner(live, *given, **named)

    def finished(inner: Callable[..., None], live: ExactIteration, summed: jax.Array) -> None:
        inner(live, summed)
        stage_of, states = live.replicas.stage_of, live.replicas.states
        digests = {str(stage_of(replica)): digest_of(states[replica]) for replica in states}
        number = live.group.generation.number
        given = {"stages": stages_of(live.topology), "digests": digests}
        witness.note("counted", generation=number, step=live.iteration + 1, **given)

    def counted(inner: Callable[..., None], behind: BackgroundSync, made: Any, summed: Any) -> None:
        inner(behind, made, summed)
        number, stages = behind.group.generation.number, stages_of(behind.topology)
        witness.note("counted", generation=number, step=made.step, stages=stages)

    def applied(inner: Callable[..., None], own: OuterIteration) -> None:
        inner(own)
        number, states = own.behind.group.generation.number, own.replicas.states
        digests = {str(own.replicas.stage_of(node)): digest_of(states[node]) for node in states}
        witness.note("applied", generation=number, step=own.step, digests=digests)

    def begun(inner: Callable[..., None], own: Runtime, step: int) -> None:
        inner(own, step)
        stage_of, number = own.topology.stage_of, own.group.generation.number
        digests = {str(stage_of[node]): digest_of(state) for node, state in own.states.items()}
        witness.note("begun", generation=number, step=step, digests=digests)

    def opened(inner: Callable[..., None], own: Session, run: Any, group: Any, setup: Any, *more):
        witness.transfers = setup.transfers
        inner(own, run, group, setup, *more)

    def missed(inner: Callable[..., None], control: Control, host: int) -> None:
        witness.note("missed", host=host)
        inner(control, host)

    def beaten(inner: Callable[..., None], mesh: Mesh) -> None:
        witness.mesh = mesh, asyncio.get_running_loop()
        inner(mesh)

    def sent(inner: Callable[..., None], mesh: Mesh, host: int, *message: Any) -> None:
        """A leader is also struck when it has told one member that a step counts, not the rest."""
        inner(mesh, host, *message)
        match message:
            case ["control", Commit()]:
                witness.reach("committed", BEFORE)

    wrap(Session, "__init__", opened)
    wrap(Session, "_batches", read)
    witness.watch(Session, "_batches", "start")
    wrap(TrainingOperations, "_dispatch", dispatched)
    wrap(TrainingIteration, "run", ran)
    witness.watch(ExactIteration, "_begin_ring", "ring")
    witness.watch(ExactIteration, "_contribute", "prepared")
    wrap(ExactIteration, "_finish", finished)
    witness.watch(ExactIteration, "_finish", "committed")
    # The same phases where replicas go apart: what is on its way is applied some steps later.
    wrap(Runtime, "_begin_local_steps", begun)
    wrap(BackgroundSync, "_commit", counted)
    wrap(OuterIteration, "_apply", applied)
    witness.watch(BackgroundSync, "_begin", "ring")
    witness.watch(BackgroundSync, "_end_part", "prepared")
    witness.watch(OuterIteration, "_apply", "committed")
    witness.watch(Session, "_save", "save")
    witness.watch(ElasticRunner, "_open", REGROUP)
    witness.watch(JoinSearch, "fetch", FETCH)
    witness.watch(Membership, "request_admission", ASK)
    wrap(Control, "is_missed", missed)
    wrap(Mesh, "send", sent)
    wrap(Mesh, "beat", beaten)


def main() -> int:
    """Parse the command line and train; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("host", type=int)
    commands = parser.add_subparsers(required=True)
    for name, module in (("train", train), ("join", join)):
        inner = commands.add_parser(name)
        module.add_arguments(inner)
        inner.set_defaults(command=module.run)
    arguments = parser.parse_args()
    faulthandler.register(signal.SIGUSR1)
    wrap_package(Witness(arguments.folder, arguments.host))
    return run_command(lambda: arguments.command(arguments), arguments.interrupted)


if __name__ == "__main__":
    sys.exit(main())
