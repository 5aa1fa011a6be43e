"""Log of recoveries from a lost stage, with the training loss before and after."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from skippipe_jax.config.cluster import REWIND, SKIP
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.storage.files import retry
from skippipe_jax.storage.records import RecoveryRecord, StepMetrics
from skippipe_jax.storage.run_dir import RunDir
from skippipe_jax.training.callbacks.base import Callback, RunView


class RecoveryLog(Callback):
    """Writer of a line to recoveries.jsonl after the first step that follows a recovery.

    All hosts keep the pending line, as the leader that writes it may be lost.
    """

    def __init__(self, folder: Path):
        """Start without a pending line; `folder` is that of the run."""
        self._folder = folder
        self._begun: dict[str, Any] | None = None

    def begin_recovery(
        self,
        generation: Generation,
        policy: str,
        steps_done: int,
        loss: float | None,
        saved: Mapping[int, int] | None = None,
    ) -> None:
        """Record that a generation has lost stages, under `recovery.lost_stage: policy`.

        `steps_done` steps were committed before, the last with this `loss`. `saved` maps stages
        that are dropped or restored to the step of their state. If a recovery of an earlier
        generation is still pending, its values of before the loss are kept.
        """
        if self._begun is not None:
            steps_done, loss = self._begun["step_before"], self._begun["loss_before"]
        steps = {made.stage: made.step for made in generation.remade} | dict(saved or {})
        first = min(steps.values(), default=generation.step)
        by = generation.remade[0].by if generation.remade else REWIND
        by = SKIP if generation.left_out else by
        last = steps_done if by == REWIND else generation.step
        self._begun = {
            "generation": generation.number,
            "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "cause": generation.cause,
            "stages": list(generation.lost),
            "asked": policy,
            "by": by,
            "step_before": steps_done,
            "step": generation.step,
            "steps_old": max(0, last - first),
            "loss_before": loss,
            "loss_after": None,
        }

    def rolled_back(self, step: int) -> None:
        """Record a rollback to an earlier checkpoint than the generation had decided."""
        if self._begun is not None:
            steps_old = max(0, self._begun["step_before"] - step)
            self._begun = self._begun | {"step": step, "steps_old": steps_old}

    def forget(self) -> None:
        """Drop the pending line of this host, as the others have continued without it."""
        self._begun = None

    def pending(self) -> dict[str, Any] | None:
        """Return the pending line for the report to other hosts; None without one."""
        return self._begun

    def adopt(self, lines: Iterable[dict[str, Any] | None]) -> None:
        """Keep the line with the latest step before the loss: some hosts have made no step yet."""

        def known(line: Mapping[str, Any]) -> tuple[int, bool]:
            return line["step_before"], line["loss_before"] is not None

        self._begun = max((line for line in lines if line is not None), key=known, default=None)

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Write the pending line on the leader, if this is the first step after the recovery."""
        begun = self._begun
        if begun is None or metrics.step <= begun["step"]:
            return
        self._begun = None
        if run.group.index == 0:
            line = msgspec.convert(begun | {"loss_after": metrics.loss}, RecoveryRecord)
            retry(self._folder, lambda: RunDir(self._folder).append(line))
