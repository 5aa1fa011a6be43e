"""A host of a training whose connections for transfers are cut once, while all hosts live."""

from __future__ import annotations

import sys

from skippipe_jax.connections.addresses import parse_address
from skippipe_jax.connections.severing import sever
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.training.callbacks.base import Callback, RunView
from skippipe_jax.training.trainer import Trainer
from tests.multihost.replanning_worker import main

CUT_AFTER = 4
CUT_HOST = 1


class Cuts(Callback):
    """Cuts the connections of one host in the first generation."""

    trainer: Trainer

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        if metrics.step == CUT_AFTER and metrics.generation == 1 and run.group.index == CUT_HOST:
            servers = self.trainer.session._setup.transfers.servers
            sever([parse_address("", server.address()) for server in servers.values()])


if __name__ == "__main__":
    sys.exit(main(Cuts()))
