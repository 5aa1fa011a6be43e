"""Held-out loss and perplexity of the full model of a run: every stage, in order.

python -m skippipe_jax.evaluate --run DIR
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from skippipe_sched import fields
from skippipe_sched.errors import InputError, run_command
from tqdm import tqdm

from skippipe_jax import run_folder
from skippipe_jax.checkpoint import open_checkpoint, read_stage
from skippipe_jax.config import Config
from skippipe_jax.data import held_out_batches, with_tokenizer_of_run
from skippipe_jax.marks import marked_tokens
from skippipe_jax.model import DataStage, ModelConfig, create_stage, stage_shapes

# The exponential of a greater loss is no float any more.
MOST_NATS = 700.0


@dataclass(frozen=True)
class Evaluation:
    """Mean cross-entropy in nats per token, its exponential, and over how many target tokens."""

    step: int
    loss: float
    perplexity: float
    tokens: int


def main() -> int:
    """Parse the command line and evaluate; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m skippipe_jax.evaluate",
        description="Held-out loss and perplexity of the full model: every stage, in order.",
    )
    parser.add_argument("--run", type=Path, required=True, help="the folder of a run")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the latest)")
    parser.add_argument(
        "--sequences", type=int, default=256, help="at most so many (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()

    def command() -> int:
        sequences = fields.integer(arguments.sequences, "--sequences", 1)
        found = evaluate_run(arguments.run, arguments.step, sequences)
        if arguments.json:
            print(json.dumps(asdict(found)))
        else:
            print(
                f"step {found.step}: held-out loss {found.loss:.4f} nats per token, perplexity "
                f"{found.perplexity:.3f}, over {found.tokens:,} tokens, all stages in order"
            )
        return 0

    return run_command(command)


def evaluate_run(folder: Path, step: int | None, sequences: int) -> Evaluation:
    """Evaluate a checkpoint of a run on at most `sequences` held-out sequences.

    Raises:
        InputError: if the folder holds no run or no such checkpoint, or it cannot be read, or the
            model in it has diverged.
    """
    config = run_folder.saved_config(folder, "--run")
    config = replace(config, data=with_tokenizer_of_run(config.data, folder))
    checkpoint = open_checkpoint(folder, step)
    # The run may have cut its model otherwise since.
    cut = checkpoint.stage_layers
    config = replace(config, model=replace(config.model, stage_layers=cut))
    parameters = [
        read_stage(checkpoint, cut, stage, {"parameters": shapes})["parameters"]
        for stage, shapes in enumerate(stage_shapes(config.model, len(cut)))
    ]
    loss, tokens = held_out_loss(config, parameters, sequences)
    if not loss < MOST_NATS:
        raise InputError(
            "--step",
            checkpoint.step,
            f"the loss of this checkpoint is {loss}: training had diverged",
            "Name an earlier step, or train again with a lower optimizer.learning_rate",
        )
    return Evaluation(checkpoint.step, loss, math.exp(loss), tokens)


def held_out_loss(config: Config, parameters: Sequence[Any], sequences: int) -> tuple[float, int]:
    """Mean loss in nats of the full model, and over how many target tokens it is taken."""
    batch_size = min(config.data.microbatch_size, sequences)
    batches = held_out_batches(config.data, batch_size, sequences // batch_size)
    model = config.model
    if jax.default_backend() != "gpu":
        model = replace(model, attention="xla")
    batch_loss = jax.jit(full_model_loss(model, len(parameters)))
    totals = np.zeros(2)
    for batch in tqdm(batches, unit="batch", disable=None, leave=False):
        totals += np.asarray(batch_loss(parameters, marked_tokens(batch), batch["targets"]))
    return float(totals[0] / totals[1]), int(totals[1])


def full_model_loss(
    model: ModelConfig, stages: int
) -> Callable[[Sequence[Any], Int[Array, "batch time"], Int[Array, "batch time"]], Float[Array, 2]]:
    """(parameters of all stages, tokens, targets) -> sum of the losses in nats, target tokens.

    Tokens are as `marked_tokens` gives them.
    """
    layers = model.layers_of_stages(stages)
    structures = [
        nnx.graphdef(
            nnx.eval_shape(
                lambda stage=stage: create_stage(model, stage, layers, jax.random.key(0))
            )
        )
        for stage in range(stages)
    ]

    def loss(parameters: Sequence[Any], tokens: Array, targets: Array) -> Array:
        modules = [nnx.merge(*pair) for pair in zip(structures, parameters, strict=True)]
        x = tokens
        for module in modules:
            x = module(x)
        data_stage: DataStage = modules[0]
        return jnp.stack(data_stage.loss(x, targets))

    return loss


if __name__ == "__main__":
    sys.exit(main())
