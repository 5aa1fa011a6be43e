"""How a run goes, from its configuration to its last checkpoint; read `setup` beside this.

settle -> open the stages -> step, step, validate, step, save ... -> last checkpoint -> end
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from skippipe_jax.cluster.board import TeamEnded
from skippipe_jax.cluster.ending import Phase
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.cluster.team import Team
from skippipe_jax.config import Config
from skippipe_jax.program.schedule import Schedule
from skippipe_jax.runtime.compilation import keep_programs
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.storage.joined_folder import is_joined
from skippipe_jax.storage.retrying import temporary_failures
from skippipe_jax.training.beginning import begin
from skippipe_jax.training.callback import Callback
from skippipe_jax.training.departure import Departure, HasLeft
from skippipe_jax.training.messages import on_host_0, say_meanwhile
from skippipe_jax.training.progress import CompilationCounter
from skippipe_jax.training.report import exchange_reports
from skippipe_jax.training.setup import own_report
from skippipe_jax.training.signals import STOPPING, stop_signals
from skippipe_jax.training.stretch import Stretch
from skippipe_jax.training.survival import Survival


@dataclass(frozen=True)
class Ending:
    """How a run ended: after which step, and which signal cut it short, if one did.

    It goes on where this host `has_left` it alone.
    """

    step: int
    cut_short_by: signal.Signals | None
    has_left: bool = False


class Trainer:
    """Trains as a configuration says: `Trainer(config).run()`, or step by step.

    In a `with` block, what has been trained is saved at the end of the block, unless an error ends
    it. Several hosts make a trainer each, with the same configuration, and call the same methods in
    the same order.

    Attributes:
        config: what the run is told.
        folder: the folder that the run writes.
        callbacks: those of the project once the run is set up, then those that were given.
        steps_done: of the run, those before it was resumed among them.
        membership: this host among all those that the run was started with.
        departure: of this host, if it is told to leave.
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
        """Do nothing yet.

        Args:
            config: what the run is told.
            callbacks: what follows it besides its metrics, trackers and pictures.
            host: this one among several, as `joined` gives it; by default it is alone.
            resume: go on from the last checkpoint in `run_dir`.
            config_folder: where the link table of a case inside the configuration lies.
        """
        self.config = config
        self.membership = Membership(config.cluster, index=0, count=1) if host is None else host
        self.departure = Departure(self.membership, config.cluster.grace_s)
        self.folder = Path(config.run_dir)
        self.callbacks = self._given_callbacks = tuple(callbacks)
        self._open_callbacks: tuple[Callback, ...] = ()
        self.steps_done = 0
        self._is_alone = host is None
        self._resume = resume
        self._config_folder = config_folder
        self._stretch: Stretch | None = None
        self._survival: Survival | None = None
        # What outlives the steps: the hold on the folder, and what counts compilations.
        self._holding = ExitStack()
        self._has_ended = False
        self._received: list[signal.Signals] = []

    def __enter__(self) -> Trainer:
        """Set up when the first step is taken, or by `setup`."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Bring the run to its end, unless an error ends it, and let go of everything."""
        try:
            if kind is None:
                self._end()
        finally:
            self.close()

    @property
    def host(self) -> Membership | Team:
        """This host among those of the run, or of those that are left of it."""
        return self.membership if self._stretch is None else self._stretch.host

    @property
    def schedule(self) -> Schedule:
        """The plans of the run, and which step takes which, once it is set up."""
        return self._set_up_stretch.schedule

    @property
    def runtime(self) -> Runtime:
        """What runs the steps, with the state of the stages, once it is set up."""
        return self._set_up_stretch.runtime

    def run(self) -> Ending:
        """Train to the last step, or until SIGINT or SIGTERM asks a host to stop.

        Returns when the last checkpoint is written, or when the other hosts go on without this one,
        which SIGTERM has told to leave. A second signal raises KeyboardInterrupt.

        Raises:
            InputError: before the first step, if the configuration, the plan, the data or the
                checkpoint cannot be used; later, if the loss is no finite number any more.
        """
        try:
            with self:
                self.setup()
                with stop_signals(_heeded(self.folder), self.departure.receive) as self._received:
                    while not self.is_over:
                        self.step()
                    self._save_the_last()
        except HasLeft:
            return Ending(self.steps_done, signal.SIGTERM, has_left=True)
        # A run that is resumed after its last step has nothing left to do.
        if self.steps_done >= self.config.train.steps:
            return Ending(self.steps_done, None)
        # All hosts stop when one is asked to; those that were not asked stop as if they had been.
        by = self._received[0] if self._received else signal.SIGTERM
        return Ending(self.steps_done, by)

    def setup(self) -> None:
        """Make everything ready for the first step; `run` and `step` do so where it is not yet."""
        if self._stretch is not None:
            return
        if self._is_alone:
            keep_programs(self.config.compilation_cache)
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    def _set_up(self) -> None:
        config, host = self.config, self.membership
        given = {"resume": self._resume, "config_folder": self._config_folder}
        beginning = begin(config, host, self._holding, **given)
        self.steps_done = beginning.step
        counter = CompilationCounter(on_host_0(host.index, say_meanwhile))
        self._compilations = self._holding.enter_context(counter)
        settled, checkpoint, read = beginning.settled, beginning.checkpoint, beginning.read
        if host.count == 1 or host.is_distributed:
            timeout_s = config.cluster.connect_timeout_s
            agreed = exchange_reports(host, None, own_report(settled), timeout_s)
            stretch = Stretch(self, host, replace(settled, agreed=agreed), read, checkpoint)
        else:
            survival = self._holding.enter_context(closing(Survival(self, settled)))
            self._survival = survival
            comes_back = host.is_outside
            stretch = survival.come_back() if comes_back else survival.begin(host, checkpoint, read)
        self._take_up(stretch)
        self._begin_given()
        host.phase = Phase.TRAINING

    def _take_up(self, stretch: Stretch) -> None:
        """Go on with a stretch, in which all do once more what follows the step before."""
        self._stretch = stretch
        survival = self._survival
        kept = () if survival is None else (survival.lines, survival.recoveries)
        self.callbacks = (*kept, *stretch.callbacks, *self._given_callbacks)
        self._begin(stretch.callbacks)

    def _begin_given(self) -> None:
        self._open_callbacks = self._given_callbacks
        self._begin(self._given_callbacks)

    def _begin(self, callbacks: Sequence[Callback]) -> None:
        for callback in callbacks:
            callback.begin(self)

    @property
    def _set_up_stretch(self) -> Stretch:
        assert self._stretch is not None, "is set up"
        return self._stretch

    @property
    def is_over(self) -> bool:
        """Whether no step is left, or a host was asked to stop."""
        if self.steps_done >= self.config.train.steps:
            return True
        return self._stretch is not None and self._stretch.metrics.asked_to_stop

    def step(self) -> int:
        """Train one iteration, and validate and save if it is time; returns the steps done.

        Devices may still be at it on return; callbacks are told when they have ended.

        Raises:
            InputError: if the loss of the iteration before is no finite number.
            DeadlinePassed: if nothing came from another host for `network.deadline_s`.
            RuntimeError: if the run has ended.
        """
        if self._has_ended:
            raise RuntimeError("the run has ended; a trainer with resume=True goes on with it")
        self.setup()
        wanted = self.steps_done + 1
        while self.steps_done < wanted or not self._is_looked_after:
            self._act(self._go_on)
        return self.steps_done

    @property
    def _is_looked_after(self) -> bool:
        """Whether what follows the last step is done."""
        return self._set_up_stretch.looked_after == self.steps_done

    def _act(self, act: Callable[[], None]) -> None:
        """Act; where hosts are lost meanwhile, or come back, with those that are there then.

        Raises:
            TemporaryError: if the folder of the run cannot be used.
        """
        with temporary_failures(self.folder):
            if self._survival is None:
                return act()
            stretch = self._survival.going_on(act, self._set_up_stretch)
            if stretch is not self._stretch:
                self._take_up(stretch)

    def _go_on(self) -> None:
        """What comes next: an iteration, or what follows one."""
        step, stretch = self.steps_done, self._set_up_stretch
        if self._is_looked_after:
            stop = self.departure.ends_the_run(self._received)
            stretch.iterate(step, self._compilations.take, stop=stop)
            self.steps_done = step + 1
        else:
            stretch.look_after(step)

    def _save_the_last(self) -> None:
        """Report all steps and save the last one, with whatever hosts are left by then."""
        self.departure.is_too_late, is_saved = True, False

        def save() -> None:
            nonlocal is_saved
            self._set_up_stretch.save_the_last(self.steps_done)
            is_saved = True

        while not is_saved:
            self._act(save)
            # Hosts that are left may have gone back, and have steps to take again.
            while not is_saved and not (self.is_over and self._is_looked_after):
                self._act(self._go_on)

    def _end(self) -> None:
        """End a run as it should; all hosts come here together."""
        if self._has_ended or self._stretch is None:
            return
        self._has_ended = True
        self._save_the_last()
        # Whoever is lost now has done its part.
        with suppress(TeamEnded):
            for callback in self.callbacks:
                callback.end(self)
        self._end_steps()

    def close(self) -> None:
        """Let go of everything: the last checkpoint is written to its end, and no other begun."""
        try:
            with suppress(TeamEnded):
                self._end_steps()
        finally:
            self._holding.close()

    def _end_steps(self) -> None:
        """Close what is open as long as there are steps, and only once."""
        try:
            if self._stretch is not None:
                self._stretch.close()
        finally:
            callbacks, self._open_callbacks = self._open_callbacks, ()
            for callback in callbacks:
                callback.close()


def _heeded(folder: Path) -> Sequence[signal.Signals]:
    """Who interrupts a host that has joined means that host, and not the run."""
    return [signal.SIGTERM] if is_joined(folder) else STOPPING


def train(config: Config, host: Membership, *, resume: bool, config_folder: Path) -> Ending:
    """Train as one host of a run, as `Trainer.run` does."""
    return Trainer(config, host=host, resume=resume, config_folder=config_folder).run()
