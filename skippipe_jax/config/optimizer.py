"""The sections `optimizer` and `averaging`: updates of parameters, averaging of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from skippipe_sched.problem.averaging import (
    AVERAGING_MODES,
    DEFAULTS,
    EXACT,
    WIDTHS,
    AveragingPolicy,
    parse_averaging,
)

from skippipe_jax.config.choices import (
    DTYPES,
    AtLeastOne,
    Choice,
    NonNegative,
    Positive,
    Real,
    Section,
    Whole,
)

# Added to `delay`: totals are sent after changes, so a bound at the delay itself would make hosts
# wait for them.
TOTALS_LAG = 4
Decay = Annotated[float, Real(end=1.0)]


@dataclass(frozen=True)
class AveragingConfig(Section, name="averaging"):
    """Averaging of a stage's replicas. All keys except `mode` apply to `outer` only.

    Attributes:
        mode: `exact`: average gradients in every step. `outer`: replicas take local steps, and
            average outer gradients in the background (streaming DiLoCo), which changes the trained
            model.
        every: steps in which all parameters are averaged once.
        fragments: parts that are averaged one by one in these steps. Every stage needs at least as
            many blocks.
        delay: steps between sending a fragment and applying its average. 0: the next step waits for
            it.
        dtype: type of outer gradients in transfers; `int8` has one scale for 128 numbers.
        rate: learning rate of the outer optimizer, SGD with Nesterov momentum.
        momentum: momentum of the outer optimizer.
        exact_steps: first steps in `exact` mode.
    """

    mode: Annotated[str, Choice(AVERAGING_MODES)] = EXACT.mode
    every: int = DEFAULTS["every"]
    fragments: int = DEFAULTS["fragments"]
    delay: int = DEFAULTS["delay"]
    dtype: Annotated[str, Choice(WIDTHS)] = DEFAULTS["dtype"]
    rate: Positive = 0.7  # At 0 nothing is ever learnt.
    momentum: Decay = 0.9
    exact_steps: Annotated[int, Whole(0)] = 0

    def __post_init__(self):
        """Reject values that the planner rejects, and keys without effect in `exact` mode."""
        super().__post_init__()
        if self.is_outer:
            parse_averaging(self.of_case["averaging"], "averaging")
        else:
            remedy = "Remove it, or write averaging.mode: outer"
            keys = (*DEFAULTS, "rate", "momentum", "exact_steps")
            self.require_default(*keys, problem="with averaging.mode: exact", remedy=remedy)

    @property
    def is_outer(self) -> bool:
        """True if replicas take local steps, from the start or after `exact_steps`."""
        return self.mode != EXACT.mode

    @property
    def policy(self) -> AveragingPolicy:
        """The averaging policy in the terms of a case."""
        if not self.is_outer:
            return EXACT
        return AveragingPolicy("outer", self.every, self.fragments, self.delay, self.dtype)

    @property
    def of_case(self) -> dict[str, Any]:
        """The keys that a case needs for this policy; empty in `exact` mode."""
        if not self.is_outer:
            return {}
        return {"averaging": {key: getattr(self, key) for key in ("mode", *DEFAULTS)}}

    @property
    def max_lag(self) -> int:
        """Maximum number of iterations between two hosts of a run: 1 in `exact` mode.

        In `outer` mode the totals of an iteration are sent in the background, as outer gradients
        are.
        """
        return self.delay + TOTALS_LAG if self.is_outer else 1

    @property
    def min_steps(self) -> int:
        """Number of steps after which every fragment has been applied once."""
        return self.exact_steps + self.every + self.delay if self.is_outer else 0

    def is_exact(self, iteration: int) -> bool:
        """Return whether an iteration, counted from 1, averages gradients before it ends."""
        return not self.is_outer or iteration <= self.exact_steps

    def fragment_sent_after(self, iteration: int) -> int | None:
        """Return the fragment sent at the end of an iteration, counted from 1, or None."""
        if self.is_exact(iteration):
            return None
        return self.policy.fragment_sent_after(iteration - self.exact_steps)

    def blocks_of(self, fragment: int, layers: int) -> range:
        """Return the blocks of a fragment in a stage of `layers` blocks.

        Block l belongs to fragment l * fragments // layers. The embedding belongs to the first
        fragment, the final norm and the head to the last.
        """
        ends = (-(-number * layers // self.fragments) for number in (fragment, fragment + 1))
        return range(*ends)

    def require_blocks(self, stage_layers: Sequence[int]) -> None:
        """Reject more fragments than the smallest stage has blocks.

        Raises:
            InputError: naming the stage.
        """
        least = min(stage_layers)
        # A stage without blocks is reported by the check of the stage partition.
        if self.is_outer and 1 <= least < self.fragments:
            stage = stage_layers.index(least)
            problem = f"stage {stage} has {least} blocks, but needs at least one per fragment"
            remedy = f"Write {least} or less, or give this stage more blocks in model.stage_layers"
            raise self.error("fragments", problem, remedy)


ADAMW, MUON = "adamw", "muon"


@dataclass(frozen=True)
class OptimizerConfig(Section, name="optimizer"):
    """Update rule, learning rate schedule, and limits on gradients.

    Attributes:
        name: `muon` updates matrices of blocks by their orthogonalized momentum, all else by AdamW;
            replicas on different kinds of devices then drift apart.
        learning_rate: peak learning rate.
        schedule: `cosine` decays after the warmup, `warmup-stable-decay` in the last part only.
        warmup_steps: steps until the peak learning rate.
        decay_steps: steps until the lowest learning rate. null: `train.steps`.
        decay_fraction: fraction of `decay_steps` over which `warmup-stable-decay` decays.
        decay_shape: shape of that decay; `1-sqrt`: one minus the square root of the elapsed
            fraction.
        final_ratio: lowest learning rate as a fraction of the peak.
        muon_momentum: momentum of matrices that `muon` updates.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of squared gradients.
        epsilon: constant added to the root of the mean of squared gradients.
        weight_decay: weight decay of matrices, not of norm scales and biases.
        decay_embeddings: decay the embedding, and a head tied to it.
        decay_head: decay the head.
        moment_dtype: type of both moments; bfloat16 is rounded stochastically.
        state_memory: memory that holds the moments between updates.
        clip_norm: maximum norm of the gradients over all stages. null: no clipping.
        skip_above_norm: skip an update, schedule included, whose gradient norm before clipping
            exceeds this or is not finite. null: a loss or gradient that is not finite ends the run.
        z_loss: coefficient of the mean of log(Z)^2 over target tokens, Z being the softmax's
            normalizer. It keeps logits small.
    """

    name: Annotated[str, Choice((ADAMW, MUON))] = ADAMW
    learning_rate: NonNegative = 3e-4
    schedule: Annotated[str, Choice(("cosine", "warmup-stable-decay"))] = "cosine"
    warmup_steps: Annotated[int, Whole(0)] = 10
    decay_steps: AtLeastOne | None = None
    decay_fraction: Annotated[float, Real(above=True, most=1.0)] = 0.2
    decay_shape: Annotated[str, Choice(("linear", "1-sqrt"))] = "linear"
    final_ratio: Annotated[float, Real(most=1.0)] = 0.1
    muon_momentum: Decay = 0.95
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    epsilon: Positive = 1e-8  # At 0 it divides 0 by 0 where a gradient is 0.
    weight_decay: NonNegative = 0.1
    decay_embeddings: bool = True
    decay_head: bool = True
    moment_dtype: Annotated[str, DTYPES] = "float32"
    state_memory: Annotated[str, Choice(("device", "host"))] = "device"
    clip_norm: Positive | None = 1.0  # At 0 it stops all learning.
    skip_above_norm: Positive | None = None
    z_loss: NonNegative = 0.0

    def __post_init__(self):
        """Reject values outside their ranges, and keys without effect."""
        super().__post_init__()
        if self.schedule == "cosine":
            remedy = "Remove it, or write schedule: warmup-stable-decay"
            problem = "with optimizer.schedule: cosine"
            self.require_default("decay_fraction", "decay_shape", problem=problem, remedy=remedy)
        if self.name == ADAMW:
            remedy = "Remove it, or write name: muon"
            problem = "with optimizer.name: adamw"
            self.require_default("muon_momentum", problem=problem, remedy=remedy)
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            problem = f"must be greater than warmup_steps = {self.warmup_steps}"
            raise self.error("decay_steps", problem, "Raise it, or remove it")
