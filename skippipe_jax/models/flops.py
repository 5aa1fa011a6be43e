"""Floating-point operations that the model needs, without recomputation.

A token that passes a stage forward and backward takes

    6 * parameters in matrices + 12 * layers * width * sequence length

operations. A parameter takes part in one multiplication and one addition of the forward pass, and
in twice as many of the backward pass. Attention multiplies queries by keys and weights by values, 2
* 2 * width operations for each position of the sequence, and again twice as many backward. Causal
attention is counted in full, as in PaLM (arXiv 2204.02311). An embedding lookup is not a
multiplication; the head is a matrix, even if it is the embedding.
"""

from __future__ import annotations

from typing import Any

import jax
from skippipe_sched.problem.plan import Plan

from skippipe_jax.config import ModelConfig
from skippipe_jax.models.llama import stage_shapes


def flops_per_token(parameters: Any, *, layers: int, width: int, sequence_length: int) -> int:
    """Count the operations of one token in a stage with these parameters (or their shapes)."""
    return 6 * _matrix_parameters(parameters) + 12 * layers * width * sequence_length


def iteration_flops(
    model: ModelConfig, plan: Plan, microbatch_size: int, sequence_length: int
) -> int:
    """Count the operations of an iteration: of each microbatch in the stages that it visits."""
    of_stages = [
        flops_per_token(shapes, layers=layers, width=model.width, sequence_length=sequence_length)
        for shapes, layers in zip(
            stage_shapes(model, len(plan.stages)),
            model.stage_partition(len(plan.stages)),
            strict=True,
        )
    ]
    visits = (of_stages[plan.stage_of[node]] for path in plan.microbatches for node in path)
    return microbatch_size * sequence_length * sum(visits)


def _matrix_parameters(parameters: Any) -> int:
    is_tied = "embedding" in parameters and "head" not in parameters
    matrices = ("kernel", "embedding") if is_tied else ("kernel",)
    return sum(
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)
        if path[-1].key in matrices
    )
