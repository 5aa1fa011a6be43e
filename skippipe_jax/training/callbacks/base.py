"""Interface of callbacks, through which trackers, pictures and user code observe a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from skippipe_jax.cluster.membership import Group
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
    """Read-only view of a run for callbacks; `Trainer` implements it."""

    @property
    def config(self) -> Config:
        """Configuration of the run."""
        ...

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        ...

    @property
    def runtime(self) -> Runtime:
        """Runtime that runs the steps and holds the states of the stages."""
        ...

    @property
    def step(self) -> int:
        """Number of completed iterations, also those before a resume or with a skipped update."""
        ...

    @property
    def group(self) -> Group:
        """Hosts that train now, including this one: `index` 0 leads."""
        ...


class Callback:
    """Base class of callbacks: all hooks do nothing; override those that you need.

    With several hosts, every host calls the hooks of its own callbacks, at the same steps. After a
    rollback, steps are repeated. `run.group.index` is the rank of this host: 0 leads, and it may
    change; `run.group.hosts[run.group.index]` is its number.

    Raises:
        TypeError: if a subclass defines a hook by a former name, which would never be called.
    """

    def __init_subclass__(cls, **given: Any) -> None:
        """Raise TypeError for hooks with former names."""
        super().__init_subclass__(**given)
        for former, name in FORMER_HOOKS.items():
            if former in vars(cls):
                raise TypeError(f"{cls.__name__}.{former} is now {name}; see docs/api_runtime.md")

    def on_train_begin(self, run: RunView) -> None:
        """Handle the start of a session: all hosts are ready for the next step."""

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Handle the metrics of a completed step; metrics.jsonl holds them as a line.

        The next step has usually started by then, so that devices do not wait.
        """

    def on_validation_end(self, run: RunView, step: int, loss: float | None) -> None:
        """Handle the validation loss [nats per token] after `step`; None except on host 0."""

    def on_save(self, run: RunView, step: int) -> None:
        """Handle the start of the checkpoint of `step`, or that it exists; training continues.

        Called again for the same step if the checkpoint could not be written.
        """

    def on_train_end(self, run: RunView) -> None:
        """Handle the regular end of the run; its last checkpoint is complete."""

    def close(self) -> None:
        """Release resources, however the run has ended."""


class CallbackList:
    """Callbacks of a run on this host, in the order in which they are called.

    Attributes:
        of_run: built-in callbacks for the whole run, called at the start of each session.
        of_session: built-in callbacks of the current session; each session has its own.
        given: the user's callbacks.
    """

    def __init__(self, view: RunView, given: Sequence[Callback]):
        """Store `view`, which is passed to every hook."""
        self._view = view
        self.of_run: tuple[Callback, ...] = ()
        self.of_session: Sequence[Callback] = ()
        self.given = tuple(given)
        self._has_begun = False

    def __iter__(self) -> Iterator[Callback]:
        """Iterate over all callbacks."""
        return iter((*self.of_run, *self.of_session, *self.given))

    def begin_session(self, callbacks: Sequence[Callback]) -> None:
        """Set and start the callbacks of a session; the first session also starts those given."""
        self.of_session = callbacks
        given = () if self._has_begun else self.given
        self._has_begun = True
        for callback in (*self.of_run, *callbacks, *given):
            callback.on_train_begin(self._view)

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Pass the metrics of a step to all callbacks."""
        for callback in self:
            callback.on_step_end(self._view, metrics)

    def on_validation_end(self, step: int, loss: float | None) -> None:
        """Pass a validation loss to all callbacks."""
        for callback in self:
            callback.on_validation_end(self._view, step, loss)

    def on_save(self, step: int) -> None:
        """Pass the step of a checkpoint to all callbacks."""
        for callback in self:
            callback.on_save(self._view, step)

    def on_train_end(self) -> None:
        """Call all callbacks at the end of the run."""
        for callback in self:
            callback.on_train_end(self._view)

    def close(self) -> None:
        """Close the given callbacks if they have started; a session closes its own."""
        if self._has_begun:
            self._has_begun = False
            for callback in self.given:
                callback.close()
