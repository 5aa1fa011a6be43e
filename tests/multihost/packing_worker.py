"""One host of a run as `training_worker` makes it, on documents packed at random places."""

import sys

import numpy as np

from skippipe_jax import trainer
from skippipe_jax.data import Batch, TrainingBatches
from tests.multihost import training_worker


class PackedBatches(TrainingBatches):
    """The microbatches of a text, each with marks that its number decides."""

    def __getitem__(self, number: int) -> Batch:
        batch = super().__getitem__(number)
        random = np.random.default_rng(number)
        return {**batch, "begins": random.random(batch["tokens"].shape) < 0.2}


if __name__ == "__main__":
    trainer.TrainingBatches = PackedBatches
    sys.exit(training_worker.main())
