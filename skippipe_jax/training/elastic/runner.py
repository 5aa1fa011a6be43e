"""Execution of the `coordinator`'s states: opens and closes sessions as hosts are lost and join.

It runs in the training thread. Decisions of the consensus arrive from the event loop through
`Membership`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from skippipe_sched.errors import InputError

from skippipe_jax import log
from skippipe_jax.cluster.agreement import from_host_0
from skippipe_jax.cluster.ending import may_be_caused_by_peer
from skippipe_jax.cluster.inbox import NOBODY
from skippipe_jax.cluster.membership import Group
from skippipe_jax.config import Config
from skippipe_jax.connections.waiting import telling
from skippipe_jax.consensus.generations import Abandoned, Generation, TextMissing, Tick
from skippipe_jax.errors import (
    CheckpointFailed,
    GenerationEnded,
    HostLeft,
    PeerTimeout,
    TransferTimeout,
)
from skippipe_jax.program.schedule import OWN
from skippipe_jax.runtime.ahead_of_time import compile_ahead
from skippipe_jax.runtime.stage_rebuild import NO_RECOVERY_SOURCES, RecoverySources
from skippipe_jax.runtime.topology import shardings_of_host
from skippipe_jax.runtime.transport import open_servers
from skippipe_jax.storage.checkpoint import DATA, is_committed, step_folder
from skippipe_jax.storage.files import retry
from skippipe_jax.storage.joined_folder import is_joined
from skippipe_jax.storage.loading import load_data_state
from skippipe_jax.storage.restore import rewind
from skippipe_jax.storage.run_dir import RunDir
from skippipe_jax.storage.run_lock import RunLock
from skippipe_jax.training.callbacks.metrics_log import MetricsTail
from skippipe_jax.training.callbacks.recovery_log import RecoveryLog
from skippipe_jax.training.elastic.coordinator import (
    JOINING,
    Cause,
    Confirming,
    CoordinatorEvent,
    CoordinatorState,
    Entered,
    Failed,
    HostPolicy,
    Opening,
    Signal,
    StateOrigin,
    StateSource,
    Stopped,
    Suspended,
    Training,
    advance,
)
from skippipe_jax.training.elastic.extra_hosts import host_by_node, stages_for
from skippipe_jax.training.elastic.join_measurements import JoinMeasurements, new_nodes
from skippipe_jax.training.elastic.join_offers import JoinOffers
from skippipe_jax.training.elastic.lost_stages import (
    describe_rebuilds,
    describe_rollback,
    single_host_warning,
)
from skippipe_jax.training.elastic.membership_change import elastic_rules, setup_for_group
from skippipe_jax.training.left_out_stages import read_left_out_stages, saved_steps_of_lost_stages
from skippipe_jax.training.replan.planner_process import PlannerWarmup, WarmPlanner
from skippipe_jax.training.replan.replanner import Replanner, SharedPlans
from skippipe_jax.training.report import SessionPlan, exchange_reports
from skippipe_jax.training.session import HeldState, RunContext, Session, first_held_state
from skippipe_jax.training.setup import (
    HostSetup,
    RunSetup,
    close_on_error,
    own_report,
    parts_to_restore,
    truncate_run,
    try_open_text,
)

# Seconds between checks whether another host is lost.
POLL_S = 0.1


class ElasticRunner:
    """Runner of an elastic run: opens one session after another, each with the present hosts.

    Attributes:
        metrics_tail: the last lines of metrics, kept across sessions.
        recoveries: the log of recoveries from lost stages.
        plans: the plans found by searches.
    """

    def __init__(self, run: RunContext, setup: HostSetup):
        """Store the run and the setup of this host."""
        self._run, self._setup = run, setup
        self._config, self._membership = run.config, run.membership
        self._host_of = host_by_node(run.config, setup.host_of)
        self._rules = elastic_rules(run.config, setup)
        self._inviting = JoinOffers(run.run_dir, max(setup.host_of) + 1)
        self.metrics_tail = MetricsTail(run.config.averaging.max_lag)
        self.recoveries = RecoveryLog(run.run_dir)
        run.callbacks.of_run += (self.metrics_tail, self.recoveries)
        self.plans = SharedPlans()
        self._store = RunDir(run.run_dir).propose
        self._planner = WarmPlanner()
        self._lock = RunLock(run.run_dir)
        # The last generation that this host led, and whose metrics it wrote.
        self._last_led = 0
        self._policy = HostPolicy(
            self._membership.index,
            run.config.cluster.rejoin_s,
            2 * run.config.cluster.heartbeat_timeout_s,
            run.config.recovery.lost_stage,
            replicas_diverge=run.config.averaging.is_outer,
        )
        self._state: CoordinatorState = JOINING
        self._session: Session | None = None
        # State of this host when its last session was closed.
        self._held = HeldState(0, 0)

    def close(self) -> None:
        """Stop the planner and release the folder."""
        self._planner.close()
        self._lock.release()

    def rejoin(self) -> Session:
        """Rejoin a live run and open its next session.

        Raises:
            PeerTimeout: if the others do not readmit this host.
        """
        _compile_own_stages(self._config, self._setup, self._membership.index)
        self._membership.request_admission(self._rules, self._store)
        return self._until_open(time.monotonic())

    def open(self, setup: RunSetup) -> Session:
        """Open the first session, with all hosts of the run."""
        state = self._held = first_held_state(setup)
        stages, step = setup.plan.stages, state.step
        processes = [own.process for own in setup.agreed.reports]
        group = self._membership.outlive(self._rules, self._store, stages, step, processes)
        origin = StateOrigin.OWN if state.checkpoint is None else StateOrigin.CHECKPOINT
        self._group, self._state = group, Opening(group.generation, StateSource(step, origin))
        try:
            with close_on_error(setup.transfers):
                self._invite(group, setup.agreed)
                self._write(group, setup)
                self._last_led = 1 if group.index == 0 else 0
                by = self._config.recovery.lost_stage
                single = single_host_warning(stages, setup.host_of, by)
                if group.index == 0 and single:
                    log.warning(single)
                session = self._replanned(Session(self._run, group, setup, state))
        except Exception as error:
            if not self.recovers_from(error):
                raise
            return self._until_open(time.monotonic())
        self._tell(Signal.OPENED)
        self._session = session
        return session

    def recovers_from(self, error: Exception) -> bool:
        """Return whether the run continues after an error, once that is certain.

        It does if the loss of a host or a broken connection has caused the error.

        Raises:
            PeerTimeout: if transfers fail again after reconnecting; a restart of this host may
                help.
        """
        cause = None
        if isinstance(error, GenerationEnded):
            self._tell(Signal.ENDED)
        else:
            cause, session, first = _cause_of(error), self._session, self._group.generation.step
            self._tell(Failed(cause, session is not None and session.step > first))
        if isinstance(self._state, Confirming):
            self._tell(self._watch(self._state.seconds))
        is_own = isinstance(self._state, Opening | Training)
        if is_own and cause == Cause.TRANSFER:
            problem = "transfers failed again although all hosts are alive"
            raise PeerTimeout(f"{problem}: {error}") from error
        if isinstance(self._state, Suspended) and self._state.has_reconnected:
            log.warning(f"{error}; all hosts are alive, and connect again")
        return not is_own

    def next_session(self) -> Session:
        """Close the session after a change of hosts, and open the next.

        Raises:
            HostLeft: if this host was told to leave, and the others continue without it.
            PeerTimeout: if too few hosts are left for longer than ``cluster.rejoin_s``.
        """
        try:
            return self._until_open(time.monotonic())
        except HostLeft:
            if self._session is not None:
                self._session.abandon()
            raise

    def _tell(self, event: CoordinatorEvent) -> None:
        self._state = advance(self._state, event, self._policy)

    def _until_open(self, since_s: float) -> Session:
        """Do what the state asks for until a session is open."""
        while True:
            match self._state:
                case Suspended(after, _, _, abandons):
                    if abandons:
                        self._membership.control.tell(Abandoned(after), Tick())
                    self._tell(self._await(after, self._policy.rejoin_s))
                case Opening(_, source):
                    try:
                        opened = self._open(self._group, self._held_of(source), since_s)
                    # A fetch from a host that dies raises at once.
                    except Exception as error:
                        if not self.recovers_from(error):
                            raise
                    else:
                        self._tell(Signal.OPENED)
                        self._session = opened
                        return opened
                case Stopped(error):
                    raise error
                case _:
                    raise AssertionError(f"no session follows from {self._state}")

    def _await(self, after: int, seconds: float) -> Entered | Signal:
        if self._run.preemption.has_left():
            return Signal.LEFT
        with telling(lambda _: self._waiting_message(after), seconds):
            following = self._membership.next_group(after, seconds)
        if following is None:
            # Stop waiting for a checkpoint that needs the others.
            self._membership.inbox.begin(NOBODY)
            return Signal.TIME_OVER
        self._group = following
        if after == 0:
            own, step = self._membership.index, following.generation.step
            joined = "joined" if own in following.generation.diskless else "rejoined"
            where = self._membership.control_address
            log.output(f"host {own} {joined} at step {step}; it listens at {where}")
        return Entered(following.generation, self._close_session(following.generation))

    def _waiting_message(self, after: int) -> str:
        own = self._membership.index
        others = self._group.hosts if after else range(self._membership.count)
        missed = [host for host in others if host != own and self._membership.misses([host])]
        silent = f"not reachable: {', '.join(f'host {host}' for host in missed)}"
        what = "a majority of hosts" if after else "admission to the run"
        state = silent if missed else "all other hosts are reachable"
        return f"host {own}: waiting for {what}; {state}"

    def _watch(self, seconds: float) -> Signal:
        # Count polls, so that the time of a suspended process does not run.
        for poll in range(1 + math.ceil(seconds / POLL_S)):
            time.sleep(POLL_S if poll else 0.0)
            if self._group.has_ended:
                return Signal.ENDED
            if self._membership.misses(self._group.hosts):
                return Signal.MISSED
        return Signal.TIME_OVER

    def _close_session(self, following: Generation) -> int | None:
        """Close the session, if one is open, before a generation; return the steps done."""
        session, self._session = self._session, None
        if session is None:
            return None
        if self._membership.index not in following.fresh:  # Else its last steps do not count.
            session.runtime.close()
            with suppress(GenerationEnded):  # Uncommitted steps have no metrics.
                session.emit_metrics()
        self._held = session.export()
        session.abandon()
        return self._held.step

    def _held_of(self, source: StateSource) -> HeldState:
        """Return the state of this host, after dropping what `source` makes obsolete."""
        if source.origin == StateOrigin.PEERS:
            self._held = HeldState(source.step, 0, {})
        elif source.origin == StateOrigin.CHECKPOINT:
            self._held = HeldState(source.step, 0, {}, restores_checkpoint=True)
            first, is_first = step_folder(self._run.run_dir, 0), self._group.generation.step == 0
            if is_first and not retry(self._run.run_dir, lambda: is_committed(first)):
                self._held = HeldState(source.step, 0)  # Nothing has been saved yet.
        return self._held

    def _open(self, group: Group, state: HeldState, since_s: float) -> Session:
        """Open the session of a group, after the step at which its generation starts.

        The step of `state` becomes that of the generation, or an earlier one if the checkpoint
        there is damaged.
        """
        config, folder, generation = self._config, self._run.run_dir, group.generation
        if group.index in group.fresh:
            self.recoveries.forget()
        elif generation.lost:
            saved = saved_steps_of_lost_stages(config, generation)
            known = state.step, self.metrics_tail.last_loss, saved
            self.recoveries.begin_recovery(generation, config.recovery.lost_stage, *known)
        done, state = state.step, replace(state, step=generation.step)
        self.metrics_tail.drop_after(generation.step)
        group.require_current()  # Do not open a session for an ended one.
        serves_data = 0 in self._rules.serves(generation.placement, self._membership.index)
        if serves_data:
            self._setup = try_open_text(config, self._setup)
        transfers = open_servers(group)
        with close_on_error(transfers):
            agreed = self._agreed(group, state, transfers.endpoint, serves_data=serves_data)
            self._require_text(group, agreed)
            transfers.connect(agreed.endpoints)
            plan = self.plans.fetch(group, agreed)
            measurements = {
                host: JoinMeasurements.parse(own.measured)
                for host, own in zip(group.hosts, agreed.reports, strict=True)
                if own.measured is not None
            }
            new = new_nodes(measurements, self._host_of, len(self._setup.host_of))
            setup = setup_for_group(config, self._setup, group, plan, new).after(agreed, transfers)
            if generation.lost or group.fresh:
                self.recoveries.adopt([own.recovery for own in agreed.reports])
            if 0 in group.fresh:  # The leader has no lines.
                self.metrics_tail.adopt([own.metrics_tail for own in agreed.reports])
            state = replace(state, microbatches_read=agreed.microbatches_read)
            if agreed.restores_checkpoint:
                group, state = self._roll_back(group, setup, state)
                generation = group.generation
            self._write(group, setup)
            if group.index == 0:
                # Only after the exchange: a suspended leader may resume when another host
                # already leads.
                is_own = self._last_led == generation.number - 1
                truncate = partial(truncate_run, config, generation.step, is_own=is_own)
                retry(folder, truncate)
                self._last_led = generation.number
                self.metrics_tail.flush_to(folder)
            copies = (*state.remains.copies, *read_left_out_stages(config, group))
            remains = RecoverySources(copies, agreed.squared_norms, agreed.optimizer_updates)
            session = Session(self._run, group, setup, replace(state, remains=remains))
        if group.index == 0:
            total = max(group.count, self._membership.count)
            log.info(
                f"{generation.cause}{describe_rebuilds(generation)}; {group.count} of {total} "
                f"hosts continue from step {generation.step} (paused for "
                f"{time.monotonic() - since_s:.1f} s){describe_rollback(generation, done)}"
            )
        return self._replanned(session)

    def _replanned(self, session: Session) -> Session:
        """Add the callbacks that search for a better plan, if `replan` is configured.

        Hosts that do not lead only warm up the planner, as they may have to lead later.
        """
        config, group, schedule = self._config, session.group, session.schedule
        # Several plans would each need a different placement.
        is_only = len(schedule.plans) == 1
        # A search does not support stages that are left out.
        moves = not group.generation.left_out
        if config.replan.budget_s and moves and is_only:
            current, own, host_of = schedule.plans[OWN], self._setup.plan, self._host_of
            session.add_callback(PlannerWarmup(self._planner, current, group.index))
            if group.index == 0:
                arguments = current, own, host_of, self._planner, self._membership.control.tell
                session.add_callback(Replanner(config, group, self.plans, *arguments))
        return session

    def _require_text(self, group: Group, agreed: SessionPlan) -> None:
        """Check that all hosts that serve a data node have the text that the run reads.

        Raises:
            GenerationEnded: if not; other hosts then serve the data nodes in the next generation.
            InputError: if this host lacks the text, and there is no other stage.
        """
        if not agreed.without_text:
            return
        if group.index in agreed.without_text:
            config = self._config
            problem = "its text differs from the training text of the run"
            if len(group.generation.placement) == 1:
                remedy = "Copy the files of another host to this host"
                raise InputError("data.source", config.data.source, problem, remedy)
            log.warning(
                f"data.source = {config.data.source!r}: {problem}; this host serves only stages "
                "that need no text"
            )
            self._setup = replace(self._setup, data=None, held_out=())
            self._membership.control.tell(TextMissing(), Tick())  # Notify the others at once.
        raise GenerationEnded

    def _agreed(
        self, group: Group, state: HeldState, endpoint: Mapping[str, Any], *, serves_data: bool
    ) -> SessionPlan:
        """Exchange reports with the group, and return the session plan."""
        # Node numbers of the run's own plan, which are valid in every generation.
        own_host = self._membership.index
        nodes = [node for node, host in enumerate(self._host_of) if host == own_host]
        report = own_report(
            self._setup,
            member=group.here() | {"nodes": nodes},
            serves_data=serves_data,
            run_fingerprint=self._inviting.text,
            endpoint=endpoint,
            microbatches_read=state.microbatches_read,
            restores_checkpoint=state.restores_checkpoint,
            squared_norms=state.remains.squared_norms,
            optimizer_updates=state.remains.updates,
            measured=JoinMeasurements.kept(self._run.run_dir),
            known_plans=self.plans.names,
            recovery=self.recoveries.pending(),
            metrics_tail=self.metrics_tail.snapshot() if 0 in group.fresh else [],
        )
        agreed = exchange_reports(group, report, group.timeout_s)
        self._invite(group, agreed)
        return agreed

    def _invite(self, group: Group, agreed: SessionPlan) -> None:
        """Offer joiners the places of a new group."""
        serves = partial(stages_for, self._rules, group.generation)
        self._inviting.entered(group.generation, serves, agreed.data_fingerprint)
        join_server = self._membership.join_server
        join_server.make_offer, join_server.has_ended = self._inviting.offer, False

    def _roll_back(
        self, group: Group, setup: RunSetup, state: HeldState
    ) -> tuple[Group, HeldState]:
        """Return the group and the state of this host after a rollback to a checkpoint.

        The checkpoint is the newest that is intact on all hosts. If it is older than the one that
        was decided, all hosts go back to it.
        """
        config, number = self._config, group.generation.number
        folder, is_fresh = self._run.run_dir, group.index in group.fresh
        of_stages = parts_to_restore(config, setup)
        step, checkpoint = rewind(
            folder,
            group,
            group.generation.step,
            parts=None if is_fresh else lambda found: {*of_stages(found), DATA},
            require_leads=lambda: RunDir(folder).require_leads(number),
            mirror=setup.mirror,
            timeout_s=group.timeout_s,
        )
        is_older = step < group.generation.step
        if is_older:
            group = group.gone_back(step)
            self._tell(Signal.ROLLED_BACK)
            state = replace(state, step=step)
            self.metrics_tail.drop_after(step)
            self.recoveries.rolled_back(step)
        # In outer mode, transfers in progress are restored from the checkpoint or the held state.
        is_outer = config.averaging.is_outer
        if checkpoint is not None and (state.restores_checkpoint or is_older or is_outer):
            read = int(load_data_state(checkpoint)["microbatches"])
            remains = NO_RECOVERY_SOURCES if is_older else state.remains
            state = HeldState(step, read, {}, checkpoint, remains=remains)
        own = state.microbatches_read
        read = from_host_0(group, "checkpoint/read", lambda: own, group.timeout_s)
        return group, replace(state, microbatches_read=read)

    def _write(self, group: Group, setup: RunSetup) -> None:
        """Write a line to membership.jsonl, on the leader."""
        if group.index == 0:
            self._lock.acquire(group.generation.start)
            members = [own.member for own in setup.agreed.reports]
            folder, line = self._run.run_dir, (group.generation, setup.plan, members)
            retry(folder, lambda: RunDir(folder).append_generation(*line))


def _cause_of(error: Exception) -> Cause:
    if isinstance(error, TransferTimeout):
        return Cause.TRANSFER
    if isinstance(error, PeerTimeout):
        return Cause.SILENCE
    # Hosts that continued may have removed a checkpoint that was being written without them.
    if isinstance(error, CheckpointFailed):
        return Cause.CHECKPOINT
    return Cause.TRANSFER if may_be_caused_by_peer(error) else Cause.OWN


def _compile_own_stages(config: Config, setup: HostSetup, here: int) -> None:
    """Compile ahead the stages of this host in the run's plan, so that the others need not wait."""
    if is_joined(Path(config.run_dir)):  # It compiled before it joined.
        return
    nodes = [node for node, host in enumerate(setup.host_of) if host == here]
    stages = {setup.plan.stage_of[node] for node in nodes}
    own = shardings_of_host(config, setup.plan.case, setup.host_of, here)
    compile_ahead(config, stages, len(setup.plan.stages), own, setup.plan.case)
