"""One host of a run, as the real command trains; at its end its replicas are written as they are.

Its arguments are the folder for them, and those of `python -m skippipe_jax.train`.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from skippipe_sched.errors import run_command

from skippipe_jax.cli.arguments import (
    add_cluster_arguments,
    add_config_arguments,
    connect_from_args,
)
from skippipe_jax.config import load_config
from skippipe_jax.training.callbacks.base import Callback, RunView
from skippipe_jax.training.trainer import Trainer
from tests.training_runs import by_name


class Replicas(Callback):
    """Writes the state of every replica on this host when the run has ended."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on_train_end(self, run: RunView) -> None:
        self.folder.mkdir(exist_ok=True)
        stage_of = run.runtime.topology.stage_of
        for node, state in run.runtime.states.items():
            arrays: dict[str, Any] = by_name(state.to_save())
            np.savez(self.folder / f"stage{stage_of[node]}_node{node:03}.npz", **arrays)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("replicas", type=Path)
    add_config_arguments(parser)
    add_cluster_arguments(parser)
    arguments = parser.parse_args()
    return run_command(lambda: train(arguments))


def train(arguments: argparse.Namespace) -> int:
    config, folder = load_config(arguments.config, arguments.set), arguments.config.parent
    with connect_from_args(arguments, config) as host:
        callbacks = [Replicas(arguments.replicas)]
        trainer = Trainer(
            config, callbacks, host=host, resume=arguments.resume, config_folder=folder
        )
        result = trainer.run()
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
