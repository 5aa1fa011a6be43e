"""What may follow a run: trackers, pictures, or whatever its user wants to know or do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from skippipe_jax.cluster.group import Group
from skippipe_jax.config import Config
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.storage.records import StepMetrics

FORMER_HOOKS = {
    "begin": "on_train_begin",
    "after_step": "on_step_end",
    "after_validation": "on_validation_end",
    "after_save": "on_save",
    "end": "on_train_end",
}


class RunView(Protocol):
    """What a callback sees of a run, to be read only; `Trainer` is one."""

    @property
    def config(self) -> Config:
        """What the run is told."""
        ...

    @property
    def run_dir(self) -> Path:
        """The folder that the run writes."""
        ...

    @property
    def runtime(self) -> Runtime:
        """What runs the steps, with the state of the stages."""
        ...

    @property
    def step(self) -> int:
        """The iterations that are done, also those before a resume or with a skipped update."""
        ...

    @property
    def group(self) -> Group:
        """The hosts that train now, and this one among them: `index` 0 leads."""
        ...


class Callback:
    """Hooks of a run, which do nothing here: write over those that you need.

    Among several hosts every host calls the hooks of its own callbacks, at the same steps. After a
    rollback, steps come again. `run.group.index` is the rank of this host: 0 leads, and it may
    change; `run.group.hosts[run.group.index]` is its number.

    Raises:
        TypeError: if a class is defined with a hook by a former name, which nobody would call.
    """

    def __init_subclass__(cls, **given: Any) -> None:
        """Refuse hooks by former names."""
        super().__init_subclass__(**given)
        for former, name in FORMER_HOOKS.items():
            if former in vars(cls):
                raise TypeError(f"{cls.__name__}.{former} is now {name}; see docs/api_runtime.md")

    def on_train_begin(self, run: RunView) -> None:
        """Begin: all hosts are ready, and the next step follows."""

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Take the metrics of a step that has ended; metrics.jsonl has them as a line.

        Mostly the step after it is under way by then, so that devices do not wait.
        """

    def on_validation_end(self, run: RunView, step: int, loss: float | None) -> None:
        """Take the held-out loss [nats per token] after `step`, on host 0; None on the others."""

    def on_save(self, run: RunView, step: int) -> None:
        """Note that the checkpoint of `step` is being written, or exists; training goes on.

        It may be called again for the same step, if the checkpoint could not be written.
        """

    def on_train_end(self, run: RunView) -> None:
        """End: the run has ended as it should, and its last checkpoint is whole."""

    def close(self) -> None:
        """Let go of what was opened, however the run has ended."""


class CallbackList:
    """The callbacks of a run on this host, in the order in which they are told.

    Attributes:
        of_run: of the project, for the whole run; told of the beginning of each session.
        of_session: of the project, as long as the hosts are the same; each session brings its own.
        given: the user's.
    """

    def __init__(self, view: RunView, given: Sequence[Callback]):
        """Tell all of what they see of the run by `view`."""
        self._view = view
        self.of_run: tuple[Callback, ...] = ()
        self.of_session: Sequence[Callback] = ()
        self.given = tuple(given)
        self._has_begun = False

    def __iter__(self) -> Iterator[Callback]:
        """Iterate over all of them."""
        return iter((*self.of_run, *self.of_session, *self.given))

    def begin_session(self, callbacks: Sequence[Callback]) -> None:
        """Go on with the callbacks of a session; the first one begins those that were given."""
        self.of_session = callbacks
        given = () if self._has_begun else self.given
        self._has_begun = True
        for callback in (*self.of_run, *callbacks, *given):
            callback.on_train_begin(self._view)

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Tell all of a step."""
        for callback in self:
            callback.on_step_end(self._view, metrics)

    def on_validation_end(self, step: int, loss: float | None) -> None:
        """Tell all of a held-out loss."""
        for callback in self:
            callback.on_validation_end(self._view, step, loss)

    def on_save(self, step: int) -> None:
        """Tell all of a checkpoint."""
        for callback in self:
            callback.on_save(self._view, step)

    def on_train_end(self) -> None:
        """Tell all that the run has ended."""
        for callback in self:
            callback.on_train_end(self._view)

    def close(self) -> None:
        """Close those that were given, once they have begun; a session closes its own."""
        if self._has_begun:
            self._has_begun = False
            for callback in self.given:
                callback.close()
