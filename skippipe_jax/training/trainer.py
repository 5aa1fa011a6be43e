"""How a run goes, from its configuration to its last checkpoint; read `setup` beside this.

set up -> open a session -> train a step, finish it (validate, save), ... -> save the last -> end
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from skippipe_jax import log
from skippipe_jax.cluster.ending import Phase
from skippipe_jax.cluster.group import Group
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config
from skippipe_jax.errors import GenerationEnded, HostLeft
from skippipe_jax.program.schedule import Schedule
from skippipe_jax.runtime.compilation import keep_programs
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.storage.files import temporary_failures
from skippipe_jax.storage.joined_folder import is_joined
from skippipe_jax.storage.run_lock import RunLock
from skippipe_jax.training.callbacks.base import Callback, CallbackList
from skippipe_jax.training.callbacks.prometheus import PrometheusExporter
from skippipe_jax.training.compilations import CompilationCounter
from skippipe_jax.training.elastic.runner import ElasticRunner
from skippipe_jax.training.planning import with_plan
from skippipe_jax.training.preemption import STOPPING, Preemption
from skippipe_jax.training.session import RunContext, Session, SessionStart, first_state
from skippipe_jax.training.setup import HostSetup, setup_rejoining_host, setup_run


@dataclass(frozen=True)
class RunResult:
    """How a run ended: after which step, and which signal stopped it, if one did.

    Attributes:
        step: the last one.
        stopped_by: the signal, that of another host where this one had none.
        left_run: whether this host has left, and the others go on.
        told_to_stop: the hosts that were told to stop, by their numbers in the run, and how.
    """

    step: int
    stopped_by: signal.Signals | None
    left_run: bool = False
    told_to_stop: Mapping[int, signal.Signals] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """Return what a process that only trains ends with, as a shell has it of a signal."""
        return 0 if self.stopped_by is None else 128 + self.stopped_by

    @property
    def who_was_stopped(self) -> str:
        """Say which hosts were told to stop, and by what."""
        told = []
        for number, how in ((signal.SIGINT, "interrupted"), (signal.SIGTERM, "told to stop")):
            hosts = [str(host) for host, by in sorted(self.told_to_stop.items()) if by == number]
            if hosts:
                *others, last = hosts
                who = f"hosts {', '.join(others)} and {last} were" if others else f"host {last} was"
                told.append(f"{who} {how} ({number.name})")
        return " and ".join(told) or "a host that has gone was told to stop"


class Trainer:
    """Trains as a configuration says: `Trainer(config).run()`, or step by step.

    In a `with` block, what has been trained is saved at the end of the block, unless an error ends
    it. Several hosts make a trainer each, with the same configuration, and call the same methods in
    the same order.

    Attributes:
        config: what the run is told, with its plan.
        run_dir: the folder that the run writes.
        membership: this host among all those that the run was started with.
        preemption: whether this host was told to stop or to leave.
        callbacks: those of the project once the run is set up, and those that were given.
    """

    def __init__(
        self,
        config: Config,
        callbacks: Sequence[Callback] = (),
        *,
        host: Membership | None = None,
        resume: bool = False,
        config_folder: Path = Path(),
    ):
        """Store what is given; `setup`, `run` or `train_step` sets up.

        Args:
            config: what the run is told.
            callbacks: what follows it besides its metrics, trackers and pictures.
            host: this one among several, as `joined` gives it; by default it is alone.
            resume: go on from the last checkpoint in `run_dir`.
            config_folder: where the link table of a case inside the configuration lies.
        """
        self.membership = Membership(config.cluster, index=0, count=1) if host is None else host
        self.config, self.run_dir = with_plan(config, self.membership.count), Path(config.run_dir)
        self.preemption = Preemption(self.membership, config.cluster.grace_s)
        self.callbacks = CallbackList(self, callbacks)
        self._keeps_programs = host is None
        self._resume, self._config_folder = resume, config_folder
        # Opens other sessions where hosts are lost, or come back; None where they are fixed.
        self._elastic: ElasticRunner | None = None
        self._session: Session | None = None
        # What outlives sessions: the lock on the folder, the server of metrics, and what counts
        # compilations.
        self._resources = ExitStack()
        # The step after which the run ends: the last one, or an earlier one if a block is left.
        self._last_step = config.train.steps
        self._has_ended = False

    def __enter__(self) -> Trainer:
        """Return the trainer; nothing is set up yet."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Bring the run to its end, unless an error ends it, and let go of everything."""
        try:
            if kind is None:
                self._end()
        finally:
            self.close()

    @property
    def session(self) -> Session:
        """The run as long as its hosts are the same, once it is set up."""
        assert self._session is not None, "is set up"
        return self._session

    @property
    def group(self) -> Group:
        """This host among those of the run, or of those that are left of it."""
        return self.membership if self._session is None else self._session.group

    @property
    def schedule(self) -> Schedule:
        """The plans of the run, and which step takes which, once it is set up."""
        return self.session.schedule

    @property
    def runtime(self) -> Runtime:
        """What runs the steps, with the state of the stages, once it is set up."""
        return self.session.runtime

    @property
    def step(self) -> int:
        """The iterations that are done, also those before a resume or with a skipped update."""
        return 0 if self._session is None else self._session.step

    @property
    def finished(self) -> bool:
        """Tell whether no step is left, a host was asked to stop, or held-out loss has risen."""
        return self._session is not None and self.step >= self._end_of(self._session)

    def run(self) -> RunResult:
        """Train to the last step, or as far as `validation.patience` or a signal lets it.

        SIGINT or SIGTERM asks a host to stop.

        Returns when the last checkpoint is written, or when the other hosts go on without this one,
        which SIGTERM has told to leave. A second signal raises KeyboardInterrupt.

        Raises:
            InputError: before the first step, if the configuration, the plan, the data or the
                checkpoint cannot be used; later, if the loss is no finite number any more.
        """
        try:
            with self:
                self.setup()
                # On a host that has joined, SIGINT means that host, and not the run.
                heeded = [signal.SIGTERM] if is_joined(self.run_dir) else STOPPING
                with self.preemption.heeding(heeded):
                    self._advance(lambda session: session.saved)
        except HostLeft:
            return RunResult(self.step, signal.SIGTERM, left_run=True)
        # A run that is resumed after its last step has nothing left to do.
        if self.step >= self.config.train.steps or self.session.out_of_patience:
            return RunResult(self.step, None)
        # All hosts stop when one is asked to; those that were not asked end by the code of SIGTERM.
        number, told = self.preemption.received or signal.SIGTERM, self.session.told_to_stop
        return RunResult(self.step, number, told_to_stop=told or {})

    def train_step(self) -> int:
        """Train one iteration, and validate and save if it is time; returns the steps done.

        Devices may still be at it on return; callbacks are told when they have ended. Where no step
        is left, nothing is done.

        Raises:
            InputError: if a loss that was read is no finite number.
            PeerTimeout: if nothing came from another host for `network.deadline_s`, or too few
                hosts are left for `cluster.rejoin_s`.
            HostLeft: if this host was told to leave, and the others go on.
            RuntimeError: if the run has ended.
        """
        self.setup()
        wanted = self.step + 1

        def is_reached(session: Session) -> bool:
            return not session.unfinished and session.step >= min(wanted, self._end_of(session))

        self._advance(is_reached)
        return self.step

    def _advance(self, is_reached: Callable[[Session], bool]) -> None:
        """Train until that is reached; where hosts are lost meanwhile, or come back, with others.

        Raises:
            TemporaryError: if the folder of the run cannot be used.
        """
        while not is_reached(self.session):
            session, elastic = self.session, self._elastic
            with temporary_failures(self.run_dir):
                try:
                    if session.step < self._end_of(session) and not session.unfinished:
                        session.train_step()
                    elif session.unfinished:
                        session.finish_step()
                    else:
                        session.save_final()
                    continue
                except Exception as error:
                    if elastic is None or not elastic.outlives(error):
                        raise
                # Once the error is let go of, which holds what an iteration used. Maybe at an
                # earlier step.
                self._adopt(elastic.next_session())

    def _end_of(self, session: Session) -> int:
        """Return the step after which the run ends, as a session knows it."""
        ends_here = session.stop_requested or session.out_of_patience
        return min(session.step, self._last_step) if ends_here else self._last_step

    def setup(self) -> None:
        """Make everything ready for the first step; `run` and `train_step` do so if it is not.

        Raises:
            RuntimeError: if the run has ended, or this trainer is closed.
        """
        if self._has_ended:
            raise RuntimeError("the run has ended; a trainer with resume=True goes on with it")
        if self._session is not None:
            return
        if self._keeps_programs:
            keep_programs(self.config.compilation_cache)
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    def _set_up(self) -> None:
        config, host, resources = self.config, self.membership, self._resources
        if config.train.metrics_port is not None:
            exporter = resources.enter_context(closing(PrometheusExporter(config, host)))
            self.callbacks.of_run = (exporter,)
        counter = CompilationCounter(partial(log.on_leader, host.index))
        run = RunContext(config, self.run_dir, host, self.callbacks, counter, self.preemption)

        def elastic(setup: HostSetup) -> ElasticRunner:
            self._elastic = resources.enter_context(closing(ElasticRunner(run, setup)))
            return self._elastic

        if host.is_outside:
            setup = setup_rejoining_host(config, host)
            resources.enter_context(counter)
            with temporary_failures(self.run_dir):
                session = elastic(setup).rejoin()
        else:
            lock = resources.enter_context(RunLock(self.run_dir))
            given = {"resume": self._resume, "config_folder": self._config_folder}
            setup = setup_run(config, host, lock, **given)
            resources.enter_context(counter)
            if host.count == 1 or host.is_distributed:
                session = Session(run, SessionStart(host, setup, first_state(setup)))
            else:
                session = elastic(setup).open(setup)
        self._adopt(session)
        host.phase = Phase.TRAINING

    def _adopt(self, session: Session) -> None:
        """Go on with a session."""
        self._session = session
        self.callbacks.begin_session(session.callbacks)

    def _end(self) -> None:
        """End a run as it should; all hosts come here together."""
        if self._has_ended or self._session is None:
            return
        self._last_step = min(self.step, self._last_step)
        self._advance(lambda session: session.saved)
        self._has_ended = True
        # Whoever is lost now has done its part.
        with suppress(GenerationEnded):
            self.callbacks.on_train_end()
        self._end_steps()

    def close(self) -> None:
        """Let go of everything: the last checkpoint is written to its end, and no other begun."""
        self._has_ended = True
        try:
            with suppress(GenerationEnded):
                self._end_steps()
        finally:
            self._resources.close()

    def _end_steps(self) -> None:
        """Close what is open as long as there are steps, and only once."""
        try:
            if self._session is not None:
                self._session.close()
        finally:
            self.callbacks.close()
