"""How parameters are updated: AdamW, warmup and cosine decay, clipping by the global norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import optax
from skippipe_sched.errors import InputError


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule.

    The learning rate rises to `learning_rate` over `warmup_steps`, then falls along a cosine to
    `final_ratio` of it at step `decay_steps` (default: the last step of the run).
    Gradients are scaled so that their norm over all stages is at most `clip_norm`. Norm scales
    are exempt from `weight_decay`.
    """

    learning_rate: float = 3e-4
    warmup_steps: int = 10
    decay_steps: int | None = None
    final_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self):
        """Refuse values outside their ranges."""
        for name, low, high in (
            ("learning_rate", 0.0, float("inf")),
            ("final_ratio", 0.0, 1.0),
            ("beta1", 0.0, 1.0),
            ("beta2", 0.0, 1.0),
            ("epsilon", 0.0, float("inf")),
            ("weight_decay", 0.0, float("inf")),
            ("clip_norm", 0.0, float("inf")),
            ("warmup_steps", 0, float("inf")),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise InputError(
                    f"optimizer.{name}",
                    value,
                    f"must lie between {low:g} and {high:g}",
                    "Write a value in that range",
                )
        if self.clip_norm == 0.0:
            raise InputError(
                "optimizer.clip_norm", 0.0, "would stop all learning", "Write a positive norm"
            )
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise InputError(
                "optimizer.decay_steps",
                self.decay_steps,
                f"must be greater than warmup_steps = {self.warmup_steps}",
                "Raise it, or leave it out",
            )


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of each step of a run of `steps` steps, as a function of the step."""
    decay_steps = config.decay_steps or max(steps, config.warmup_steps + 1)
    return optax.warmup_cosine_decay_schedule(
        # The first step should learn something too, so the ramp starts above zero.
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=decay_steps,
        end_value=config.learning_rate * config.final_ratio,
    )


def adamw(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The update of one stage, without clipping: that needs the norm over all stages."""
    return optax.adamw(
        learning_rate_schedule(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decays,
    )


def decays(parameters: Any) -> Any:
    """Which parameters decay: all but the scales of norms."""

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        return path[-1] != jax.tree_util.DictKey("scale")

    return jax.tree_util.tree_map_with_path(is_matrix, parameters)
