"""How parameters are updated: AdamW and its schedule, what decays, clipping by the global norm."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ScalarLike
from skippipe_sched import fields
from skippipe_sched.errors import InputError

SCHEDULES = ("cosine", "warmup-stable-decay")
DECAY_SHAPES = ("linear", "1-sqrt")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, its schedule, and what it takes for a good gradient.

    Attributes:
        learning_rate: the highest.
        schedule: `cosine` falls from the end of the warmup on. `warmup-stable-decay` stays at the
            highest rate, and falls over the last part only.
        warmup_steps: the highest rate is reached after so many steps.
        decay_steps: the lowest is reached after so many steps. null: those of the run.
        decay_fraction: the part of the `decay_steps` over which `warmup-stable-decay` falls.
        decay_shape: how it falls there: `linear`, or `1-sqrt` (one minus the root of the share gone
            by).
        final_ratio: the lowest rate, as a share of the highest.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of squared gradients.
        epsilon: added to the root of that.
        weight_decay: of matrices. Scales of norms and biases never decay.
        decay_embeddings: whether the embedding decays, which is also a head that is tied to it.
        decay_head: whether the head decays.
        clip_norm: gradients are scaled so that their norm over all stages is at most this.
        skip_above_norm: an update whose gradient norm, before clipping, is greater or no finite
            number is left out: parameters, moments and the schedule stay as they are. null: none
            is, and a run ends when its loss or gradient is no finite number.
        z_loss: times the mean of log(Z)^2 over all target tokens, where Z normalises the softmax,
            is added to what is minimised, and reported apart from the loss. It keeps logits small.
    """

    learning_rate: float = 3e-4
    schedule: str = "cosine"
    warmup_steps: int = 10
    decay_steps: int | None = None
    decay_fraction: float = 0.2
    decay_shape: str = "linear"
    final_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decay_embeddings: bool = True
    decay_head: bool = True
    clip_norm: float = 1.0
    skip_above_norm: float | None = None
    z_loss: float = 0.0

    def __post_init__(self):
        """Refuse values outside their ranges."""
        fields.integer(self.warmup_steps, "optimizer.warmup_steps", 0)
        if self.decay_steps is not None:
            fields.integer(self.decay_steps, "optimizer.decay_steps", 1)
        fields.text(self.schedule, "optimizer.schedule", SCHEDULES)
        fields.text(self.decay_shape, "optimizer.decay_shape", DECAY_SHAPES)
        for name in ("learning_rate", "final_ratio", "beta1", "beta2", "weight_decay", "z_loss"):
            fields.number(getattr(self, name), f"optimizer.{name}", 0.0)
        if self.skip_above_norm is not None:
            fields.number(self.skip_above_norm, "optimizer.skip_above_norm", 0.0, above=True)
        # At 0 a clip norm stops all learning, and epsilon divides 0 by 0 where a gradient is 0.
        for name in ("clip_norm", "epsilon", "decay_fraction"):
            fields.number(getattr(self, name), f"optimizer.{name}", 0.0, above=True)
        for name, in_range, bound in (
            ("beta1", self.beta1 < 1.0, "less than 1"),
            ("beta2", self.beta2 < 1.0, "less than 1"),
            ("final_ratio", self.final_ratio <= 1.0, "at most 1"),
            ("decay_fraction", self.decay_fraction <= 1.0, "at most 1"),
        ):
            if not in_range:
                raise InputError(
                    f"optimizer.{name}",
                    getattr(self, name),
                    f"must be {bound}",
                    f"Write a number from 0 on that is {bound}",
                )
        for name in ("decay_fraction", "decay_shape"):
            given = getattr(self, name)
            if self.schedule == "cosine" and given != getattr(OptimizerConfig, name):
                raise InputError(
                    f"optimizer.{name}",
                    given,
                    "is of the schedule warmup-stable-decay, and this one is cosine",
                    "Remove it, or write schedule: warmup-stable-decay",
                )
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise InputError(
                "optimizer.decay_steps",
                self.decay_steps,
                f"must be greater than warmup_steps = {self.warmup_steps}",
                "Raise it, or leave it out",
            )


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of each step of a run of `steps` steps, as a function of the step.

    A step is an update that was made: one that was skipped is taken again at the same rate.
    """
    decay_steps = config.decay_steps or max(steps, config.warmup_steps + 1)
    # The first step should learn something too, so the ramp starts above zero.
    first = config.learning_rate / (config.warmup_steps + 1)
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=first,
            peak_value=config.learning_rate,
            warmup_steps=config.warmup_steps,
            decay_steps=decay_steps,
            end_value=config.learning_rate * config.final_ratio,
        )
    stable_steps = decay_steps - round(config.decay_fraction * decay_steps) - config.warmup_steps
    warmup = optax.linear_schedule(first, config.learning_rate, config.warmup_steps)
    # A warmup that takes some of the last part leaves the rest of it to the decay.
    decay = _decay(config, max(stable_steps, 0), decay_steps - config.warmup_steps)
    return optax.join_schedules([warmup, decay], [config.warmup_steps])


def _decay(config: OptimizerConfig, start: int, end: int) -> optax.Schedule:
    """The highest rate until step `start`, then down to the last rate at step `end`."""

    def rate(step: ScalarLike) -> Array:
        gone = jnp.clip((step - start) / max(end - start, 1), 0.0, 1.0)
        fallen = gone if config.decay_shape == "linear" else jnp.sqrt(gone)
        return config.learning_rate * (1.0 - (1.0 - config.final_ratio) * fallen)

    return rate


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
        mask=functools.partial(decays, embeddings=config.decay_embeddings, head=config.decay_head),
    )

    def init(params: Any) -> optax.OptState:
        # Left to Optax, moments begin in the parameters' dtype, and the first update widens them.
        return transformation.init(optax.tree.cast(params, jnp.float32))

    return optax.GradientTransformation(init, transformation.update)


def updates_made(optimizer_state: optax.OptState) -> int:
    """How many updates a state has seen: the steps of the run, less those that were skipped."""
    [(_, count), *_] = optax.tree.get_all_with_path(optimizer_state, "count")
    return int(count)


def decays(parameters: Any, *, embeddings: bool = True, head: bool = True) -> Any:
    """Which parameters decay: matrices, those of the embedding and the head if it is said so."""

    def is_decaying(path: tuple[Any, ...], _: Any) -> bool:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if "embedding" in names:
            return embeddings
        if "head" in names:
            return head
        return names[-1] not in ("scale", "bias")

    return jax.tree_util.tree_map_with_path(is_decaying, parameters)
