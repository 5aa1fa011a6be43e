"""One host of a run, by the command of users with a callback of a test.

python training_worker.py CALLBACK ARGUMENTS OF skippipe train
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from skippipe_jax.cli.main import main
from skippipe_jax.config import Config
from skippipe_jax.connections.addresses import parse_address
from skippipe_jax.connections.severing import sever
from skippipe_jax.consensus.generations import PlanRequest
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.training import trainer
from skippipe_jax.training.callbacks.base import Callback, RunView
from skippipe_jax.training.elastic.runner import ElasticRunner
from skippipe_jax.training.metrics import CompilationCounter
from skippipe_jax.training.session import Session
from tests.harness.training_runs import by_name
from tests.sched.examples import plan_of

ACTS_AFTER = 4
FOUND = plan_of(
    [[0, 3], [1, 2]], [[0, 1], [3, 2], [0, 2], [3, 1]], path_length=2, microbatches_per_data_node=2
)
"""By it hosts 1 and 3 serve each other's stages."""


def acts(run: RunView, metrics: StepMetrics, index: int) -> bool:
    """Whether now is when the host of this index in the first generation does something."""
    is_first = metrics.step == ACTS_AFTER and metrics.generation == 1
    return is_first and run.group.index == index


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
    """Proposes another plan, as the leader."""

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        if acts(run, metrics, 0):
            own = cast(trainer.Trainer, run)
            assert isinstance(own._elastic, ElasticRunner)
            name = own._elastic.plans.keep(FOUND)
            assert name is not None
            own.membership.control.tell(PlanRequest(1, FOUND.stages, name))


class Cuts(Callback):
    """Cuts the connections for transfers of one host, while all hosts live."""

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        if acts(run, metrics, 1):
            servers = cast(trainer.Trainer, run).session._setup.transfers.servers
            sever([parse_address("", server.address()) for server in servers.values()])


class Counts(Callback):
    """Counts what is compiled in each session, from when it is open until its last step."""

    def __init__(self) -> None:
        self.counter = CompilationCounter(lambda _: None).__enter__()
        self.of_sessions: list[int] = []

    def opened(self) -> None:
        self.counter.take()
        self.of_sessions.append(0)

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        self.of_sessions[-1] = self.counter.compilations.count

    def on_train_end(self, run: RunView) -> None:
        host = run.group.hosts[run.group.index]
        (run.run_dir / f"compiled_{host}.json").write_text(json.dumps(self.of_sessions))


class Watched(trainer.Trainer):
    """A trainer with the callback."""

    callback: Callback

    def __init__(self, config: Config, callbacks: Sequence[Callback] = (), **given: Any):
        super().__init__(config, [*callbacks, self.callback], **given)

    def _adopt(self, session: Session) -> None:
        super()._adopt(session)
        if isinstance(self.callback, Counts):
            self.callback.opened()


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    Watched.callback = globals()[name]()
    trainer.Trainer = Watched
    sys.exit(main(["train", *words]))
