"""Runtime of one host: state, transfers, and one iteration after another.

Without any waits, as on a single host, `Runtime.run` dispatches all operations of an iteration at
once. Otherwise every operation starts when its input has arrived (`iteration`). At the end replicas
average their gradients (`live`) or, in `outer` mode, no host waits for all others
(`outer_iteration`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

from skippipe_jax.cluster.agreement import gather
from skippipe_jax.cluster.membership import Group
from skippipe_jax.config import Config
from skippipe_jax.config.cluster import AVERAGE, BUDDY
from skippipe_jax.connections.threads import DaemonThreads
from skippipe_jax.data.batches import Batch
from skippipe_jax.errors import GenerationEnded
from skippipe_jax.models.node_memory import gathers_once
from skippipe_jax.program.compiler import Program
from skippipe_jax.program.schedule import OWN, Schedule, with_exact_averaging
from skippipe_jax.runtime.ahead_of_time import compile_session
from skippipe_jax.runtime.background_sync import BackgroundSync
from skippipe_jax.runtime.buddies import BuddyCheckpoints
from skippipe_jax.runtime.emulation import Emulation
from skippipe_jax.runtime.events import EventLoop
from skippipe_jax.runtime.exact_iteration import ExactIteration
from skippipe_jax.runtime.exchange import Exchange
from skippipe_jax.runtime.held_out import HeldOut
from skippipe_jax.runtime.operations import HeldOutOperations, TrainingOperations
from skippipe_jax.runtime.outer_iteration import OuterIteration
from skippipe_jax.runtime.outer_steps import OuterSteps, settle_fragments
from skippipe_jax.runtime.replicas import Replicas, open_collectives
from skippipe_jax.runtime.stage_functions import activation, wire_of_run
from skippipe_jax.runtime.stage_rebuild import NO_RECOVERY_SOURCES, RecoverySources
from skippipe_jax.runtime.state import Kept, OwnOrigin, StageState, StateReader, make_states
from skippipe_jax.runtime.state_copy import Copy
from skippipe_jax.runtime.state_transfer import DisklessStages, StateTransfers
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.runtime.totals import Outcome
from skippipe_jax.runtime.transport import HostLink, Transfers, expect_hops
from skippipe_jax.storage.checkpoint import CheckpointItems, ReplicaStates

T = TypeVar("T")


class Runtime:
    """Executor of the programs of one host on the nodes that it serves.

    Attributes:
        topology: assignment of nodes, replicas and devices to hosts.
        replicas: the local replicas.
        operations: the operations of training.
        given: the stages that diskless hosts send to the leader for checkpoints.
    """

    def __init__(
        self,
        config: Config,
        schedule: Schedule,
        programs: Mapping[str, Program],
        topology: Topology,
        links: Mapping[int, HostLink],
        group: Group,
        states: Mapping[int, StageState] | None = None,
        clock_offset: Future[float] | None = None,
        copies: Collection[Copy] = (),
        step: int = 0,
    ):
        """Continue after `step` with the `states` of the local replicas, or with initial ones.

        `programs` are those of this host, by the names of the plans of `schedule`; `links[h]`
        leads to host h. `clock_offset` is the difference of host 0's clock to the local one [s].
        The `group` commits steps. `copies` are the buddy checkpoints that this host holds.
        """
        self.group = group
        self.config = config
        self.schedule = schedule
        self.programs = programs
        self.topology = topology
        self._clock_offset = clock_offset
        self.replicas = Replicas(
            topology,
            make_states(config, topology) if states is None else states,
            notes_norms=group.is_elastic and config.recovery.lost_stage == AVERAGE,
        )
        for node, state in self.states.items():
            stage, mesh = topology.stage_of[node], topology.meshes[node]
            state.gathers = gathers_once(config, topology.plan.case, stage, mesh, node)
        self.operations = TrainingOperations(
            self.replicas,
            wire_of_run(config),
            config.seed,
            sends_targets=config.averaging.is_outer,
        )
        # By the name of the plan, and whether replicas average gradients.
        self.emulations = {
            (name, is_exact): Emulation(of_kind, config.network, config.seed)
            for name, plan in schedule.plans.items()
            for is_exact, of_kind in ((True, with_exact_averaging(plan)), (False, plan))
            if config.network.mode == "emulate"
        }
        # On one host nothing arrives late, unless delays are emulated.
        self.waits = bool(
            len(topology.hosts) > 1
            or self.emulations
            or config.execution == "ready-first"
            or topology.rings
            or group.is_elastic
            or config.averaging.is_outer
        )
        loop = EventLoop(config.network.deadline_s, waits=self.waits)
        self.exchange = Exchange(loop, topology, links)
        self.given = DisklessStages(topology, config, group)
        expect_hops(links, topology.host_of, self.given.hops)
        routes = topology.copy_routes if group.is_elastic else ()
        first, every = group.generation.step, config.recovery.buddy_every
        self.buddies = BuddyCheckpoints(self.exchange, self.replicas, routes, every, first, copies)
        self._outer_steps = self._background = None
        if config.averaging.is_outer:
            self._begin_local_steps(step)
        group.when_ended(lambda: self.exchange.loop.post(_raise_ended))

    def compile(self) -> None:
        """Compile all functions of iterations and validations, except for `open_collectives`."""
        programs, counts = [*self.programs.values()], self.group.is_elastic
        compile_session(self.config, self.operations, programs, counts_by_consensus=counts)

    def _begin_local_steps(self, step: int) -> None:
        """Begin local steps of the replicas after `step`."""
        self._outer_steps = OuterSteps(self.config, self.topology, self.states, step)
        self._background = BackgroundSync(self.exchange, self.group, step)
        # In a resumed run, messages in transit at the checkpoint are sent again.
        for replica, state in self.states.items():
            for sent_after, own in state.under_way.items():
                self._background.send(replica, sent_after, own)

    @property
    def states(self) -> Mapping[int, StageState]:
        """State of each local replica, by the first of its nodes."""
        return self.replicas.states

    def checkpoint_items(self, step: int) -> CheckpointItems:
        """Collect the items that this host saves after a step; all hosts call this together.

        It saves the stages whose first replica it holds, the stages that it receives from diskless
        hosts, and, if replicas differ, the local state of each. Local states are omitted if some
        hosts are diskless.
        """
        stages = self.replicas.owned_stages(self.group.diskless)
        stages |= self.given.after(step, self.states, self.exchange.links)
        averaging = self.config.averaging
        if self.group.diskless or not averaging.is_outer or step < averaging.exact_steps:
            return CheckpointItems(stages)
        stage_of, replicas = self.topology.stage_of, self.topology.replicas
        own = {
            (stage_of[node], replicas[stage_of[node]].index(node)): state.own_to_save()
            for node, state in self.states.items()
            if state.outer is not None
        }
        return CheckpointItems(stages, own, ReplicaStates.of(replicas, asdict(averaging)))

    def let_go(self) -> None:
        """Drop the microbatches of an iteration that did not end."""
        self.operations.nodes.clear()

    def wait_for(self, future: Future[T], step: int) -> T:
        """Return the result of a future that depends on the totals of a step.

        Raises:
            PeerTimeout: if nothing arrived from other hosts for `network.deadline_s`.
        """
        return (
            future.result() if self._background is None else self._background.wait_for(future, step)
        )

    def counts(self, step: int) -> bool:
        """Return whether a step is committed, as far as this host has been notified."""
        if self.config.averaging.is_exact(step):
            return True
        return self._background is not None and self._background.committed_step >= step

    def close(self) -> None:
        """Take the last commits of `outer` mode; no iteration may follow."""
        if self._background is not None:
            self._background.close()

    @property
    def copies(self) -> Collection[Copy]:
        """Buddy checkpoints of other hosts' stages that this host holds."""
        return self.buddies.copies

    def held_out(self, count: int) -> HeldOut:
        """Set up `count` held-out microbatches; all hosts call this with the same count."""
        computed = activation(self.config.model, self.config.data)
        operations = HeldOutOperations(self.replicas, computed)
        return HeldOut(self.exchange, operations, count)

    def run(
        self,
        iteration: int,
        batches: Mapping[int, Batch],
        *,
        stop: bool = False,
        record: bool = False,
    ) -> Outcome:
        """Run one iteration by its plan.

        `batches` are the batches of microbatches with a local data node, by their numbers in the
        iteration. `stop` adds to the totals that this host has a request to stop. With `record`,
        the outcome includes a recording of the times of all events.

        Raises:
            PeerTimeout: if nothing arrived from other hosts for `network.deadline_s`.
        """
        name = self.schedule.name(iteration)
        self.operations.begin(iteration)
        offset_s = None
        if record:
            offset_s = 0.0 if self._clock_offset is None else self._clock_offset.result()
        is_exact = self.config.averaging.is_exact(iteration + 1)
        if is_exact:
            kind = partial(
                ExactIteration,
                buddies=self.buddies,
                group=self.group,
                averaging_dtype=self.config.network.averaging_dtype,
            )
        else:
            assert self._outer_steps is not None, "averaging.mode is not outer"
            assert self._background is not None, "averaging.mode is not outer"
            kind = partial(OuterIteration, steps=self._outer_steps, behind=self._background)
        loop = self.exchange.loop
        # The times of operations are known only if they are waited for.
        loop.waits = self.waits or record
        outcome = kind(
            exchange=self.exchange,
            operations=self.operations,
            program=self.programs[name],
            iteration=iteration,
            case=self.schedule.plans[name].case,
            ready_first=self.config.execution == "ready-first",
            emulation=self.emulations.get((name, is_exact)),
        ).run(batches, stop, offset_s)
        loop.waits = self.waits
        if is_exact and self._outer_steps is not None:
            self._outer_steps.begin(iteration + 1)
        return outcome


