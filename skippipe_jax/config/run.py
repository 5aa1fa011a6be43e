"""The whole configuration of a run, and its small sections."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.averaging import AveragingConfig
from skippipe_jax.config.checkpoint import CheckpointConfig
from skippipe_jax.config.choices import Choice, require_choices
from skippipe_jax.config.cluster import DISTRIBUTED, ClusterConfig
from skippipe_jax.config.data import DataConfig
from skippipe_jax.config.init_from import RUN, origin_of
from skippipe_jax.config.join import JoinConfig
from skippipe_jax.config.model import ModelConfig
from skippipe_jax.config.network import NetworkConfig
from skippipe_jax.config.node import NodeConfig
from skippipe_jax.config.optimizer import OptimizerConfig
from skippipe_jax.config.plan import PlanConfig
from skippipe_jax.config.recipe import RecipeConfig
from skippipe_jax.config.recovery import REWIND, STOP, RecoveryConfig
from skippipe_jax.config.replan import ReplanConfig


@dataclass(frozen=True)
class TrainConfig:
    """The length of training, and where the run can be watched.

    Attributes:
        steps: iterations, all together: those before a run was resumed count.
        metrics_port: host I serves its metrics for Prometheus at port metrics_port + I. It listens
            on the address on which it listens for the other hosts. null: no host does.
    """

    steps: int = 100
    metrics_port: int | None = None

    def __post_init__(self):
        """Refuse a run without iterations, and a port that is none."""
        fields.integer(self.steps, "train.steps", 1)
        if self.metrics_port is not None:
            fields.integer(self.metrics_port, "train.metrics_port", 1, 65535)


@dataclass(frozen=True)
class LogConfig:
    """What a run tells besides metrics.jsonl, whose lines every tracker gets.

    Attributes:
        tensorboard: write event files to RUN/tensorboard.
        wandb: the project on Weights & Biases that the run belongs to.
        profile_steps: steps, counted from 1, of which JAX's profiler writes traces to RUN/profile,
            in which operations bear the names of their stages and microbatches.
    """

    tensorboard: bool = False
    wandb: str | None = None
    profile_steps: tuple[int, ...] | None = None

    def __post_init__(self):
        """Refuse steps that are none."""
        for step in self.profile_steps or ():
            fields.integer(step, "log.profile_steps", 1)

    def profiles(self, step: int) -> bool:
        """Tell whether the iteration that leads to `step` is traced by the profiler."""
        return step in (self.profile_steps or ())


@dataclass(frozen=True)
class ValidationConfig:
    """Held-out loss of the full model, every stage in order, while it trains.

    The checkpoint with the lowest is kept whatever `checkpoint.keep` says; only steps that are
    saved can be it, so let `every` and `checkpoint.every` meet.

    Attributes:
        every: compute it after every so many iterations, and after the last. null: never.
        sequences: over so many held-out sequences, rounded up to whole microbatches, or over as
            many as there are.
        patience: the run ends after so many validations in a row without a new lowest loss. null:
            it trains all its steps.
    """

    every: int | None = None
    sequences: int = 64
    patience: int | None = None

    def __post_init__(self):
        """Refuse what would validate nothing."""
        if self.every is not None:
            fields.integer(self.every, "validation.every", 1)
        fields.integer(self.sequences, "validation.sequences", 1)
        if self.patience is None:
            return
        fields.integer(self.patience, "validation.patience", 1)
        if self.every is None:
            raise InputError(
                "validation.patience",
                self.patience,
                "counts validations, and there are none",
                "Write validation.every too, or remove it",
            )


@dataclass(frozen=True)
class Config:
    """Everything that decides a run. Relative paths start at the current directory.

    Attributes:
        run_dir: the folder that the run writes.
        seed: draws the first parameters.
        init_from: where the first parameters come from instead: `hf:DIR`, the folder of a Hugging
            Face model; `run:DIR@STEP`, a checkpoint of another run, or with `run:DIR` its newest.
            They give the shapes in `model` too, before a preset does, and the tokenizer. Of the
            shapes only the context may be chosen: a shorter one.
        execution: with `strict` every node keeps to the plan's order, and a run gives the same bits
            each time. With `ready-first` a node takes, among the operations whose inputs have
            arrived, the earliest in the plan's order, so that it does not stand still when a
            transfer is late; sums are then rounded in the order of arrival.
        trace: `never`, or `every N`: after every N iterations the timeline of one is recorded in
            the run folder and drawn beside the predicted one.
        compilation_cache: the folder in which programs compiled by XLA are kept, and found by later
            runs. null: nowhere.
        model: what is trained.
        plan: which node serves which stage, and which way every microbatch goes.
        recipe: several plans in one run.
        averaging: when the replicas of a stage average, and what.
        data: the text.
        optimizer: how parameters are updated.
        train: how long, and where it can be watched.
        checkpoint: when to save.
        cluster: which host serves which node.
        node: of which devices of its host a node consists.
        network: how nodes exchange arrays.
        join: which hosts may come to it.
        recovery: how the run goes on when hosts are lost.
        replan: how it gets a better plan when they are others.
        log: who is told besides metrics.jsonl.
        validation: held-out loss while training.
    """

    run_dir: str = "runs/default"
    seed: int = 0
    init_from: str | None = None
    execution: Annotated[str, Choice(("strict", "ready-first"))] = "strict"
    trace: str = "never"
    compilation_cache: str | None = "~/.cache/skippipe_jax"
    model: ModelConfig = field(default_factory=ModelConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    averaging: AveragingConfig = field(default_factory=AveragingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    join: JoinConfig = field(default_factory=JoinConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    replan: ReplanConfig = field(default_factory=ReplanConfig)
    log: LogConfig = field(default_factory=LogConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
        """Read a configuration from a mapping, as `load_config` reads a file.

        Overrides have the form ``key.sub=value``.

        Raises:
            InputError: for unknown keys, wrong types and values out of range.
        """
        from skippipe_jax.config.parsing import parse_config

        return parse_config(tree, overrides)

    def __post_init__(self):
        """Refuse what the sections say against each other, and values out of range."""
        fields.integer(self.seed, "seed", 0, fields.LARGEST_SEED)
        if self.init_from is not None:
            origin = origin_of(self.init_from)
            same = os.path.realpath(origin.folder) == os.path.realpath(self.run_dir)
            if origin.kind == RUN and same:
                raise InputError(
                    "init_from",
                    self.init_from,
                    "is the run itself, whose folder is run_dir",
                    "Name another run, or give this one another folder: --set run_dir=...",
                )
        if "://" in self.run_dir:
            raise InputError(
                "run_dir",
                self.run_dir,
                "is no local folder",
                "Name one that all hosts share, and let checkpoint.copy_to name the URL of a copy",
            )
        require_choices(self, "")
        if self.trace != "never" and not re.fullmatch("every [1-9][0-9]*", self.trace):
            raise InputError(
                "trace", self.trace, "says no interval", "Write never, or every 10, or the like"
            )
        self._require_what_outer_leaves()
        beyond = [step for step in self.log.profile_steps or () if step > self.train.steps]
        if beyond:
            raise InputError(
                "log.profile_steps",
                beyond[0],
                f"the run has {self.train.steps} steps",
                "Name one of them, or raise train.steps",
            )
        if self.data.sequence_length > self.model.context:
            raise InputError(
                "data.sequence_length",
                self.data.sequence_length,
                f"is longer than model.context = {self.model.context}",
                "Shorten it, or raise model.context",
            )

        if self.node.mesh is not None:
            self.node.mesh.require_divides(self.model, self.data)
        unfit = self.model.why_unfit(self.model.attention, self.data.sequence_length)
        if unfit:
            raise InputError("model.attention", self.model.attention, unfit, "Write auto")

    def _require_what_outer_leaves(self) -> None:
        """Refuse what averaging behind the iterations contradicts, or leaves without effect."""
        if not self.averaging.is_outer:
            return
        averaging, network, lost_stage = self.averaging, self.network, self.recovery.lost_stage
        no_gradients = (
            "is of gradients, and with averaging.mode: outer none are averaged but in the first "
            "averaging.exact_steps iterations, of which there are 0"
        )
        for name, given, problem, remedy in (
            (
                "network.averaging",
                network.averaging == "collective" and averaging.exact_steps == 0,
                no_gradients,
                "Remove it, or write averaging.exact_steps too",
            ),
            (
                "network.averaging_dtype",
                network.averaging_dtype is not None and averaging.exact_steps == 0,
                no_gradients,
                "Write averaging.dtype, by which changes travel, or averaging.exact_steps too",
            ),
            (
                "recovery.lost_stage",
                lost_stage not in (REWIND, STOP),
                "makes a stage of what all hosts have after the same step, and with "
                "averaging.mode: outer they are at different ones",
                f"Write {REWIND} or {STOP}, or averaging.mode: exact",
            ),
            (
                "cluster.runtime",
                self.cluster.runtime == DISTRIBUTED,
                "has all hosts take part in every step, and with averaging.mode: outer none waits "
                "for all others",
                "Write independent, or averaging.mode: exact",
            ),
            (
                "model.parameter_dtype",
                self.model.parameter_dtype != "float32",
                "is rounded by chance in every update, and with averaging.mode: outer replicas "
                "send each other what updates have added up to",
                "Leave it out, or write averaging.mode: exact",
            ),
            (
                "optimizer.moment_dtype",
                self.optimizer.moment_dtype != "float32",
                "is rounded by chance, alike on all replicas, and with averaging.mode: outer each "
                "has moments of its own",
                "Leave it out, or write averaging.mode: exact",
            ),
            (
                "optimizer.state_memory",
                self.optimizer.state_memory != "device",
                "is for updates that all replicas make together, and with averaging.mode: outer "
                "each takes steps of its own",
                "Leave it out, or write averaging.mode: exact",
            ),
            (
                "train.steps",
                self.train.steps < averaging.least_steps,
                "is over before every fragment has been applied once: that takes "
                "averaging.exact_steps, every and delay together, "
                f"{averaging.least_steps} iterations",
                f"Write {averaging.least_steps} or more, or lower averaging.every",
            ),
        ):
            if given:
                section, key = name.split(".")
                raise InputError(name, getattr(getattr(self, section), key), problem, remedy)
        if self.model.stage_layers is not None:
            self.averaging.require_blocks(self.model.stage_layers)

    @property
    def recipe_in_steps(self) -> RecipeConfig:
        """The recipe with its phases counted in iterations of this run."""
        return self.recipe.in_steps(self.optimizer.decay_steps or self.train.steps)

    def traces(self, iteration: int) -> bool:
        """Tell whether the timeline of an iteration, counted from 0, is recorded."""
        return self.trace != "never" and (iteration + 1) % int(self.trace.split()[1]) == 0

    def validates(self, step: int) -> bool:
        """Tell whether the held-out loss is computed after `step`; the first step is 1."""
        every = self.validation.every
        return every is not None and (step % every == 0 or step == self.train.steps)
