"""How parameters are updated: AdamW, warmup and cosine decay, clipping by the global norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from skippipe_sched import fields
from skippipe_sched.errors import InputError


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule.

    The learning rate rises to `learning_rate` over `warmup_steps`, then falls along a cosine to
    `final_ratio` of it after `decay_steps` steps (default: the steps of the run).
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
        fields.integer(self.warmup_steps, "optimizer.warmup_steps", 0)
        for name in ("learning_rate", "final_ratio", "beta1", "beta2", "weight_decay"):
            fields.number(getattr(self, name), f"optimizer.{name}", 0.0)
        # At 0 a clip norm stops all learning, and epsilon divides 0 by 0 where a gradient is 0.
        for name in ("clip_norm", "epsilon"):
            fields.number(getattr(self, name), f"optimizer.{name}", 0.0, above=True)
        for name, in_range, bound in (
            ("beta1", self.beta1 < 1.0, "less than 1"),
            ("beta2", self.beta2 < 1.0, "less than 1"),
            ("final_ratio", self.final_ratio <= 1.0, "at most 1"),
        ):
            if not in_range:
                raise InputError(
                    f"optimizer.{name}",
                    getattr(self, name),
                    f"must be {bound}",
                    f"Write a number from 0 on that is {bound}",
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
    """The update of one stage, without clipping: that needs the norm over all stages.

    Its state is in float32 whatever the parameters are.
    """
    transformation = optax.adamw(
        learning_rate_schedule(config, steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=decays,
    )

    def init(params: Any) -> optax.OptState:
        # Left to Optax, moments begin in the parameters' dtype, and the first update widens them.
        return transformation.init(optax.tree.cast(params, jnp.float32))

    return optax.GradientTransformation(init, transformation.update)


def decays(parameters: Any) -> Any:
    """Which parameters decay: all but the scales of norms."""

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        return path[-1] != jax.tree_util.DictKey("scale")

    return jax.tree_util.tree_map_with_path(is_matrix, parameters)
