"""Update rule of a stage: AdamW or Muon, with learning rate schedule and weight decay."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ScalarLike

from skippipe_jax.config import OptimizerConfig
from skippipe_jax.config.optimizer import ADAMW, MUON
from skippipe_jax.optim.muon import labels, scale_by_muon


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate of a run of `steps` steps as a function of the step.

    A step is an update that was made: after a skipped update the rate is the same again.
    """
    decay_steps = config.decay_steps or max(steps, config.warmup_steps + 1)
    # The ramp starts above zero, so that the first step has an effect.
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
    # A warmup that reaches into the decay leaves the rest of it.
    decay = _decay(config, max(stable_steps, 0), decay_steps - config.warmup_steps)
    return optax.join_schedules([warmup, decay], [config.warmup_steps])


def _decay(config: OptimizerConfig, start: int, end: int) -> optax.Schedule:
    """Return the decay from the peak rate, at step `start`, to the final rate, at step `end`."""

    def rate(step: ScalarLike) -> Array:
        gone = jnp.clip((step - start) / max(end - start, 1), 0.0, 1.0)
        fallen = gone if config.decay_shape == "linear" else jnp.sqrt(gone)
        return config.learning_rate * (1.0 - (1.0 - config.final_ratio) * fallen)

    return rate


def update_rule(config: OptimizerConfig, steps: int) -> optax.GradientTransformationExtraArgs:
    """Make the update rule of one stage, without clipping, which needs the norm over all stages.

    AdamW gives the same bits as Optax's. Moments are in `moment_dtype`, whatever the dtype of the
    parameters. If an update `is_skipped`, the state is unchanged and the returned updates are
    meaningless.
    """
    decayed = functools.partial(decays, embeddings=config.decay_embeddings, head=config.decay_head)
    scaling = _scale_by_adam(config)
    if config.name == MUON:
        muon = scale_by_muon(config.muon_momentum)
        scaling = optax.partition({MUON: muon, ADAMW: scaling}, labels)
    transformation = optax.chain(
        scaling,
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale_by_learning_rate(learning_rate_schedule(config, steps)),
    )

    def init(params: Any) -> optax.OptState:
        # Optax alone would begin with moments in the parameters' dtype, and widen them later.
        return transformation.init(optax.tree.cast(params, config.moment_dtype))

    def update(updates: Any, state: Any, params: Any = None, *, is_skipped: Any = False) -> Any:
        new: Any
        updates, new = transformation.update(updates, state, params, is_skipped=is_skipped)
        return updates, (*new[:-1], optax.tree.where(is_skipped, state[-1], new[-1]))

    return optax.GradientTransformationExtraArgs(init, update)


def _scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Make Adam's scaling as Optax does, with updates that can be skipped.

    The old or new moments are selected before they are used. Selected afterwards, XLA would copy
    both moments on a CPU, which takes several times as long.
    """
    b1, b2 = config.beta1, config.beta2

    def update(updates: Any, state: Any, params: Any = None, *, is_skipped: Any = False) -> Any:
        new: Any = optax.ScaleByAdamState(
            optax.safe_increment(state.count),
            optax.tree.update_moment(updates, state.mu, b1, 1),
            optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2),
        )
        new = optax.tree.where(is_skipped, state, new)
        mean = optax.tree.bias_correction(new.mu, b1, new.count)
        of_squares = optax.tree.bias_correction(new.nu, b2, new.count)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + config.epsilon), mean, of_squares)
        return updates, new

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam().init, update)


def updates_made(optimizer_state: optax.OptState) -> int:
    """Return the number of updates in a state: steps of the run without the skipped ones."""
    return int(update_count(optimizer_state))


def update_count(optimizer_state: optax.OptState) -> Array:
    """Return the counter of updates of a state, as an array."""
    [(_, count), *_] = optax.tree.get_all_with_path(optimizer_state, "count")
    return jnp.asarray(count)


def decays(parameters: Any, *, embeddings: bool = True, head: bool = True) -> Any:
    """Mark the parameters that decay: matrices, and embedding and head if requested."""

    def is_decaying(path: tuple[Any, ...], _: Any) -> bool:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        if "embedding" in names:
            return embeddings
        if "head" in names:
            return head
        return names[-1] not in ("scale", "bias")

    return jax.tree_util.tree_map_with_path(is_decaying, parameters)
