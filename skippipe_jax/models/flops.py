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

from skippipe_sched.problem.plan import Plan

from skippipe_jax.config import ModelConfig
from skippipe_jax.models.footprint import block_matrices


def flops_per_token(
    model: ModelConfig, layers: int, sequence_length: int, *, is_data_stage: bool
) -> int:
    """Count the operations of one token in a stage of `layers` blocks."""
    head = is_data_stage * model.vocabulary_size * model.width
    attention = 12 * layers * model.width * sequence_length
    return 6 * (block_matrices(model, layers) + head) + attention


def iteration_flops(
    model: ModelConfig, plan: Plan, microbatch_size: int, sequence_length: int
) -> int:
    """Count the operations of an iteration: of each microbatch in the stages that it visits."""
    of_stages = [
        flops_per_token(model, layers, sequence_length, is_data_stage=stage == 0)
        for stage, layers in enumerate(model.stage_partition(len(plan.stages)))
    ]
    visits = (of_stages[plan.stage_of[node]] for path in plan.microbatches for node in path)
    return microbatch_size * sequence_length * sum(visits)
