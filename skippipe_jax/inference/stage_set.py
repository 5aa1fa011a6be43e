"""The stages of a model: its shapes, and the parameters and structure of each stage."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx

from skippipe_jax.config import ModelConfig
from skippipe_jax.config.model import AUTO, PLATFORM_OF, StagePartition
from skippipe_jax.models.llama import StageStructure, create_stage


@dataclass(frozen=True, eq=False)
class StageSet:
    """The stages of a model.

    Attributes:
        config: its shapes.
        parameters: those of each stage; stage 0 is the data stage.
    """

    config: ModelConfig
    parameters: Sequence[Any]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.parameters)

    @property
    def cut(self) -> StagePartition:
        """Number of blocks of each stage."""
        return self.config.stage_partition(self.stages)

    @functools.cached_property
    def structures(self) -> tuple[StageStructure, ...]:
        """Structure of each stage, which makes a stage of its parameters."""
        return _structures(self.config, self.stages)


@functools.cache
def _structures(config: ModelConfig, stages: int) -> tuple[StageStructure, ...]:
    """Return what `StageSet.structures` says."""
    if PLATFORM_OF.get(config.attention) not in (None, jax.default_backend()):
        config = replace(config, attention=AUTO)
    layers = config.stage_partition(stages)

    def structure(stage: int) -> StageStructure:
        return StageStructure(
            nnx.eval_shape(lambda: create_stage(config, stage, layers, jax.random.key(0)))
        )

    # Stages that are alike share one, which is found without a comparison.
    known = dict[StageStructure, StageStructure]()
    return tuple(known.setdefault(own, own) for own in map(structure, range(stages)))
