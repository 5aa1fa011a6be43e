"""A host of a training that writes down what was compiled in each session after its opening."""

from __future__ import annotations

import json
import sys

from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.training.callbacks.base import Callback, RunView
from skippipe_jax.training.compilations import CompilationCounter
from skippipe_jax.training.session import Session
from skippipe_jax.training.trainer import Trainer
from tests.multihost.replanning_worker import main


class Counts(Callback):
    """Counts from when a session is open until its last step."""

    trainer: Trainer

    def __init__(self, counter: CompilationCounter):
        self.counter = counter
        self.of_sessions: list[int] = []

    def opened(self) -> None:
        self.counter.take()
        self.of_sessions.append(0)

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        self.of_sessions[-1] = self.counter.compilations.count

    def on_train_end(self, run: RunView) -> None:
        host = run.group.hosts[run.group.index]
        (run.run_dir / f"compiled_{host}.json").write_text(json.dumps(self.of_sessions))


if __name__ == "__main__":
    with CompilationCounter(lambda _: None) as counter:
        counts, adopt = Counts(counter), Trainer._adopt

        def adopted(self: Trainer, session: Session) -> None:
            adopt(self, session)
            counts.opened()

        Trainer._adopt = adopted
        sys.exit(main(counts))
