"""Models of random parameters, so large that whatever is left out shows, and runs that hold one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import yaml

from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import ClusterConfig, ModelConfig, parse_config
from skippipe_jax.config.run import CheckpointConfig
from skippipe_jax.inference.evaluation import Evaluation, evaluate
from skippipe_jax.inference.model_source import open_source
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.models.llama import StageStructure, stage_shapes
from skippipe_jax.storage.checkpoint import CheckpointItems
from skippipe_jax.storage.checkpointer import Checkpointer


def evaluate_run(folder: Path, step: int | None, sequences: int) -> Evaluation:
    """What the full model of a run says of held-out sequences."""
    source = open_source(folder, step=step)
    return evaluate(source.model(), source.step, source.config.data, sequences, ())


def random_model(config: ModelConfig, stages: int, seed: int = 0) -> StagedModel:
    """A model whose matrices, and scales too, are far from what a new model has."""
    random = np.random.default_rng(seed)

    def drawn(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.numpy.asarray(random.normal(scale=0.4, size=shape.shape), shape.dtype)

    return StagedModel(config, jax.tree.map(drawn, stage_shapes(config, stages)))


def save_run(folder: Path, sections: dict[str, Any], stages: int, step: int = 5) -> StagedModel:
    """A run folder as far as evaluation and generation read one, and the model in it."""
    model = random_model(parse_config(sections).model, stages)
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(sections))
    save_checkpoint(folder, model.parameters, step)
    return model


def save_checkpoint(folder: Path, parameters: Sequence[Any], step: int) -> None:
    """A checkpoint that holds these parameters of each stage."""
    alone = Membership(ClusterConfig(), 0, 1)
    cut = [own["blocks"]["attention_norm"]["scale"].shape[0] for own in parameters]
    with contextlib.closing(
        Checkpointer(folder, alone, stage_layers=cut, config=CheckpointConfig())
    ) as writer:
        writer.save(
            step, CheckpointItems({s: {"parameters": own} for s, own in enumerate(parameters)}), {}
        )


def logits_of(model: StagedModel, order: Sequence[int], tokens: np.ndarray) -> np.ndarray:
    """Scores [batch, time, vocabulary] of the next token at every position, without a cache.

    All sequences are padded to the context, so that one program serves them.
    """
    time = tokens.shape[1]
    padded = np.pad(tokens, ((0, 0), (0, max(model.context - time, 0))))
    x = model.run(order, {"tokens": padded, "targets": padded})
    logits = _logits(model.structures[0], model.parameters[0], x)[:, :time]
    return np.asarray(logits, np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _logits(structure: StageStructure, parameters: Any, x: jax.Array) -> jax.Array:
    return structure.merge(parameters).logits(x)
