"""Main loop of a run, from its configuration to its last checkpoint; see also `setup`.

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
from skippipe_jax.cluster.membership import Group, Membership
from skippipe_jax.config import Config
from skippipe_jax.errors import GenerationEnded, HostLeft
from skippipe_jax.program.schedule import Schedule
from skippipe_jax.runtime.compilation import enable_compilation_cache
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.storage.files import temporary_failures
from skippipe_jax.storage.joined_folder import is_joined
from skippipe_jax.storage.run_lock import RunLock
from skippipe_jax.training.callbacks.base import Callback, CallbackList
from skippipe_jax.training.callbacks.prometheus import PrometheusExporter
from skippipe_jax.training.elastic.runner import ElasticRunner
from skippipe_jax.training.metrics import CompilationCounter
from skippipe_jax.training.planning import with_plan
from skippipe_jax.training.preemption import STOPPING, Preemption
from skippipe_jax.training.session import RunContext, Session, first_held_state
from skippipe_jax.training.setup import HostSetup, setup_rejoining_host, setup_run


@dataclass(frozen=True)
class RunResult:
    """Result of a run: its last step, and the signal that stopped it, if any.

    Attributes:
        step: the last step.
        stopped_by: the signal that this host received, else SIGTERM for that of another host; None
            if no host was stopped.
        left_run: whether this host has left while the others continue.
        stop_signals: the signal of each host that was told to stop, by its number in the run.
    """

    step: int
    stopped_by: signal.Signals | None
    left_run: bool = False
    stop_signals: Mapping[int, signal.Signals] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 0, or 128 plus the signal as in a shell."""
        return 0 if self.stopped_by is None else 128 + self.stopped_by

    @property
    def stop_message(self) -> str:
        """Text that names the hosts that received a signal, and their signals."""
        received = []
        for number in (signal.SIGINT, signal.SIGTERM):
            hosts = [str(host) for host, by in sorted(self.stop_signals.items()) if by == number]
            if hosts:
                *others, last = hosts
                named = f"hosts {', '.join(others)} and {last}" if others else f"host {last}"
                received.append(f"{named} received {number.name}")
        return " and ".join(received) or "a host that has since exited received a signal"


