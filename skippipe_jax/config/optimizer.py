"""The sections `optimizer` and `averaging`: how parameters are updated, and replicas average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from skippipe_sched.errors import InputError
from skippipe_sched.problem.averaging import (
    DEFAULTS,
    EXACT,
    MODES,
    WIDTHS,
    AveragingPolicy,
    parse_averaging,
)

from skippipe_jax.config.choices import (
    DTYPES,
    Choice,
    Count,
    NonNegative,
    Positive,
    Real,
    Section,
    Whole,
)

# More iterations than the delay, so that nobody waits for totals, which are sent after changes.
BEHIND = 4
Decay = Annotated[float, Real(end=1.0)]
OF_OUTER_OPTIMIZER = ("rate", "momentum", "exact_steps")


@dataclass(frozen=True)
class AveragingConfig(Section, name="averaging"):
    """When the replicas of a stage average, and what.

    All keys beside `mode` are of `outer`. What training means then, the page on training says in
    formulas.

    Attributes:
        mode: `exact`: gradients, in every iteration, which ends when they are averaged; replicas
            never differ. `outer`: each replica takes steps of its own, and what it has changed is
            averaged while the next iterations run, so that nobody waits. It is other training.
        every: iterations in which all parameters are averaged once.
        fragments: parts in which this is done, spread over these iterations. A part is whole blocks
            of each stage, of which every stage has at least as many.
        delay: a part is applied at the end of the iteration that comes so many after the one at
            whose end it was sent, and has all that time to go round. 0: no iteration begins before
            it is applied.
        dtype: as what changes travel. `int8` has a scale for every 128 numbers. What rounding
            leaves is added to the next change.
        rate: of the outer optimizer, which is SGD with Nesterov momentum; the mean change is its
            gradient.
        momentum: of the outer optimizer.
        exact_steps: so many iterations at the beginning are as in `exact`.
    """

    mode: Annotated[str, Choice(MODES)] = EXACT.mode
    every: int = DEFAULTS["every"]
    fragments: int = DEFAULTS["fragments"]
    delay: int = DEFAULTS["delay"]
    dtype: Annotated[str, Choice(WIDTHS)] = DEFAULTS["dtype"]
    rate: Positive = 0.7  # At 0 nothing is ever learnt.
    momentum: Decay = 0.9
    exact_steps: Annotated[int, Whole(0)] = 0

    def __post_init__(self):
        """Refuse what the planner refuses, an outer optimizer that is none, and what is unused."""
        super().__post_init__()
        given = {key: getattr(self, key) for key in DEFAULTS}
        if self.is_outer:
            parse_averaging({"mode": self.mode, **given}, "averaging")
        else:
            given |= {key: getattr(self, key) for key in OF_OUTER_OPTIMIZER}
            for key, value in given.items():
                if value != getattr(AveragingConfig, key):
                    raise InputError(
                        f"averaging.{key}",
                        value,
                        "is of mode: outer, and this is exact, in which every iteration averages",
                        "Remove it, or write averaging.mode: outer",
                    )

    @property
    def is_outer(self) -> bool:
        """Whether replicas take steps of their own, sooner or later."""
        return self.mode != EXACT.mode

    @property
    def policy(self) -> AveragingPolicy:
        """What a case says of it."""
        if not self.is_outer:
            return EXACT
        return AveragingPolicy("outer", self.every, self.fragments, self.delay, self.dtype)

    @property
    def of_case(self) -> dict[str, Any]:
        """The keys by which a case says so: none where that is what it is without them."""
        if not self.is_outer:
            return {}
        return {"averaging": {key: getattr(self, key) for key in ("mode", *DEFAULTS)}}

    @property
    def iterations_apart(self) -> int:
        """So many iterations the hosts of a run are apart at most: 1 where all wait for all.

        Else totals of an iteration travel behind so many others, as changes do.
        """
        return self.delay + BEHIND if self.is_outer else 1

    @property
    def least_steps(self) -> int:
        """After so many iterations of a run every fragment has been applied."""
        return self.exact_steps + self.every + self.delay if self.is_outer else 0

    def is_exact(self, iteration: int) -> bool:
        """Tell whether an iteration, counted from 1, averages gradients before it ends."""
        return not self.is_outer or iteration <= self.exact_steps

    def sent_after(self, iteration: int) -> int | None:
        """The fragment that is sent at the end of an iteration, counted from 1; None if none is."""
        if self.is_exact(iteration):
            return None
        return self.policy.sent_after(iteration - self.exact_steps)

    def blocks_of(self, fragment: int, layers: int) -> range:
        """The blocks of a fragment, of the `layers` of a stage: block l is of l * fragments // L.

        Embedding and, at the other end, final norm and head are of the first and the last fragment.
        """
        ends = (-(-number * layers // self.fragments) for number in (fragment, fragment + 1))
        return range(*ends)

    def require_blocks(self, stage_layers: Sequence[int]) -> None:
        """Refuse more fragments than some stage has blocks, of which each stage has so many.

        Raises:
            InputError: naming the stage.
        """
        least = min(stage_layers)
        # A stage without blocks is refused with its cut.
        if self.is_outer and 1 <= least < self.fragments:
            raise InputError(
                "averaging.fragments",
                self.fragments,
                f"stage {stage_layers.index(least)} has {least} blocks, and a fragment is at least "
                "one block of every stage",
                f"Write {least} or less, or give this stage more in model.stage_layers",
            )


SCHEDULES = Choice(("cosine", "warmup-stable-decay"))
MEMORIES = Choice(("device", "host"))
DECAY_SHAPES = Choice(("linear", "1-sqrt"))
ADAMW, MUON = "adamw", "muon"
NAMES = Choice((ADAMW, MUON))


@dataclass(frozen=True)
class OptimizerConfig(Section, name="optimizer"):
    """The rule of updates, its schedule, and what it takes for a good gradient.

    Attributes:
        name: `adamw`, or `muon`: matrices of blocks are updated by their orthogonalized momentum,
            and all else by AdamW. Where devices of different kinds serve one stage, its replicas
            drift apart by what they round differently in that.
        learning_rate: the highest.
        schedule: `cosine` falls from the end of the warmup on. `warmup-stable-decay` stays at the
            highest rate, and falls over the last part only.
        warmup_steps: the highest rate is reached after so many steps.
        decay_steps: the lowest is reached after so many steps. null: those of the run.
        decay_fraction: the part of the `decay_steps` over which `warmup-stable-decay` falls.
        decay_shape: how it falls there: `linear`, or `1-sqrt` (one minus the root of the share gone
            by).
        final_ratio: the lowest rate, as a share of the highest.
        muon_momentum: decay of the mean of gradients of matrices that `muon` updates.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of squared gradients.
        epsilon: added to the root of that.
        weight_decay: of matrices. Scales of norms and biases never decay.
        decay_embeddings: whether the embedding decays, which is also a head that is tied to it.
        decay_head: whether the head decays.
        moment_dtype: `float32` or `bfloat16`, in which both moments are held. bfloat16 is rounded
            up or down by chance, so that small changes add up.
        state_memory: where the moments are between updates: on the `device`, or in the memory of
            the `host`, from which an update fetches them.
        clip_norm: gradients are scaled so that their norm over all stages is at most this. null:
            they are left as they are.
        skip_above_norm: an update whose gradient norm, before clipping, is greater or no finite
            number is left out: parameters, moments and the schedule stay as they are. null: none
            is, and a run ends when its loss or gradient is no finite number.
        z_loss: times the mean of log(Z)^2 over all target tokens, where Z normalises the softmax,
            is added to what is minimised, and reported apart from the loss. It keeps logits small.
    """

    name: Annotated[str, NAMES] = ADAMW
    learning_rate: NonNegative = 3e-4
    schedule: Annotated[str, SCHEDULES] = "cosine"
    warmup_steps: Annotated[int, Whole(0)] = 10
    decay_steps: Count | None = None
    decay_fraction: Annotated[float, Real(above=True, most=1.0)] = 0.2
    decay_shape: Annotated[str, DECAY_SHAPES] = "linear"
    final_ratio: Annotated[float, Real(most=1.0)] = 0.1
    muon_momentum: Decay = 0.95
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    epsilon: Positive = 1e-8  # At 0 it divides 0 by 0 where a gradient is 0.
    weight_decay: NonNegative = 0.1
    decay_embeddings: bool = True
    decay_head: bool = True
    moment_dtype: Annotated[str, DTYPES] = "float32"
    state_memory: Annotated[str, MEMORIES] = "device"
    clip_norm: Positive | None = 1.0  # At 0 it stops all learning.
    skip_above_norm: Positive | None = None
    z_loss: NonNegative = 0.0

    def __post_init__(self):
        """Refuse values outside their ranges, and what has no effect."""
        super().__post_init__()
        for name in ("decay_fraction", "decay_shape"):
            given = getattr(self, name)
            if self.schedule == "cosine" and given != getattr(OptimizerConfig, name):
                raise InputError(
                    f"optimizer.{name}",
                    given,
                    "is of the schedule warmup-stable-decay, and this one is cosine",
                    "Remove it, or write schedule: warmup-stable-decay",
                )
        if self.name == ADAMW and self.muon_momentum != OptimizerConfig.muon_momentum:
            raise InputError(
                "optimizer.muon_momentum",
                self.muon_momentum,
                "is of the optimizer muon, and this one is adamw",
                "Remove it, or write name: muon",
            )
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise InputError(
                "optimizer.decay_steps",
                self.decay_steps,
                f"must be greater than warmup_steps = {self.warmup_steps}",
                "Raise it, or leave it out",
            )
