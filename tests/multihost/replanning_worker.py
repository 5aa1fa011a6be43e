"""One host of a run, as the real command trains, whose leader finds another plan after a few steps.

By it hosts 1 and 3 serve each other's stages.
"""

import argparse
import sys
from typing import Any

from skippipe_sched.errors import run_command

from skippipe_jax.cli.arguments import (
    add_cluster_arguments,
    add_config_arguments,
    connect_from_args,
)
from skippipe_jax.cluster.ending import exit_at_once
from skippipe_jax.config import load_config
from skippipe_jax.consensus.generations import PlanRequest
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.training.callbacks.base import Callback, RunView
from skippipe_jax.training.elastic.runner import ElasticRunner
from skippipe_jax.training.trainer import Trainer
from tests.sched.examples import plan_of

PLAN = plan_of(
    [[0, 3], [1, 2]], [[0, 1], [3, 2], [0, 2], [3, 1]], path_length=2, microbatches_per_data_node=2
)
FOUND_AFTER = 4


class Finds(Callback):
    """Proposes the plan, as the leader of the first generation."""

    trainer: Trainer

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        if metrics.step == FOUND_AFTER and metrics.generation == 1:
            trainer, elastic = self.trainer, self.trainer._elastic
            assert isinstance(elastic, ElasticRunner)
            if run.group.index == 0:
                name = elastic.plans.keep(PLAN)
                assert name is not None
                trainer.membership.control.tell(PlanRequest(1, PLAN.stages, name))


def main(callback: Any) -> int:
    """Train as the command line says; the callback sees the trainer."""
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    add_cluster_arguments(parser)
    arguments = parser.parse_args()
    return run_command(lambda: train(arguments, callback))


def train(arguments: argparse.Namespace, callback: Any) -> int:
    config = load_config(arguments.config, arguments.set)
    with connect_from_args(arguments, config) as host:
        callback.trainer = Trainer(config, [callback], host=host, resume=arguments.resume)
        callback.trainer.run()
    exit_at_once(0)  # As the command does where hosts are lost.


if __name__ == "__main__":
    sys.exit(main(Finds()))