class Trainer:
    """Trainer of a configuration: `Trainer(config).run()`, or step by step with `train_step`.

    A `with` block saves a checkpoint at its end, unless an error ends it. With several hosts, each
    makes a trainer with the same configuration, and all call the same methods in the same order.

    Attributes:
        config: the configuration of the run.
        run_dir: the folder of the run.
        membership: this host among all hosts of the run.
        preemption: the handler of the signals that tell this host to stop or to leave.
        callbacks: the given callbacks, and the built-in ones once the run is set up.
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
        """Store the arguments; `setup`, `run` or `train_step` sets up.

        Args:
            config: the configuration of the run.
            callbacks: callbacks in addition to the built-in metrics, trackers and pictures.
            host: this host among several, as `connect` returns it; by default a single host.
            resume: continue from the last checkpoint in `run_dir`.
            config_folder: the folder of the link table of a case inside the configuration.
        """
        self.membership = Membership(config.cluster, index=0, count=1) if host is None else host
        self.config, self.run_dir = with_plan(config, self.membership.count), Path(config.run_dir)
        self.preemption = Preemption(self.membership, config.cluster.grace_s)
        self.callbacks = CallbackList(self, callbacks)
        self._keeps_programs = host is None
        self._resume, self._config_folder = resume, config_folder
        # Opens new sessions when hosts are lost or join; None in runs with fixed hosts.
        self._elastic: ElasticRunner | None = None
        self._session: Session | None = None
        # Resources that outlive sessions: the lock on the folder, the metrics server and the
        # counter of compilations.
        self._resources = ExitStack()
        # The step after which the run ends; earlier than configured if a `with` block ends.
        self._last_step = config.train.steps
        self._has_ended = False

    def __enter__(self) -> Trainer:
        """Return the trainer, without setting up."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Save and end the run, unless an error ends it, and release all resources."""
        try:
            if kind is None:
                self._end()
        finally:
            self.close()

    @property
    def session(self) -> Session:
        """Current session, once the run is set up.

        Raises:
            RuntimeError: if it is not.
        """
        if self._session is None:
            raise RuntimeError("the run is not set up: call train_step() or run(), or use `with`")
        return self._session

    @property
    def group(self) -> Group:
        """Hosts that train now, including this one; before setup all hosts of the run."""
        return self.membership if self._session is None else self._session.group

    @property
    def schedule(self) -> Schedule:
        """Plans of the run, and the plan of each step, once the run is set up."""
        return self.session.schedule

    @property
    def runtime(self) -> Runtime:
        """Runtime with the states of the stages, once the run is set up."""
        return self.session.runtime

    @property
    def step(self) -> int:
        """Number of completed iterations, also those before a resume or with a skipped update."""
        return 0 if self._session is None else self._session.step

    @property
    def finished(self) -> bool:
        """True if no step is left, a host was asked to stop, or patience has run out."""
        return self._session is not None and self.step >= self._end_of(self._session)

    def run(self) -> RunResult:
        """Train to the last step, or until `validation.patience` or a signal ends the run.

        SIGINT or SIGTERM asks a host to stop.

        Returns when the last checkpoint is written, or when the other hosts continue without this
        one after SIGTERM told it to leave. A second signal raises KeyboardInterrupt.

        Raises:
            InputError: before the first step, if the configuration, the plan, the data or the
                checkpoint cannot be used; later, if the loss is not finite.
        """
        try:
            with self:
                self.setup()
                # On a host that joined by address, SIGINT ends this host, not the run.
                handled = [signal.SIGTERM] if is_joined(self.run_dir) else STOPPING
                with self.preemption.handling(handled):
                    self._advance(lambda session: session.saved)
        except HostLeft:
            return RunResult(self.step, signal.SIGTERM, left_run=True)
        # A run that is resumed after its last step has nothing to do.
        if self.step >= self.config.train.steps or self.session.out_of_patience:
            return RunResult(self.step, None)
        # All hosts stop when one is asked to; the others exit with the code of SIGTERM.
        number, signals = self.preemption.received or signal.SIGTERM, self.session.stop_signals
        return RunResult(self.step, number, stop_signals=signals or {})

    def train_step(self) -> int:
        """Train one iteration, validate and save if due, and return the number of completed steps.

        Devices may still compute on return; callbacks get the step when they are done. Does nothing
        if no step is left.

        Raises:
            InputError: if a loss is not finite.
            PeerTimeout: if nothing arrived from another host for `network.deadline_s`, or too few
                hosts were left for `cluster.rejoin_s`.
            HostLeft: if this host was told to leave and the others continue.
            RuntimeError: if the run has ended.
        """
        self.setup()
        target = self.step + 1

        def is_reached(session: Session) -> bool:
            return not session.unfinished and session.step >= min(target, self._end_of(session))

        self._advance(is_reached)
        return self.step

    def _advance(self, is_reached: Callable[[Session], bool]) -> None:
        """Train until `is_reached`; open a new session whenever hosts are lost or join.

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
                    if elastic is None or not elastic.recovers_from(error):
                        raise
                # Outside `except`, as the error keeps buffers of its iteration alive. The next
                # session may start at an earlier step.
                self._adopt(elastic.next_session())

    def _end_of(self, session: Session) -> int:
        """Return the step after which the run ends, given the state of a session."""
        ends_here = session.stop_requested or session.out_of_patience
        return min(session.step, self._last_step) if ends_here else self._last_step

    def setup(self) -> None:
        """Set up the run; `run` and `train_step` call this if needed.

        Raises:
            RuntimeError: if the run has ended or this trainer is closed.
        """
        if self._has_ended:
            raise RuntimeError(
                "the run has ended; create a Trainer with resume=True to continue it"
            )
        if self._session is not None:
            return
        if self._keeps_programs:
            enable_compilation_cache(self.config.compilation_cache)
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
            options = {"resume": self._resume, "config_folder": self._config_folder}
            setup = setup_run(config, host, lock, **options)
            resources.enter_context(counter)
            if host.count == 1 or host.is_distributed:
                session = Session(run, host, setup, first_held_state(setup))
            else:
                session = elastic(setup).open(setup)
        self._adopt(session)
        host.is_training = True

    def _adopt(self, session: Session) -> None:
        """Make a session the current one."""
        self._session = session
        self.callbacks.begin_session(session.callbacks)

    def _end(self) -> None:
        """Save the last step and end the run; all hosts call this together."""
        if self._has_ended or self._session is None:
            return
        self._last_step = min(self.step, self._last_step)
        self._advance(lambda session: session.saved)
        self._has_ended = True
        # The run is saved, so a host that is lost now does not matter.
        with suppress(GenerationEnded):
            self.callbacks.on_train_end()
        self._end_steps()

    def close(self) -> None:
        """Release all resources, after completing the last checkpoint; start no other."""
        self._has_ended = True
        try:
            with suppress(GenerationEnded):
                self._end_steps()
        finally:
            self._resources.close()

    def _end_steps(self) -> None:
        """Close the session and the callbacks."""
        try:
            if self._session is not None:
                self._session.close()
        finally:
            self.callbacks.close()
