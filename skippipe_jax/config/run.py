"""Configuration of a run, with its small sections."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from skippipe_sched.errors import InputError
from skippipe_sched.methods import DEFAULT_METHOD, METHODS
from skippipe_sched.search.budget import DEFAULT_BUDGET_S

from skippipe_jax.config.choices import (
    AtLeastOne,
    Choice,
    Positive,
    Real,
    Section,
    Seed,
    Whole,
    require_values,
)
from skippipe_jax.config.cluster import (
    DISTRIBUTED,
    LAST_PORT,
    REWIND,
    STOP,
    ClusterConfig,
    JoinConfig,
    RecoveryConfig,
    ReplanConfig,
)
from skippipe_jax.config.data import DataConfig
from skippipe_jax.config.hardware import NetworkConfig, NodeConfig
from skippipe_jax.config.model import ModelConfig
from skippipe_jax.config.optimizer import AveragingConfig, OptimizerConfig
from skippipe_jax.config.pretrained import RUN, parse_init_from


@dataclass(frozen=True)
class CheckpointConfig(Section, name="checkpoint"):
    """Interval and retention of checkpoints.

    Attributes:
        every: save a checkpoint every N steps.
        keep: keep the last N checkpoints, 2 or more if hosts may fail.
        keep_every: keep every N-th step's checkpoint permanently.
        copy_to: URL of a folder (``gs://``, ``s3://``, ``file://``, others of fsspec) for
            background copies of checkpoints and the run's files, from which the run resumes if the
            run directory is lost.
        timeout_s: seconds that hosts wait until each other's parts are written; parts that cross
            slow links need more.
    """

    every: AtLeastOne = 50
    keep: AtLeastOne = 3
    keep_every: AtLeastOne | None = None
    copy_to: str | None = None
    timeout_s: Positive = 1200.0

    def __post_init__(self):
        """Reject a `keep_every` that `every` does not divide."""
        super().__post_init__()
        if self.keep_every is not None and self.keep_every % self.every:
            problem = f"is not a multiple of checkpoint.every = {self.every}"
            raise self.error("keep_every", problem, "Choose a multiple")


@dataclass(frozen=True)
class PlanConfig(Section, name="plan"):
    """Source of the plan: a file, a case to plan for at startup, or a measurement.

    `plan: auto` is short for `plan: {measure: true}`, the default on a single host.

    Attributes:
        file: path of a plan (JSON).
        case: case to plan for: a YAML file or the case itself, whose link table lies beside the
            config file. `activation_bytes`, `stage_bytes` and `averaging`, if omitted or `auto`,
            follow from the configuration, as does `memory: auto` from `memory_bytes`.
        measure: measure links, computation times, sizes and memory at startup, and plan for them.
            The case, or that of `file`, then supplies only locations, stages, path lengths,
            microbatches and rules.
        method: planning method.
        seed: seed of the search.
        budget_s: time limit of a search, in seconds.
    """

    SHORTHAND: ClassVar[Mapping[str, Mapping[str, Any]]] = {"auto": {"measure": True}}

    file: str | None = None
    case: str | dict | None = None
    measure: bool = False
    method: Annotated[str, Choice(METHODS)] = DEFAULT_METHOD
    seed: Seed = 0
    budget_s: Positive = DEFAULT_BUDGET_S

    @property
    def is_missing(self) -> bool:
        """True if the section names no source of a plan."""
        return self.file is None and self.case is None and not self.measure

    def __post_init__(self):
        """Reject a plan file together with a case."""
        super().__post_init__()
        if self.file is not None and self.case is not None:
            problem = "cannot be combined with plan.case: a plan contains its case"
            remedy = "Set plan.case=null to use the plan, or plan.file=null to plan for the case"
            raise self.error("file", problem, remedy)


@dataclass(frozen=True)
class Phase:
    """Part of training with its own paths, which lasts until the next phase begins.

    Attributes:
        from_step: steps before the phase.
        path_length: stages of a path. null: as in the case.
        path_share: replaces `path_length`: a fraction of all stages, rounded up.
        max_swaps: maximum swaps in a path. null: as in the case.
        from_share: replaces `from_step`: a fraction of `optimizer.decay_steps` or, if null, of
            `train.steps`.
        skipping: fraction of steps that use the phase's paths. In the others, spread evenly, all
            microbatches visit all stages in order.
    """

    from_step: Annotated[int, Whole(0)] = 0
    path_length: AtLeastOne | None = None
    max_swaps: Annotated[int, Whole(0)] | None = None
    from_share: Annotated[float, Real(end=1.0)] | None = None
    skipping: Annotated[float, Real(most=1.0)] = 1.0
    path_share: Annotated[float, Real(above=True, most=1.0)] | None = None

    def stages_visited(self, stages: int) -> int | None:
        """Return how many of `stages` stages a path visits; None: as in the plan's case."""
        return self.path_length if self.path_share is None else math.ceil(self.path_share * stages)

    @property
    def name(self) -> str:
        """Name of the plan of this phase."""
        return f"from_{self.from_step}"

    def skips(self, iteration: int) -> bool:
        """Return whether an iteration, counted from 0, uses the paths of this phase."""
        return int((iteration + 1) * self.skipping) > int(iteration * self.skipping)


RECIPE_PRESETS: dict[str, tuple[Phase, ...]] = {
    "quality": (Phase(from_share=0.4, skipping=0.0),),
    "robust": (Phase(from_share=0.4, path_share=0.5, skipping=0.5),),
}
"""Phases that follow the run's own plan, by preset name."""


@dataclass(frozen=True)
class RecipeConfig(Section, name="recipe"):
    """Schedule of path changes during a run.

    Attributes:
        preset: measured phases for the last 60% of training. `quality`: all microbatches visit all
            stages; best for the full model. `robust`: every second step uses paths of half of the
            stages; best for inference with missing stages.
        full_every: in every N-th step, all microbatches visit all stages in order.
        phases: parts of training with their own paths. Before the first one: the plan's paths.
        redraw_every: switch to the next redrawn plan every N steps.
        redraws: plans for each phase, each with another seed.
        longest_redraw: drop redrawn plans whose step takes longer than the best one's times this.
            null: keep all.
    """

    preset: Annotated[str, Choice(RECIPE_PRESETS)] | None = None
    full_every: AtLeastOne | None = None
    phases: tuple[Phase, ...] | None = None
    redraw_every: AtLeastOne | None = None
    redraws: AtLeastOne = 1
    longest_redraw: Annotated[float, Real(1.0)] | None = 1.03

    def __post_init__(self):
        """Reject phases that are out of order, and keys without effect."""
        super().__post_init__()
        if self.preset is not None and self.phases is not None:
            other = f"recipe.preset: {self.preset}"
            raise InputError(
                "recipe.phases",
                [phase.name for phase in self.phases],
                f"cannot be combined with {other}, which has its own phases",
                "Remove recipe.phases, or recipe.preset",
            )
        for number, phase in enumerate(self.phases or ()):
            _require_phase(phase, f"recipe.phases[{number}]")
        for number, (before, after) in enumerate(pairwise(self.phases or ()), start=1):
            _require_order(before, after, f"recipe.phases[{number}]")
        for name, other, is_unset in (
            ("redraws", "redraw_every", self.redraw_every is None),
            ("redraw_every", "redraws", self.redraws == 1),
        ):
            if is_unset:
                remedy = f"Write recipe.{other} too, or remove it"
                self.require_default(name, problem=f"without recipe.{other}", remedy=remedy)

    def in_steps(self, steps: int) -> RecipeConfig:
        """Return the recipe with its preset expanded and its phases counted in steps.

        `steps` is the length of the schedule. Of phases that begin at the same step, the last one
        wins.
        """
        phases = self.phases if self.preset is None else RECIPE_PRESETS[self.preset]
        if phases is None:
            return self
        begins = {
            phase.from_step if phase.from_share is None else round(phase.from_share * steps): phase
            for phase in phases
        }
        counted = [
            replace(phase, from_step=step, from_share=None)
            for step, phase in sorted(begins.items())
        ]
        return replace(self, preset=None, phases=tuple(counted))

    @property
    def starts_with_own_plan(self) -> bool:
        """True if the run's own plan is used before the first phase begins."""
        return not self.phases or self.phases[0].from_step > 0

    @property
    def has_full_steps(self) -> bool:
        """True if all microbatches visit all stages in some iterations."""
        return self.full_every is not None or any(phase.skipping < 1 for phase in self.phases or ())

    @property
    def max_searches(self) -> int:
        """Maximum number of plans to search in addition to the run's own."""
        skipping = sum(phase.skipping > 0 for phase in self.phases or ())
        of_phases = (self.starts_with_own_plan + skipping) * self.redraws
        return of_phases - self.starts_with_own_plan + self.has_full_steps


def _require_phase(phase: Phase, field: str) -> None:
    """Raise `InputError` if a phase, counted in steps or shares, is not valid."""
    require_values(phase, field)
    for share, name in (("from_share", "from_step"), ("path_share", "path_length")):
        value = getattr(phase, name)
        if getattr(phase, share) is not None and value:
            problem = f"cannot be combined with {share}"
            raise InputError(f"{field}.{name}", value, problem, "Remove one of them")
    for name in ("path_length", "path_share", "max_swaps"):
        value = getattr(phase, name)
        if value is not None and phase.skipping == 0:
            problem = "has no effect with skipping: 0"
            raise InputError(f"{field}.{name}", value, problem, "Remove it, or raise skipping")


def _require_order(before: Phase, after: Phase, field: str) -> None:
    """Raise `InputError` unless a phase begins after the one before it."""
    if (before.from_share is None) != (after.from_share is None):
        problem = "does not define its start by the same key as the previous phase"
        remedy = "Write from_share for all phases, or from_step for all"
        raise InputError(field, after.name, problem, remedy)
    name = "from_step" if after.from_share is None else "from_share"
    earlier, later = getattr(before, name), getattr(after, name)
    if later <= earlier:
        problem = f"must be greater than that of the previous phase, {earlier}"
        remedy = "List the phases in the order in which they begin"
        raise InputError(f"{field}.{name}", later, problem, remedy)


NO_RECIPE = RecipeConfig()
"""Recipe in which every iteration uses the run's own plan."""


@dataclass(frozen=True)
class TrainConfig(Section, name="train"):
    """Length of training, and the port for metrics.

    Attributes:
        steps: total steps, with those before a resume.
        metrics_port: host I serves Prometheus metrics at port metrics_port + I, on the address
            where other hosts reach it.
    """

    steps: AtLeastOne = 100
    metrics_port: Annotated[int, Whole(1, LAST_PORT)] | None = None


@dataclass(frozen=True)
class LogConfig(Section, name="log"):
    """Outputs of a run in addition to metrics.jsonl.

    Attributes:
        tensorboard: write event files to RUN/tensorboard.
        wandb: project on Weights & Biases.
        profile_steps: steps, counted from 1, of which JAX's profiler writes traces to RUN/profile.
    """

    tensorboard: bool = False
    wandb: str | None = None
    profile_steps: tuple[AtLeastOne, ...] | None = None

    def profiles(self, step: int) -> bool:
        """Return whether the profiler traces the iteration that leads to `step`."""
        return step in (self.profile_steps or ())


@dataclass(frozen=True)
class ValidationConfig(Section, name="validation"):
    """Validation loss of the full model, with all stages in order, during training.

    The checkpoint with the lowest loss is kept, whatever `checkpoint.keep` is. Only saved steps
    qualify, so make `every` a multiple of `checkpoint.every`.

    Attributes:
        every: validate every N steps and after the last one.
        sequences: held-out sequences, rounded up to whole microbatches; all if there are fewer.
        patience: end the run after this number of validations in a row without improvement.
    """

    every: AtLeastOne | None = None
    sequences: AtLeastOne = 64
    patience: AtLeastOne | None = None

    def __post_init__(self):
        """Reject a `patience` without validations."""
        super().__post_init__()
        if self.every is None:
            remedy = "Write validation.every too, or remove it"
            self.require_default("patience", problem="without validation.every", remedy=remedy)


@dataclass(frozen=True)
class Config(Section, name=""):
    """Settings of a run. Relative paths start at the current directory.

    Attributes:
        run_dir: folder of the run's files.
        seed: seed of the initial parameters.
        init_from: source of initial parameters, tokenizer and shapes of `model`: `hf:DIR`, a
            Hugging Face folder; `run:DIR` or `run:DIR@STEP`, the newest or another checkpoint of a
            run. Of these shapes, `model` may set only a shorter context. null: initialize from the
            seed.
        execution: `strict`: every node keeps to the plan's order, and repeated runs are bitwise
            equal. `ready-first`: a node runs the earliest operation whose inputs have arrived;
            rounding depends on the order of arrival.
        trace: `every N`: record and plot the timeline of every N-th step.
        compilation_cache: folder of compiled programs, shared by runs. null: no cache.
        model: shape and numerics of the model.
        plan: source of the plan, which assigns nodes to stages and paths to microbatches.
        recipe: several plans in one run.
        averaging: averaging of a stage's replicas: `exact` gradients or `outer` mode.
        data: text to train on.
        optimizer: update rule and learning rate.
        train: length of training, and the port for metrics.
        checkpoint: interval and retention of checkpoints.
        cluster: assignment of nodes to hosts, and connections between hosts.
        node: devices of a node.
        network: transfers between nodes.
        join: hosts that may join the run.
        recovery: recovery from failed hosts.
        replan: search for a better plan after a change of hosts.
        log: outputs in addition to metrics.jsonl.
        validation: validation loss during training.
    """

    run_dir: str = "runs/default"
    seed: Seed = 0
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
        """Return the configuration that a mapping describes, as `load_config` does for a file.

        Overrides have the form ``key.sub=value``.

        Raises:
            InputError: for unknown keys, wrong types and values out of range.
        """
        from skippipe_jax.config.parsing import parse_config

        return parse_config(tree, overrides)

    def __post_init__(self):
        """Reject values out of range, and sections that contradict each other."""
        super().__post_init__()
        if self.init_from is not None:
            origin = parse_init_from(self.init_from)
            same = os.path.realpath(origin.folder) == os.path.realpath(self.run_dir)
            if origin.kind == RUN and same:
                problem = "is the run itself: run_dir is the same folder"
                remedy = "Name another run, or another run directory: --set run_dir=..."
                raise self.error("init_from", problem, remedy)
        if "://" in self.run_dir:
            remedy = "Name a folder that all hosts share, and set checkpoint.copy_to to this URL"
            raise self.error("run_dir", "is not a local folder", remedy)
        if self.trace != "never" and not re.fullmatch("every [1-9][0-9]*", self.trace):
            raise self.error("trace", "must be never or every N", "Write, for example, every 10")
        self._require_valid_with_outer()
        beyond = [step for step in self.log.profile_steps or () if step > self.train.steps]
        if beyond:
            problem = f"is greater than train.steps = {self.train.steps}"
            remedy = "Lower it, or raise train.steps"
            raise InputError("log.profile_steps", beyond[0], problem, remedy)
        if self.data.sequence_length > self.model.context:
            problem = f"is longer than model.context = {self.model.context}"
            remedy = "Shorten it, or raise model.context"
            raise self.data.error("sequence_length", problem, remedy)
        if self.node.mesh is not None:
            self.node.mesh.require_divides(self.model, self.data)
        unfit = self.model.unsupported_reason(self.model.attention, self.data.sequence_length)
        if unfit:
            raise self.model.error("attention", unfit, "Write auto")

    def _require_valid_with_outer(self) -> None:
        """Reject settings that `outer` averaging contradicts or leaves without effect."""
        if not self.averaging.is_outer:
            return
        averaging, network, lost_stage = self.averaging, self.network, self.recovery.lost_stage
        no_gradients = (
            "has no effect with averaging.mode: outer and averaging.exact_steps = 0, where no "
            "gradients are averaged"
        )
        for name, is_invalid, problem, remedy in (
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
                "Write averaging.dtype, the type of outer gradients, or averaging.exact_steps too",
            ),
            (
                "recovery.lost_stage",
                lost_stage not in (REWIND, STOP),
                "needs all hosts at the same step, but with averaging.mode: outer they are at "
                "different steps",
                f"Write {REWIND} or {STOP}, or averaging.mode: exact",
            ),
            (
                "cluster.runtime",
                self.cluster.runtime == DISTRIBUTED,
                "synchronizes all hosts in every step, but with averaging.mode: outer no host "
                "waits for all others",
                "Write independent, or averaging.mode: exact",
            ),
            (
                "model.parameter_dtype",
                self.model.parameter_dtype != "float32",
                "is rounded stochastically in every update, but with averaging.mode: outer "
                "replicas average their accumulated updates",
                "Remove it, or write averaging.mode: exact",
            ),
            (
                "optimizer.moment_dtype",
                self.optimizer.moment_dtype != "float32",
                "is rounded stochastically, equally on all replicas, but with averaging.mode: "
                "outer their moments differ",
                "Remove it, or write averaging.mode: exact",
            ),
            (
                "optimizer.state_memory",
                self.optimizer.state_memory != "device",
                "needs the same updates on all replicas, but with averaging.mode: outer each "
                "replica takes local steps",
                "Remove it, or write averaging.mode: exact",
            ),
            (
                "train.steps",
                self.train.steps < averaging.min_steps,
                f"must be at least {averaging.min_steps}, the sum of averaging.exact_steps, "
                "every and delay, to apply every fragment once",
                f"Write {averaging.min_steps} or more, or lower averaging.every",
            ),
        ):
            if is_invalid:
                section, key = name.split(".")
                raise getattr(self, section).error(key, problem, remedy)
        if self.model.stage_layers is not None:
            self.averaging.require_blocks(self.model.stage_layers)

    @property
    def schedule_steps(self) -> int:
        """Number of steps of the learning rate schedule, also in longer or shorter runs."""
        return self.optimizer.decay_steps or self.train.steps

    @property
    def recipe_in_steps(self) -> RecipeConfig:
        """The recipe, with its phases counted in steps of this run."""
        return self.recipe.in_steps(self.schedule_steps)

    def traces(self, iteration: int) -> bool:
        """Return whether the timeline of an iteration, counted from 0, is recorded."""
        return self.trace != "never" and (iteration + 1) % int(self.trace.split()[1]) == 0

    def validates(self, step: int) -> bool:
        """Return whether the validation loss is computed after `step`; the first step is 1."""
        every = self.validation.every
        return every is not None and (step % every == 0 or step == self.train.steps)
