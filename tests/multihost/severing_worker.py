"""A host of a training whose connections for transfers are cut once, while all hosts live."""

from __future__ import annotations

import argparse
import sys

from skippipe_sched.errors import run_command

from skippipe_jax.cli.arguments import (
    add_cluster_arguments,
    add_config_arguments,
    connect_from_args,
)
from skippipe_jax.cluster.ending import exit_at_once
from skippipe_jax.config import load_config
from skippipe_jax.connections.addresses import parse_address
from skippipe_jax.connections.severing import sever
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.training.callbacks.base import Callback, RunView
from skippipe_jax.training.trainer import Trainer

CUT_AFTER = 4
CUT_HOST = 1


class Cuts(Callback):
    """Cuts the connections of one host in the first generation."""

    trainer: Trainer

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        if metrics.step == CUT_AFTER and metrics.generation == 1 and run.group.index == CUT_HOST:
            servers = self.trainer.session._setup.transfers.servers
            sever([parse_address("", server.address()) for server in servers.values()])


def main() -> int:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    add_cluster_arguments(parser)
    arguments = parser.parse_args()
    return run_command(lambda: train(arguments))


def train(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.set)
    with connect_from_args(arguments, config) as host:
        cuts = Cuts()
        cuts.trainer = Trainer(config, [cuts], host=host, resume=arguments.resume)
        cuts.trainer.run()
    exit_at_once(0)  # As the command does where hosts are lost.


if __name__ == "__main__":
    sys.exit(main())