class Ready(NamedTuple):
    """Message that hosts exchange when their stages are open, and the check of all messages."""

    tell: Callable[[], Any] = lambda: None
    compare: Callable[[Mapping[int, Any]], None] = lambda _: None


def open_runtime(
    config: Config,
    schedule: Schedule,
    programs: Mapping[str, Program],
    host_of: Sequence[int],
    kinds: Sequence[Sequence[str]],
    group: Group,
    transfers: Transfers,
    origin: StateReader | None,
    kept: Kept | None = None,
    remains: RecoverySources = NO_RECOVERY_SOURCES,
    own_origin: OwnOrigin | None = None,
    step: int = 0,
    ready: Ready | None = None,
) -> Runtime:
    """Open the runtime of this host; all hosts of the `group` call this together.

    `kinds[h]` are the kinds of host h's devices. The host continues with the states that it has
    `kept`, and receives the states of stages that it newly serves from other hosts. Lost stages are
    rebuilt from the states of other hosts and from what `remains`. In `outer` mode, replicas
    continue after `step`. At the end, hosts exchange and compare `ready`.
    """
    plan = schedule.plans[OWN]
    cut = config.model.stage_partition(len(plan.stages))
    for (stage, _), state in (kept or {}).items():
        settle_fragments(config, cut[stage], state, step)
    topology = Topology.of(
        config,
        plan,
        group.index,
        host_of,
        kinds,
        in_one_jax=group.is_distributed,
        host_ids=group.hosts,
    )
    max_lag = config.averaging.max_lag + config.averaging.is_outer
    links = transfers.links(group.generation.step, max_lag)
    of_programs = (hop for program in programs.values() for hop in program.hops)
    expect_hops(links, host_of, itertools.chain(of_programs, topology.hops))
    clock_offset = None
    if config.trace != "never":
        clock_offset = DaemonThreads().submit(group.clock_offset_s)
    transfers_of_states = StateTransfers(topology, config, group, kept or {}, remains)
    make = partial(make_states, config, topology)
    if transfers_of_states.transfers:
        expect_hops(links, host_of, transfers_of_states.hops)
        states = transfers_of_states.run(links, make, origin)
    else:
        states = make(origin, kept, own_origin=own_origin, step=step)
    given = schedule, programs, topology, links, group, states, clock_offset
    # Other copies are of stages restored from a checkpoint, and no longer needed.
    copies = remains.copies if config.recovery.lost_stage == BUDDY else ()
    runtime = Runtime(config, *given, copies=copies, step=step)
    runtime.compile()
    if not topology.in_one_jax:
        open_collectives(runtime.replicas)
    # No host may wait in a collective, or for activations, for a host that still reads or compiles,
    # and no host may update a state that another host still receives.
    ready = ready or Ready()
    ready.compare(gather(group, "ready", ready.tell, group.timeout_s))
    if topology.in_one_jax:
        open_collectives(runtime.replicas)
    return runtime


def _raise_ended(_: float) -> NoReturn:
    raise GenerationEnded
