"""How a run goes, from its configuration to its last checkpoint; read `setup` beside this.

settle -> open the stages -> step, step, validate, step, save ... -> last checkpoint -> end
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

from skippipe_jax.cluster.agreement import from_host_0
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config
from skippipe_jax.data.batches import Batch
from skippipe_jax.data.read_ahead import ReadAhead
from skippipe_jax.runtime.compilation import keep_programs
from skippipe_jax.storage import run_folder
from skippipe_jax.storage.newest_whole import prepare_run
from skippipe_jax.storage.reader import read_data_state
from skippipe_jax.training.callback import Callback
from skippipe_jax.training.callbacks import own_callbacks
from skippipe_jax.training.messages import on_host_0, say, say_meanwhile
from skippipe_jax.training.metrics import Metrics
from skippipe_jax.training.profiled_steps import profiled
from skippipe_jax.training.progress import CompilationCounter
from skippipe_jax.training.setup import (
    COPYING_S,
    data_config,
    go_on,
    open_stages,
    open_writer,
    parts_of,
    settle,
)
from skippipe_jax.training.signals import stop_signals
from skippipe_jax.training.validation import Validation

# The results of an iteration are read when this many later ones have been dispatched, so that
# devices have work while the host reads.
ITERATIONS_AHEAD = 1


@dataclass(frozen=True)
class Ending:
    """How a run ended: after which step, and which signal cut it short, if one did."""

    step: int
    cut_short_by: signal.Signals | None


class Trainer:
    """Trains as a configuration says: `Trainer(config).run()`, or step by step.

    In a `with` block, what has been trained is saved at the end of the block, unless an error ends
    it. Several hosts make a trainer each, with the same configuration, and call the same methods in
    the same order.

    Attributes:
        config: what the run is told.
        host: this host among those of the run.
        folder: the folder that the run writes.
        callbacks: those of the project once the run is set up, then those that were given.
        schedule: the plans of the run, and which step takes which, once it is set up.
        runtime: what runs the steps, with the state of the stages, once it is set up.
        steps_done: of the run, those before it was resumed among them.
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
        self.host = Membership(config.cluster, index=0, count=1) if host is None else host
        self.folder = Path(config.run_dir)
        self.callbacks = tuple(callbacks)
        self.steps_done = 0
        self._is_alone = host is None
        self._resume = resume
        self._config_folder = config_folder
        # What lives as long as there are steps, and the hold on the folder, which outlives them.
        self._stepping, self._holding = ExitStack(), ExitStack()
        self._is_set_up = self._has_ended = False
        self._is_stopping = False
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

    def run(self) -> Ending:
        """Train to the last step, or until SIGINT or SIGTERM asks a host to stop.

        Returns when the last checkpoint is written. A second signal raises KeyboardInterrupt.

        Raises:
            InputError: before the first step, if the configuration, the plan, the data or the
                checkpoint cannot be used; later, if the loss is no finite number any more.
        """
        with self:
            self.setup()
            with stop_signals() as self._received, self._stepping:
                while not self.is_over:
                    self.step()
                self._save_the_last()
        # A run that is resumed after its last step has nothing left to do.
        if self.steps_done >= self.config.train.steps:
            return Ending(self.steps_done, None)
        # All hosts stop when one is asked to; those that were not asked stop as if they had been.
        by = self._received[0] if self._received else signal.SIGTERM
        return Ending(self.steps_done, by)

    def setup(self) -> None:
        """Make everything ready for the first step; `run` and `step` do so where it is not yet."""
        if self._is_set_up:
            return
        if self._is_alone:
            keep_programs(self.config.compilation_cache)
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise
        self._is_set_up = True

    def _set_up(self) -> None:
        config, host, folder = self.config, self.host, self.folder
        given = {"resume": self._resume, "config_folder": self._config_folder}
        hold = self._holding.enter_context(run_folder.Hold(folder))
        settled = settle(config, host, hold, **given)
        self.schedule, data = settled.schedule, settled.data
        parts = parts_of(config, settled)
        checkpoint = prepare_run(folder, host, parts=parts, spare=settled.mirror)
        self.runtime = open_stages(config, host, settled, checkpoint)
        self._data, self._read = data, 0
        if checkpoint is not None:
            self.steps_done = checkpoint.step
            if data is not None:
                self._read = data.position(read_data_state(checkpoint))
        if host.index == 0 and self._resume:
            go_on(config, self.steps_done)
        self._saved_step = self.steps_done
        self._metrics = Metrics(config, self.schedule, self.runtime, self.steps_done)
        self._validation = None
        if config.validation.every:
            self._validation = Validation(config, data_config(config), self.runtime, host)
        self._reader = None if data is None else ReadAhead(data.__getitem__, config.data.prefetch)
        # What is opened last is closed first.
        if self._reader is not None:
            self._stepping.enter_context(closing(self._reader))
        self._stepping.enter_context(closing(self._metrics))
        cut = config.model.layers_of_stages(len(settled.plan.stages))
        self._writer = open_writer(config, host, cut, settled.mirror)
        own = own_callbacks(self, self._writer, self._metrics.skipped_updates)
        self.callbacks = (*own, *self.callbacks)
        for callback in self.callbacks:
            self._stepping.callback(callback.close)
        # Whatever happens in an iteration, the checkpoint before it is written to its end.
        self._stepping.enter_context(closing(self._writer))
        counter = CompilationCounter(on_host_0(host.index, say_meanwhile))
        self._compilations = self._stepping.enter_context(counter)
        for callback in self.callbacks:
            callback.begin(self)

    @property
    def is_over(self) -> bool:
        """Whether no step is left, or a host was asked to stop and replicas are equal."""
        if self.steps_done >= self.config.train.steps:
            return True
        return self._is_stopping and self.config.recipe.replicas_agree(self.steps_done)

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
        self._metrics.begin()
        self._iterate()
        step = self.steps_done
        if self._validation is not None and self.config.validation.validates(step):
            loss = self._validation.loss(step)
            self._metrics.validated(step, loss)
            for callback in self.callbacks:
                callback.after_validation(self, step, loss)
        saves = step % self.config.checkpoint.every == 0
        # Saving waits for the parameters anyway, and nothing is saved after a loss that is NaN.
        self._report(leave=0 if saves else ITERATIONS_AHEAD)
        if saves:
            self._save()
        return step

    def _iterate(self) -> None:
        """Run the next iteration by its plan; record and profile it if it is time."""
        iteration, config = self.steps_done, self.config
        step, batches = iteration + 1, self._batches()
        profiling = nullcontext()
        if config.log.profiles(step):
            profiling = profiled(self.runtime, self.folder, step, self.host.index)
        with profiling:
            stop, record = bool(self._received), config.traces(iteration)
            outcome = self.runtime.run(iteration, batches, stop=stop, record=record)
        if outcome.recording is not None:
            outcome.recording.save(self.folder, step, self.host.index)
        self.steps_done = step
        self._metrics.watch(step, outcome, self._compilations.take())

    def _batches(self) -> dict[int, Batch]:
        """The batches of the next iteration's microbatches whose data nodes are served here.

        Microbatch m of an iteration is number `_read` + m of the run.
        """
        first, paths = self._read, self.schedule.plan(self.steps_done).microbatches
        self._read += len(paths)
        if self._reader is None:
            return {}
        here = self.runtime.topology.nodes
        own = [microbatch for microbatch, path in enumerate(paths) if path[0] in here]
        batches = {microbatch: self._reader[first + microbatch] for microbatch in own}
        self._reader.announce(self._read + microbatch for microbatch in own)
        return batches

    def _report(self, leave: int = 0) -> None:
        """Tell callbacks of the iterations that have ended, all but the last `leave` of them."""
        for line in self._metrics.lines(leave):
            for callback in self.callbacks:
                callback.after_step(self, line)
        was_stopping, self._is_stopping = self._is_stopping, self._metrics.asked_to_stop
        every = self.config.recipe.average_parameters_every
        if self._is_stopping and not (was_stopping or self.is_over) and self.host.index == 0:
            say(
                f"asked to stop: ends when replicas have averaged, after {every} iterations at "
                "most; Ctrl-C: at once"
            )

    def _save(self) -> None:
        """Begin the checkpoint of the last step."""
        stages, data = self.runtime.owned_stages(), self._data
        # Whoever owns stage 0 serves a data node.
        state = data.state(self._read) if data is not None and 0 in stages else None
        self._writer.save(self.steps_done, stages, state)
        self._saved_step = self.steps_done
        for callback in self.callbacks:
            callback.after_save(self, self.steps_done)

    def _save_the_last(self) -> None:
        """Report all steps, and save the last one if replicas are equal after it."""
        self._report()
        agree = self.config.recipe.replicas_agree(self.steps_done)
        if agree and self._saved_step != self.steps_done:
            self._save()

    def _end(self) -> None:
        """End a run as it should; all hosts come here together."""
        if self._has_ended or not self._is_set_up:
            return
        self._has_ended = True
        with self._stepping:
            self._save_the_last()
        if self.config.checkpoint.copy_to is not None:
            from_host_0(self.host, "copied", lambda: None, COPYING_S)
        for callback in self.callbacks:
            callback.end(self)

    def close(self) -> None:
        """Let go of everything: the last checkpoint is written to its end, and no other begun."""
        try:
            self._stepping.close()
        finally:
            self._holding.close()


def train(config: Config, host: Membership, *, resume: bool, config_folder: Path) -> Ending:
    """Train as one host of a run, as `Trainer.run` does."""
    return Trainer(config, host=host, resume=resume, config_folder=config_folder).run()
