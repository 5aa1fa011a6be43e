"""The section `optimizer`: how parameters are updated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.choices import DTYPES, Choice, require_choices

SCHEDULES = Choice(("cosine", "warmup-stable-decay"))
MEMORIES = Choice(("device", "host"))
DECAY_SHAPES = Choice(("linear", "1-sqrt"))
ADAMW, MUON = "adamw", "muon"
NAMES = Choice((ADAMW, MUON))


@dataclass(frozen=True)
class OptimizerConfig:
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
    learning_rate: float = 3e-4
    schedule: Annotated[str, SCHEDULES] = "cosine"
    warmup_steps: int = 10
    decay_steps: int | None = None
    decay_fraction: float = 0.2
    decay_shape: Annotated[str, DECAY_SHAPES] = "linear"
    final_ratio: float = 0.1
    muon_momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    decay_embeddings: bool = True
    decay_head: bool = True
    moment_dtype: Annotated[str, DTYPES] = "float32"
    state_memory: Annotated[str, MEMORIES] = "device"
    clip_norm: float | None = 1.0
    skip_above_norm: float | None = None
    z_loss: float = 0.0

    def __post_init__(self):
        """Refuse values outside their ranges."""
        fields.integer(self.warmup_steps, "optimizer.warmup_steps", 0)
        if self.decay_steps is not None:
            fields.integer(self.decay_steps, "optimizer.decay_steps", 1)
        require_choices(self, "optimizer")
        for name in (
            "learning_rate",
            "final_ratio",
            "muon_momentum",
            "beta1",
            "beta2",
            "weight_decay",
            "z_loss",
        ):
            fields.number(getattr(self, name), f"optimizer.{name}", 0.0)
        # At 0 a clip norm stops all learning.
        for name in ("clip_norm", "skip_above_norm"):
            if getattr(self, name) is not None:
                fields.number(getattr(self, name), f"optimizer.{name}", 0.0, above=True)
        # At 0 epsilon divides 0 by 0 where a gradient is 0.
        for name in ("epsilon", "decay_fraction"):
            fields.number(getattr(self, name), f"optimizer.{name}", 0.0, above=True)
        for name, in_range, bound in (
            ("muon_momentum", self.muon_momentum < 1.0, "less than 1"),
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
