"""Training with one fixed set of hosts: steps, metrics, validation, checkpoints.

Iteration i, counted from 0, leads to step i + 1: `step` is the number of completed iterations.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from skippipe_jax import log
from skippipe_jax.cluster.agreement import from_host_0, gather
from skippipe_jax.cluster.membership import Group, Membership
from skippipe_jax.config import Config
from skippipe_jax.config.cluster import AVERAGE, BUDDY, SKIP
from skippipe_jax.data.batches import Batch, ReadAhead
from skippipe_jax.errors import CheckpointFailed, GenerationEnded
from skippipe_jax.optim.update_rule import updates_made
from skippipe_jax.runtime.outer_steps import from_own_states
from skippipe_jax.runtime.runtime import Runtime, open_runtime
from skippipe_jax.runtime.stage_rebuild import NO_RECOVERY_SOURCES, RecoverySources
from skippipe_jax.runtime.state import Kept, from_checkpoint
from skippipe_jax.storage.checkpoint import Checkpoint, is_committed, step_folder
from skippipe_jax.storage.checkpointer import BEST_METRIC
from skippipe_jax.storage.files import retry
from skippipe_jax.storage.recording import save_recorded_plan
from skippipe_jax.storage.run_dir import RunDir
from skippipe_jax.training.callbacks.base import Callback, CallbackList
from skippipe_jax.training.callbacks.metrics_log import MetricsLog, TimelinePlotter
from skippipe_jax.training.callbacks.progress import HostStatus, ProgressBar, StatusUpdates
from skippipe_jax.training.callbacks.trackers import trackers_of_leader
from skippipe_jax.training.initial_weights import InitialWeights, open_initial_weights
from skippipe_jax.training.left_out_stages import states_of_left_out_stages
from skippipe_jax.training.metrics import CompilationCounter, MetricsCollector
from skippipe_jax.training.preemption import Preemption
from skippipe_jax.training.setup import (
    COPYING_S,
    RunSetup,
    close_on_error,
    open_checkpointer,
    restores_replica_states,
)
from skippipe_jax.training.validation import Validator, is_out_of_patience
from skippipe_jax.training.watchdog import Watchdog

PROFILE = "profile"
"""Folder of a run with the traces of JAX's profiler, for TensorBoard's profile page or Perfetto."""


@dataclass(frozen=True)
class RunContext:
    """Objects of a run that its sessions share.

    Attributes:
        config: the configuration of the run.
        run_dir: the folder of the run.
        membership: this host among all hosts of the run.
        callbacks: the callbacks of the run.
        compile_stats: the counter of compiled programs.
        preemption: the handler of the signals that tell this host to stop or to leave.
    """

    config: Config
    run_dir: Path
    membership: Membership
    callbacks: CallbackList
    compile_stats: CompilationCounter
    preemption: Preemption


@dataclass(frozen=True)
class HeldState:
    """State with which a host enters its next session.

    Attributes:
        step: number of completed iterations.
        microbatches_read: microbatches that the run has read before the next step.
        replicas: the states that it holds; None at the start of a run, before it has any.
        checkpoint: the checkpoint to load states from that are not held.
        restores_checkpoint: whether states come from the newest checkpoint that is intact on all
            hosts, which is still to be determined.
        remains: other state from which a lost stage can be rebuilt.
    """

    step: int
    microbatches_read: int
    replicas: Kept | None = None
    checkpoint: Checkpoint | None = None
    restores_checkpoint: bool = False
    remains: RecoverySources = NO_RECOVERY_SOURCES


def first_held_state(setup: RunSetup) -> HeldState:
    """Return the state with which a host starts or resumes a run."""
    step = 0 if setup.checkpoint is None else setup.checkpoint.step
    return HeldState(step, setup.agreed.microbatches_read, checkpoint=setup.checkpoint)


class Session:
    """Period of training with fixed hosts, which open it together.

    It is closed when a host is lost or joins, or when the run ends.

    Attributes:
        step: number of completed iterations.
        unfinished: whether validation and saving after the last iteration are still to be done.
        saved: whether the last iteration of the run is done and its checkpoint is complete.
        stop_signals: the hosts that received a signal to stop the run, once it is saved because
            of that; else None.
        out_of_patience: whether the run ends here because of `validation.patience`.
        group: the hosts that train, including this one.
        schedule: their plans, and the plan of each step.
        runtime: runs the steps and holds the states of the stages.
        microbatches_read: microbatches that the run has read before the next step.
        callbacks: the built-in callbacks of this session.
    """

    def __init__(self, run: RunContext, group: Group, setup: RunSetup, state: HeldState):
        """Start with the states that the hosts hold, restore, or take from each other."""
        config, generation = run.config, group.generation
        self._run, self._config, self._setup = run, config, setup
        self.group, self.schedule = group, setup.schedule
        self.step, self.saved = state.step, False
        # In a later generation some hosts may not have finished the last step, so all repeat that.
        self.unfinished = generation.number > 1 and generation.step > 0
        self.microbatches_read = state.microbatches_read
        # The results of an iteration are read when this many later ones have been dispatched, so
        # that devices have work while the host reads.
        self._metrics_lag = config.averaging.max_lag
        self._saved_step, self._attempt = -1 if self.unfinished else state.step, 1
        self._copied_step: int | None = None
        self.stop_signals: dict[int, signal.Signals] | None = None
        self._validation: tuple[int, float | None] = (-1, None)
        self._squared_norms = state.remains.squared_norms
        # Others may still fetch these states, until a step without them is committed.
        self._first_own_step = state.step + 1
        self._still_offered = dict(state.replicas or {})
        with close_on_error(setup.transfers), ExitStack() as opened:
            self.runtime = build_runtime(config, group, setup, state)
            opened.callback(self.runtime.close)
            self._open(opened)
            self._opened = opened.pop_all()  # No error: keep everything open.

    def _open(self, opened: ExitStack) -> None:
        """Open metrics, validation, data, checkpoints and callbacks, to be closed in reverse."""
        config, setup, runtime, group = self._config, self._setup, self.runtime, self.group
        self._metrics = MetricsCollector(config, self.schedule, runtime, self.step)
        self._validator = None
        if config.validation.every:
            count = setup.agreed.held_out_microbatches
            self._validator = Validator(config, setup.held_out, count, runtime, group)
        self._reader = None
        if setup.data is not None:
            self._reader = ReadAhead(setup.data.__getitem__)
            opened.enter_context(closing(self._reader))
        opened.enter_context(closing(self._metrics))
        cut = config.model.stage_partition(len(setup.plan.stages))
        self._checkpointer = open_checkpointer(config, group, cut, setup.mirror)
        skipped = self._metrics.skipped_updates
        self.callbacks = default_callbacks(self._run, group, self.step, skipped)
        self._watchdog_guard: Callable[[], AbstractContextManager[None]] = nullcontext
        if group.is_elastic:
            planned_s = max(plan.predicted.iteration_s for plan in self.schedule.plans.values())
            watched = runtime.exchange.loop, planned_s, config.network.deadline_s
            watchdog = Watchdog(*watched, self._run.membership.stop)
            self._watchdog_guard = opened.enter_context(closing(watchdog)).iteration
        for callback in self.callbacks:
            opened.callback(callback.close)
        opened.callback(runtime.close)  # Again: before the callbacks, if all has opened.
        # Closed first, so that a checkpoint in progress is completed even after an error.
        opened.enter_context(closing(self._checkpointer))
        self.out_of_patience = self._ask_patience("patience")

    def add_callback(self, callback: Callback) -> None:
        """Add a callback for the rest of this session."""
        self.callbacks.append(callback)
        self._opened.callback(callback.close)

    @property
    def stop_requested(self) -> bool:
        """True if a host was asked to stop, as of the last iteration read."""
        return self._metrics.asked_to_stop

    def export(self) -> HeldState:
        """Return the state of this host, including states of stages that it no longer serves."""
        topology, remains = self.runtime.topology, NO_RECOVERY_SOURCES
        replicas = self._still_offered | {
            (topology.stage_of[node], topology.sharding(node)): state
            for node, state in self.runtime.states.items()
        }
        if self._config.recovery.lost_stage in (BUDDY, AVERAGE, SKIP):
            norms = self._squared_norms
            norms = None if norms is None else tuple(np.asarray(norms).tolist())
            remains = RecoverySources(self.runtime.copies, norms, self._updates)
        return HeldState(self.step, self.microbatches_read, replicas, remains=remains)

    @property
    def _updates(self) -> int:
        """Number of updates that the optimizer has made."""
        return updates_made(next(iter(self.runtime.states.values())).optimizer_state)

    def train_step(self) -> None:
        """Run an iteration by its plan; record and profile it if it is due."""
        config, folder, iteration, step = self._config, self._run.run_dir, self.step, self.step + 1
        stop = self._run.preemption.votes_to_end()
        plan = self.schedule.plan(iteration)
        self._metrics.begin()
        profiling = nullcontext()
        if config.log.profiles(step):
            profiling = profile_step(self.runtime, folder, step, self.group.index)
        record = config.traces(iteration)
        if record and self.group.index == 0 and self.group.generation.number > 1:
            retry(folder, lambda: save_recorded_plan(folder, step, plan))
        with profiling, self._watchdog_guard():
            batches = self._batches(iteration)
            outcome = self.runtime.run(iteration, batches, stop=stop, record=record)
        if config.recovery.lost_stage == AVERAGE:
            self._squared_norms = outcome.sums().squared_norms
        if self.runtime.counts(self._first_own_step):
            self._still_offered.clear()
        self.microbatches_read += len(plan.microbatches)
        if (recording := outcome.recording) is not None:
            retry(folder, lambda: recording.save(folder, step, self.group.index))
        self._metrics.watch(step, outcome, self._run.compile_stats.take())
        self.step, self.unfinished, self.saved = step, True, False

    def _batches(self, iteration: int) -> dict[int, Batch]:
        """Read the batches of an iteration's microbatches whose data nodes are on this host.

        Microbatch m of an iteration is number `microbatches_read` + m of the run.
        """
        paths, read = self.schedule.plan(iteration).microbatches, self.microbatches_read
        if self._reader is None:
            return {}
        here = self.runtime.topology.nodes
        own = [microbatch for microbatch, path in enumerate(paths) if path[0] in here]
        batches = {microbatch: self._reader[read + microbatch] for microbatch in own}
        # Prefetch as for the same plan; under another one the rest is read on demand.
        self._reader.announce(read + len(paths) + microbatch for microbatch in own)
        return batches

    def finish_step(self) -> None:
        """Finish a step: emit its metrics, and validate and save if due.

        Raises:
            RunFailed: if its loss is not finite; then nothing is saved.
        """
        step, config = self.step, self._config
        validates = self._validator is not None and config.validates(step)
        saves = step % config.checkpoint.every == 0
        # Validating and saving wait for the parameters anyway, so all metrics are emitted before.
        self.emit_metrics(0 if validates or saves else self._metrics_lag)
        if validates and self._validator is not None:
            self._validation = step, self._validator.evaluate(step)
            self._metrics.restart_clock()
            self._run.callbacks.on_validation_end(*self._validation)
            self.out_of_patience = self._ask_patience(f"patience/{step}")
        if saves:
            self._save(step)
        self.unfinished = False

    def _ask_patience(self, name: str) -> bool:
        """Return whether `validation.patience` ends the run, by the losses the leader wrote."""
        patience, run_dir = self._config.validation.patience, RunDir(self._run.run_dir)
        if patience is None:
            return False

        def is_out() -> bool:
            losses = retry(run_dir.path, run_dir.validation_losses)
            return is_out_of_patience(losses, patience)

        return from_host_0(self.group, name, is_out, self.group.timeout_s)

    def emit_metrics(self, lag: int = 0) -> None:
        """Pass the metrics of completed iterations to callbacks, except the last `lag`."""
        for metrics in self._metrics.completed(lag):
            # These include the session's callbacks: metrics.jsonl, trackers, the progress bar.
            self._run.callbacks.on_step_end(metrics)

    def save_final(self) -> None:
        """Emit all metrics; return when the last step is saved, and copied if configured."""
        self._run.preemption.must_stay = True
        self._run.membership.join_server.has_ended = True
        step = self.step
        self.emit_metrics()
        if self._saved_step != step:
            self._save(step)
        while not self._checkpointer.wait():
            self._save(step)
        if self._config.checkpoint.copy_to is not None and self._copied_step != step:
            # If the leader is lost during the copy, the next leader continues it.
            name, complete = f"copied/{step}", self._checkpointer.complete_copy
            from_host_0(self.group, name, complete, COPYING_S)
            self._copied_step = step  # A group uses a message name only once.
        if self.stop_requested and self.stop_signals is None:
            group = self.group
            signals = gather(
                group, "stopped_by", lambda: self._run.preemption.received, group.timeout_s
            )
            self.stop_signals = {
                group.hosts[rank]: signal.Signals(number)
                for rank, number in signals.items()
                if number is not None
            }
        self.saved = True

    def _save(self, step: int) -> None:
        """Start the checkpoint of a step unless it exists; also retry one that was not written."""
        self._attempt = self._attempt + 1 if step == self._saved_step else 1
        self._saved_step, folder = step, self._run.run_dir

        def exists() -> bool:
            return is_committed(step_folder(folder, step))

        group = self.group
        if group.is_elastic and from_host_0(
            group, f"saves/{step}/{self._attempt}", lambda: retry(folder, exists), group.timeout_s
        ):
            group.saved(step)
        else:
            self._begin_checkpoint(step)
        self._run.callbacks.on_save(step)

    def _begin_checkpoint(self, step: int) -> None:
        items = self.runtime.checkpoint_items(step)
        data = self._data_state(step, items.stages)
        left_out = self.group.generation.left_out
        if left_out and self.group.index == 0:
            count = len(self._setup.plan.stages)
            kept, ages = states_of_left_out_stages(self._config, count, left_out, self._updates)
            items = replace(items, stages={**items.stages, **kept}, stale_stages=ages)
        validated, loss = self._validation
        metrics = {}
        if validated == step and loss is not None and math.isfinite(loss):
            metrics = {BEST_METRIC: loss}
        self._checkpointer.save(step, items, data, metrics)

    def _data_state(self, step: int, stages: Collection[int]) -> dict[str, Any] | None:
        """Return the position in the data on the host that saves stage 0, one of these `stages`."""
        data, source_of = self._setup.data, self.runtime.given.source_of
        state = None if data is None else data.state(self.microbatches_read)
        if 0 in source_of:
            group, source = self.group, source_of[0]
            states = gather(
                group, f"data/{step}/{self._attempt}", lambda: state, group.timeout_s, [source]
            )
            state = states[source]
        return state if 0 in stages else None

    def abandon(self) -> None:
        """Close the session although other hosts have left; drop a checkpoint in progress."""
        with suppress(GenerationEnded, CheckpointFailed):
            self._checkpointer.wait()
        self.close()
        self.runtime.let_go()
        self._setup.transfers.close()

    def close(self) -> None:
        """Close the session, after completing the last checkpoint."""
        self._opened.close()


def default_callbacks(
    run: RunContext, group: Group, step: int, skipped_updates: int
) -> list[Callback]:
    """Open the built-in and the configured callbacks, most of them on host 0 only.

    The session starts after `step`, before which `skipped_updates` updates were skipped.
    """
    updates = StatusUpdates(run.membership.show)
    if group.index != 0:
        return [updates, HostStatus(run.config.train.steps)]
    config, folder, hosts = run.config, run.run_dir, run.membership.count
    is_new = group.generation.number > 1
    return [
        updates,
        MetricsLog(folder),
        *trackers_of_leader(config, folder, step, is_new=is_new),
        ProgressBar(config, hosts, step, skipped_updates),
        *([] if config.trace == "never" else [TimelinePlotter()]),
    ]


def build_runtime(config: Config, group: Group, setup: RunSetup, state: HeldState) -> Runtime:
    """Open the stages of this host with their states; all hosts call this together.

    Held states are reused, lost stages are rebuilt from `remains`, and the others come from the
    checkpoint or are initialized.

    Raises:
        InputError: if they cannot be read, or this host reads other weights than other hosts.
    """
    checkpoint, replicas = state.checkpoint, state.replicas
    cut = config.model.stage_partition(len(setup.plan.stages))
    # A run that stopped before its first checkpoint restarts from the initial weights.
    is_begun = checkpoint is not None or replicas is not None
    weights = None if is_begun else setup.weights or open_initial_weights(config)
    first = None if weights is None else InitialWeights(weights, cut, are_compared=group.count > 1)
    origin = first and first.read
    own_origin = None
    if checkpoint is not None:
        origin = from_checkpoint(checkpoint, cut)
        if restores_replica_states(config, setup.plan, checkpoint):
            own_origin = from_own_states(checkpoint, config, cut)
        elif _replicas_diverged(config, checkpoint) and group.index == 0:
            log.output(
                "replicas resume from the outer parameters: their number or averaging has changed, "
                "or the checkpoint does not hold all of them"
            )
    kinds = [own.device_kinds for own in setup.agreed.reports]
    inputs = setup.schedule, setup.programs, setup.host_of, kinds
    states = origin, replicas, state.remains, own_origin
    serving = [{setup.host_of[node] for node in nodes} for nodes in setup.plan.stages]
    ready = None if first is None else first.compared(config, group.index, serving)
    return open_runtime(config, *inputs, group, setup.transfers, *states, state.step, ready)


def _replicas_diverged(config: Config, checkpoint: Checkpoint) -> bool:
    """Return whether replicas differed when they were saved, or differ now."""
    averaging = config.averaging
    has_diverged = averaging.is_outer and checkpoint.step >= max(1, averaging.exact_steps)
    return has_diverged or checkpoint.record.replica_states is not None


@contextmanager
def profile_step(runtime: Runtime, run_dir: Path, step: int, host: int) -> Iterator[None]:
    """Trace the iteration that runs in the block into RUN/profile/STEP/host_H.

    The trace covers all device activity from the end of the previous iteration to the end of this
    one. Every dispatch is named after its operation, stage, node and microbatch; its kernels on the
    device have the name of the jitted function, which stages share.
    """
    options = jax.profiler.ProfileOptions()
    # Python calls would dominate the trace and slow down the iteration.
    options.python_tracer_level = 0

    def block() -> None:
        jax.block_until_ready([state.parameters for state in runtime.states.values()])

    folder = run_dir / PROFILE / f"{step:08d}" / f"host_{host}"
    block()
    runtime.operations.names_dispatches = True
    try:
        with (
            jax.profiler.trace(folder, profiler_options=options),
            jax.profiler.StepTraceAnnotation("iteration", step_num=step),
        ):
            yield
            block()
    finally:
        runtime.operations.names_dispatches = False
