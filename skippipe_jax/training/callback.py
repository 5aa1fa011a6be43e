"""What may follow a run: trackers, pictures, or whatever its user wants to know or do meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skippipe_jax.training.trainer import Trainer


class Callback:
    """Hooks of a run, which do nothing here: write over those that you need.

    Among several hosts every host calls the hooks of its own callbacks, at the same steps;
    `trainer.host.index` tells which host it is.
    """

    def begin(self, trainer: Trainer) -> None:
        """All hosts are ready, and the first step comes next: `trainer.steps_done` are done."""

    def after_step(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """A step has ended, and this is its line of metrics.jsonl.

        The step after it is under way by then, so that devices do not wait for who reads.
        """

    def after_validation(self, trainer: Trainer, step: int, loss: float | None) -> None:
        """The held-out loss [nats per token] after `step`, on host 0; None on the others."""

    def after_save(self, trainer: Trainer, step: int) -> None:
        """The checkpoint of `step` is being written; training goes on meanwhile."""

    def end(self, trainer: Trainer) -> None:
        """The run has ended as it should, and its last checkpoint is whole."""

    def close(self) -> None:
        """Let go of what was opened, however the run has ended."""
