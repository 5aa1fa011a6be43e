"""Writes the weights that a run begins with, each changed by a little, as a model to begin from.

Each weight is multiplied by one plus so much times a number from the standard normal distribution.
A run with `init_from: hf:DIR` then begins as the run of the configuration does, but for that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from skippipe_jax.config import Config, ModelConfig
from skippipe_jax.config.data import TOKENIZER_FOLDER
from skippipe_jax.interop import huggingface
from skippipe_jax.runtime.stage_functions import Parameters, functions_of_run
from skippipe_jax.storage.files import new_directory


def drawn(config: Config, stages: int) -> Callable[[int], Parameters]:
    """The first weights of a stage, by its number, as a run with so many stages draws them."""
    layers = config.model.stage_partition(stages)
    # By the run's own program: compiled otherwise, some would be rounded otherwise.
    functions = functions_of_run(config, stages)
    key = jax.random.key(config.seed)
    return lambda stage: functions[stage].create(key, layers.blocks(stage).start)[0]


def write(
    model: ModelConfig,
    stages: int,
    weights: Callable[[int], Parameters],
    changed_by: float,
    draw: int,
    target: Path,
) -> None:
    """Write the weights of all stages, changed as `draw` says, as a model.

    Raises:
        InputError: if `target` is not new.
    """

    def changed(stage: int) -> Parameters:
        random = np.random.default_rng([draw, stage])

        def change(leaf: jax.Array) -> np.ndarray:
            factors = 1 + changed_by * random.standard_normal(leaf.shape)
            return (np.asarray(leaf) * factors).astype(leaf.dtype)

        return jax.tree.map(change, weights(stage))

    with new_directory(target, "--output") as folder:
        huggingface.write_weights(folder, model, stages, changed, model.parameter_dtype)
        # The runs train on bytes, so there is no such folder, which says so.
        companions = folder / TOKENIZER_FOLDER
        described = huggingface.config_json(model, model.parameter_dtype, companions)
        (folder / huggingface.CONFIG).write_text(json.dumps(described), encoding="utf-8")
