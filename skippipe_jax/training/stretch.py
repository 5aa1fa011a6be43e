"""A run as long as its hosts are the same: what runs its steps, and what follows each of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from skippipe_jax.cluster.agreement import from_host_0, gather
from skippipe_jax.cluster.board import TeamEnded
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.cluster.team import Team
from skippipe_jax.config.recovery import AVERAGE, BUDDY, SKIP
from skippipe_jax.data.batches import Batch
from skippipe_jax.data.read_ahead import ReadAhead
from skippipe_jax.optim.adamw import updates_made
from skippipe_jax.runtime.remaking import NO_REMAINS, Remains
from skippipe_jax.runtime.state import Kept
from skippipe_jax.runtime.transport import IN_A_TEAM_S
from skippipe_jax.storage.layout import Checkpoint, is_committed, step_folder
from skippipe_jax.storage.recording import keep_plan
from skippipe_jax.storage.retrying import retried
from skippipe_jax.storage.writer import NotCommitted
from skippipe_jax.training.callback import Callback
from skippipe_jax.training.callbacks import own_callbacks
from skippipe_jax.training.left_out import kept_stages
from skippipe_jax.training.metrics import Metrics, finite
from skippipe_jax.training.opening import open_stages
from skippipe_jax.training.profiled_steps import profiled
from skippipe_jax.training.progress import Compilations
from skippipe_jax.training.setup import COPYING_S, Settled, open_writer
from skippipe_jax.training.validation import Validation
from skippipe_jax.training.watchdog import Watchdog

if TYPE_CHECKING:
    from skippipe_jax.training.trainer import Trainer


class Stretch:
    """Opened by all hosts together after a step, and closed when one is lost or the run ends.

    Attributes:
        host: this one among them.
        schedule: their plans, and which step takes which.
        runtime: what runs the steps, with the state of the stages.
        metrics: what the steps come to.
        read: the microbatches that have been read before the next step.
        callbacks: those of the project, which are told together with those that were given.
        looked_after: the last step of which all is done that follows one.
        awaiting: the line of the last step, if hosts were lost, or came back, before it was
            validated: callbacks are told once it is.
    """

    def __init__(
        self,
        trainer: Trainer,
        host: Membership | Team,
        settled: Settled,
        read: int,
        checkpoint: Checkpoint | None,
        kept: Kept | None = None,
        remains: Remains = NO_REMAINS,
    ):
        """Begin after `trainer.steps_done`, with what the hosts have settled.

        States come from a checkpoint, or are `kept`, or are those that a run begins with; those of
        stages that were lost are made from what `remains` of them.
        """
        config, step = trainer.config, trainer.steps_done
        self.host = host
        # Where hosts were lost, or have come back, some may not have done what follows the step.
        self.looked_after = step if self.is_first else max(step - 1, 0)
        # The results of an iteration are read when this many later ones have been dispatched, so
        # that devices have work while the host reads.
        self._ahead = config.averaging.iterations_apart
        self._saved_step = step if self.is_first else -1
        self._copied_step: int | None = None
        self._validated_step = self.looked_after
        self.awaiting: Mapping[str, Any] | None = None
        self.schedule, self.read = settled.schedule, read
        self._trainer = trainer
        self._config, self._folder, self._data = config, trainer.folder, settled.data
        self._transfers = settled.transfers
        self._squared_norms = remains.squared_norms
        states = checkpoint, kept, remains
        self.runtime = open_stages(config, host, settled, *states, step=step)
        # Others may still take these, until a step counts that was made without them.
        self._first = step + 1
        self._given_up = dict(kept or {})
        try:
            with ExitStack() as opened:
                self._open(trainer, settled, opened)
                # What is open stays open, as nothing has failed.
                self._opened = opened.pop_all()
        except BaseException:
            self.runtime.close()
            if settled.transfers is not None:
                settled.transfers.close()
            raise

    def _open(self, trainer: Trainer, settled: Settled, opened: ExitStack) -> None:
        """Open what follows the steps; what is opened last is closed first."""
        config, data = self._config, settled.data
        self.metrics = Metrics(config, self.schedule, self.runtime, trainer.steps_done)
        self._validation = None
        if config.validation.every:
            assert settled.agreed is not None, "all hosts have reported"
            count = settled.agreed.held_out_microbatches
            given = settled.held_out, count, self.runtime, self.host
            self._validation = Validation(config, *given)
        self._reader = None if data is None else ReadAhead(data.__getitem__, config.data.prefetch)
        if self._reader is not None:
            opened.enter_context(closing(self._reader))
        opened.enter_context(closing(self.metrics))
        self._stages = len(settled.plan.stages)
        cut = config.model.layers_of_stages(self._stages)
        self._writer = open_writer(config, self.host, cut, settled.mirror)
        skipped = self.metrics.skipped_updates
        self.callbacks = own_callbacks(trainer, self.host, self._writer, skipped)
        self._watched: Callable[[], AbstractContextManager[None]] = nullcontext
        if isinstance(self.host, Team):
            planned_s = max(plan.predicted.iteration_s for plan in self.schedule.plans.values())
            given = self.runtime.exchange.loop, planned_s, config.network.deadline_s
            watchdog = opened.enter_context(closing(Watchdog(*given, trainer.membership.stop)))
            self._watched = watchdog.iteration
        for callback in self.callbacks:
            opened.callback(callback.close)
        opened.callback(self.runtime.close)
        # Whatever happens in an iteration, the checkpoint before it is written to its end.
        opened.enter_context(closing(self._writer))

    def follow(self, callback: Callback) -> None:
        """Tell one more callback, until this is closed."""
        self.callbacks.append(callback)
        self._opened.callback(callback.close)

    @property
    def kept(self) -> Kept:
        """The states that this host holds, those among them that it serves no longer."""
        topology = self.runtime.topology
        return self._given_up | {
            (topology.stage_of[node], topology.spread(node)): state
            for node, state in self.runtime.states.items()
        }

    @property
    def remains(self) -> Remains:
        """What this host has, beside states, to make a stage from that is lost."""
        if self._config.recovery.lost_stage not in (BUDDY, AVERAGE, SKIP):
            return NO_REMAINS
        norms = self._squared_norms
        return Remains(
            self.runtime.copies,
            None if norms is None else tuple(np.asarray(norms).tolist()),
            self._updates,
        )

    @property
    def _updates(self) -> int:
        """How many the optimizer has made."""
        return updates_made(next(iter(self.runtime.states.values())).optimizer_state)

    @property
    def is_first(self) -> bool:
        """Whether no host has been lost yet, and none has come back."""
        return not isinstance(self.host, Team) or self.host.generation.number == 1

    def iterate(
        self, iteration: int, compilations: Callable[[], Compilations], *, stop: bool
    ) -> None:
        """Run an iteration by its plan; record and profile it if it is time.

        `stop` tells all hosts that this one was asked to stop, and `compilations` tells those that
        an iteration takes.
        """
        config, step = self._config, iteration + 1
        self.metrics.begin()
        profiling = nullcontext()
        if config.log.profiles(step):
            profiling = profiled(self.runtime, self._folder, step, self.host.index)
        record = config.traces(iteration)
        if record and self.host.index == 0 and not self.is_first:
            plan = self.schedule.plan(iteration)
            retried(self._folder, lambda: keep_plan(self._folder, step, plan))
        with profiling, self._watched():
            batches = self._batches(iteration)
            outcome = self.runtime.run(iteration, batches, stop=stop, record=record)
        if config.recovery.lost_stage == AVERAGE:
            self._squared_norms = outcome.sums().squared_norms
        if self.runtime.counts(self._first):
            self._given_up.clear()
        self.read += len(self.schedule.plan(iteration).microbatches)
        if (recording := outcome.recording) is not None:
            retried(self._folder, lambda: recording.save(self._folder, step, self.host.index))
        self.metrics.watch(step, outcome, compilations())

    def _batches(self, iteration: int) -> dict[int, Batch]:
        """The batches of an iteration's microbatches whose data nodes are served here.

        Microbatch m of an iteration is number `read` + m of the run.
        """
        paths = self.schedule.plan(iteration).microbatches
        if self._reader is None:
            return {}
        here = self.runtime.topology.nodes
        own = [microbatch for microbatch, path in enumerate(paths) if path[0] in here]
        batches = {microbatch: self._reader[self.read + microbatch] for microbatch in own}
        self._reader.announce(self.read + len(paths) + microbatch for microbatch in own)
        return batches

    def look_after(self, step: int) -> None:
        """Validate and save after a step, if it is time, and tell callbacks of all there is."""
        trainer, config = self._trainer, self._config
        if self._validation is not None and config.validation.validates(step):
            loss = self._validation.loss(step)
            self.metrics.validated(step, loss)
            self._validated_step = step
            if self.awaiting is not None:
                line, self.awaiting = self.awaiting, None
                self._tell({**line, "validation_loss": finite(loss)})
            for callback in trainer.callbacks:
                callback.after_validation(trainer, step, loss)
        saves = step % config.checkpoint.every == 0
        # Saving waits for the parameters anyway, and nothing is saved after a loss that is NaN.
        self.report(leave=0 if saves else self._ahead)
        if saves:
            self._save(step)
        self.looked_after = step

    def save_the_last(self, step: int) -> None:
        """Report all steps, and return when the last one is saved, and copied if it shall be."""
        self.report()
        if self._saved_step != step:
            self._save(step)
        while not self._writer.wait():
            self._save(step)
        if self._config.checkpoint.copy_to is not None and self._copied_step != step:
            # If the leader is lost meanwhile, the next one goes on with it.
            from_host_0(self.host, f"copied/{step}", self._writer.complete_copy, COPYING_S)
            self._copied_step = step  # A team can tell only once what has this name.

    def report(self, leave: int = 0) -> None:
        """Tell callbacks of the iterations that have ended, all but the last `leave` of them.

        One that has yet to be validated awaits that.
        """
        config, metrics = self._config, self.metrics
        for line in metrics.lines(leave):
            if config.validation.validates(line["step"]) and line["step"] > self._validated_step:
                self.awaiting = line
            else:
                self._tell(line)

    def _tell(self, line: Mapping[str, Any]) -> None:
        for callback in self._trainer.callbacks:
            callback.after_step(self._trainer, line)

    def _save(self, step: int) -> None:
        """Begin the checkpoint of a step, unless it is there."""
        self._saved_step = step

        def is_there() -> bool:
            return is_committed(step_folder(self._folder, step))

        if isinstance(self.host, Team) and from_host_0(
            self.host, f"saves/{step}", lambda: retried(self._folder, is_there), IN_A_TEAM_S
        ):
            self.host.saved(step)
        else:
            self._begin_checkpoint(step)
        for callback in self._trainer.callbacks:
            callback.after_save(self._trainer, step)

    def _begin_checkpoint(self, step: int) -> None:
        stages = self.runtime.owned_stages() | self.runtime.given_stages(step)
        data, ages = self._data_state(step, stages), {}
        left_out = self.host.generation.left_out if isinstance(self.host, Team) else ()
        if left_out and self.host.index == 0:
            kept, ages = kept_stages(self._config, self._stages, left_out, self._updates)
            stages |= kept
        self._writer.save(step, stages, data, ages, *self.runtime.own_states(step))

    def _data_state(self, step: int, stages: Collection[int]) -> dict[str, Any] | None:
        """How far the data has been read, on the host that saves stage 0, one of these `stages`."""
        data, given = self._data, self.runtime.given
        state = None if data is None else data.state(self.read)
        if given is not None and 0 in given.source_of:
            source = given.source_of[0]
            state = gather(self.host, f"data/{step}", lambda: state, IN_A_TEAM_S, [source])[source]
        return state if 0 in stages else None

    def leave(self) -> None:
        """Close all of it although others have gone; a checkpoint that they have left is none."""
        with suppress(TeamEnded, NotCommitted):
            self._writer.wait()
        self.close()
        self.runtime.let_go()
        if self._transfers is not None:
            self._transfers.close()

    def close(self) -> None:
        """Close all of it; the last checkpoint is written to its end."""
        self._opened.close()
