"""One host of a run, by the command of users with a callback of a test.

python training_worker.py CALLBACK ARGUMENTS OF skippipe train
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from skippipe_jax.cli.main import main
from skippipe_jax.config import Config
from skippipe_jax.consensus.generations import PlanRequest
from skippipe_jax.program.compiler import Hop
from skippipe_jax.runtime.transport import HostLink
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.training import trainer
from skippipe_jax.training.callbacks.base import Callback, RunView
from skippipe_jax.training.elastic.runner import ElasticRunner
from tests.harness.training_runs import by_name
from tests.sched.examples import plan_of

FOUND = plan_of(
    [[0, 3], [1, 2]], [[0, 1], [3, 2], [0, 2], [3, 1]], path_length=2, microbatches_per_data_node=2
)
"""By it hosts 1 and 3 serve each other's stages."""


class Replicas(Callback):
    """Writes the state of every replica on this host at the end, into a folder beside the run's."""

    def on_train_end(self, run: RunView) -> None:
        folder = run.run_dir.with_name("replicas")
        folder.mkdir(exist_ok=True)
        stage_of = run.runtime.topology.stage_of
        for node, state in run.runtime.states.items():
            arrays: dict[str, Any] = by_name(state.to_save())
            np.savez(folder / f"stage{stage_of[node]}_node{node:03}.npz", **arrays)


class Plans(Callback):
    """Proposes another plan, as the leader of the first generation."""

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        if (metrics.step, metrics.generation, run.group.index) == (4, 1, 0):
            own = cast(trainer.Trainer, run)
            assert isinstance(own._elastic, ElasticRunner)
            name = own._elastic.plans.keep(FOUND)
            assert name is not None
            own.membership.control.tell(PlanRequest(1, FOUND.stages, name))


class LosesATransfer(Callback):
    """Requests a hop by a name that is not offered, on host 0 after step 4."""

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        if (metrics.step, metrics.generation, run.group.index) == (4, 1, 0):
            receive = HostLink.receive

            def lose(link: HostLink, hop: Hop, *more: Any) -> Any:
                HostLink.receive = receive
                return receive(link, Hop("lost", hop.source, hop.target), *more)

            setattr(HostLink, "receive", lose)  # noqa: B010


class Watched(trainer.Trainer):
    """A trainer with the callback."""

    callback: Callback

    def __init__(self, config: Config, callbacks: Sequence[Callback] = (), **given: Any):
        super().__init__(config, [*callbacks, self.callback], **given)


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    Watched.callback = globals()[name]()
    trainer.Trainer = Watched
    sys.exit(main(["train", *words]))
