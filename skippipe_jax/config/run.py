"""The whole configuration of a run, and its small sections."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.methods import DEFAULT_METHOD, METHODS
from skippipe_sched.search.budget import DEFAULT_BUDGET_S

from skippipe_jax.config.choices import Choice, Count, Positive, Real, Section, Seed, Whole
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
from skippipe_jax.config.pretrained import RUN, origin_of


@dataclass(frozen=True)
class CheckpointConfig(Section, name="checkpoint"):
    """When to save, and where to hold on to which checkpoints.

    Attributes:
        every: save after every so many iterations.
        keep: hold on to the last so many checkpoints; to two at least where hosts may be lost.
        keep_every: hold on for good to the checkpoint of every so many iterations.
        copy_to: URL of a folder (``gs://``, ``s3://``, ``file://`` or what else fsspec knows) to
            which the checkpoints are copied in the background, with the run's own files. A run
            whose folder is lost is resumed from there.
    """

    every: Count = 50
    keep: Count = 3
    keep_every: Count | None = None
    copy_to: str | None = None

    def __post_init__(self):
        """Refuse intervals that never come, and a run that holds on to nothing."""
        super().__post_init__()
        if self.keep_every is not None and self.keep_every % self.every:
            raise InputError(
                "checkpoint.keep_every",
                self.keep_every,
                f"is no multiple of checkpoint.every = {self.every}, so some are never saved",
                "Choose a multiple",
            )
        if self.copy_to is not None:
            fields.text(self.copy_to, "checkpoint.copy_to")


@dataclass(frozen=True)
class PlanConfig(Section, name="plan"):
    """Where the plan comes from: a plan file, or a case that is planned for when the run starts.

    `plan: auto` is short for `plan: {measure: true}`, and what a single host does where no plan is
    named.

    Attributes:
        file: a plan (JSON).
        case: a case: the path of a YAML file, or the case itself, whose link table then lies beside
            the config file. `activation_bytes`, `stage_bytes` and `averaging` follow from the
            model, the data, the network and the section `averaging` where it leaves them out or
            says `auto`; `memory: auto` follows from `memory_bytes` besides.
        measure: links, seconds, bytes and memory are measured when the run starts, and a plan is
            made for them. `case`, or the case of the plan in `file`, says what cannot be measured:
            names of locations, stages, path lengths, microbatches and rules, as far as the defaults
            of `skippipe measure` do not suit; what else it says is left aside.
        method: the planner's method.
        seed: of the search.
        budget_s: seconds that the search for one plan may take.
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
        """Tell whether it says nowhere where the plan comes from."""
        return self.file is None and self.case is None and not self.measure

    def __post_init__(self):
        """Refuse a plan from two places, or from none."""
        super().__post_init__()
        if self.file is not None and self.case is not None:
            problem = "plan.case is given too, and a plan holds its case"
            remedy = "Set plan.case=null to take the plan, or plan.file=null to plan for the case"
            raise InputError("plan.file", self.file, problem, remedy)


@dataclass(frozen=True)
class Phase:
    """A part of training, which lasts until the next begins.

    Attributes:
        from_step: it begins after so many iterations.
        path_length: stages that its paths visit. null: as the plan's case says.
        path_share: instead of `path_length`, the share of all stages that its paths visit, rounded
            up.
        max_swaps: swaps that its paths have at most. null: as the plan's case says.
        from_share: instead of `from_step`, the share of the learning rate's schedule after which it
            begins: of `optimizer.decay_steps`, or else of `train.steps`.
        skipping: the share of its iterations that take its paths. In the others, spread evenly, all
            microbatches visit all stages in order.
    """

    from_step: int = 0
    path_length: int | None = None
    max_swaps: int | None = None
    from_share: float | None = None
    skipping: float = 1.0
    path_share: float | None = None

    def stages_visited(self, stages: int) -> int | None:
        """Count the stages, of so many, that its paths visit; None if as the plan's case says."""
        return self.path_length if self.path_share is None else math.ceil(self.path_share * stages)

    @property
    def name(self) -> str:
        """What the plan of this phase is called."""
        return f"from_{self.from_step}"

    def skips(self, iteration: int) -> bool:
        """Tell whether an iteration, counted from 0, takes the paths of this phase."""
        return int((iteration + 1) * self.skipping) > int(iteration * self.skipping)


PRESETS: dict[str, tuple[Phase, ...]] = {
    "quality": (Phase(from_share=0.4, skipping=0.0),),
    "robust": (Phase(from_share=0.4, path_share=0.5, skipping=0.5),),
}
"""The phases that follow the run's own plan, by the names of presets."""


@dataclass(frozen=True)
class RecipeConfig(Section, name="recipe"):
    """Changes of paths while a run trains.

    Attributes:
        preset: phases that were measured. With `quality`, all microbatches visit all stages in the
            last 60% of training: for the full model. With `robust`, every second iteration of that
            part takes paths that visit half of the stages: for inference with stages missing.
        full_every: every so many iterations, all microbatches visit all stages in order.
        phases: parts of training with paths of their own. Before the first, or with null, the
            plan's.
        redraw_every: every so many iterations, the next of the redrawn plans is taken.
        redraws: so many plans are sought for each phase, with different seeds.
        longest_redraw: redrawn plans that take more than so many times as long as the best of them
            are left out. null: none is.
    """

    preset: Annotated[str, Choice(PRESETS)] | None = None
    full_every: Count | None = None
    phases: tuple[Phase, ...] | None = None
    redraw_every: Count | None = None
    redraws: Count = 1
    longest_redraw: Annotated[float, Real(1.0)] | None = 1.03

    def __post_init__(self):
        """Refuse phases that are out of order, and what has no effect."""
        super().__post_init__()
        if self.preset is not None and self.phases is not None:
            raise InputError(
                "recipe.phases",
                [phase.name for phase in self.phases],
                f"the preset {self.preset} has phases of its own",
                "Remove recipe.phases, or recipe.preset",
            )
        for number, phase in enumerate(self.phases or ()):
            _require_phase(phase, f"recipe.phases[{number}]")
        for number, (before, after) in enumerate(pairwise(self.phases or ()), start=1):
            _require_order(before, after, f"recipe.phases[{number}]")
        for name, other, alone in (
            ("redraws", "redraw_every", self.redraws > 1 and self.redraw_every is None),
            ("redraw_every", "redraws", self.redraws == 1 and self.redraw_every is not None),
        ):
            if alone:
                raise InputError(
                    f"recipe.{name}",
                    getattr(self, name),
                    f"has no effect without recipe.{other}",
                    f"Write recipe.{other} too, or remove it",
                )

    def in_steps(self, steps: int) -> RecipeConfig:
        """Name the phases of the preset, and count them in iterations of a schedule of `steps`.

        Of phases that begin at the same iteration the last one counts.
        """
        phases = self.phases if self.preset is None else PRESETS[self.preset]
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
    def begins_with_own(self) -> bool:
        """Whether the run's own plan is taken before the first phase begins."""
        return not self.phases or self.phases[0].from_step > 0

    @property
    def has_full_iterations(self) -> bool:
        """Tell whether all microbatches visit all stages in some iterations."""
        return self.full_every is not None or any(phase.skipping < 1 for phase in self.phases or ())

    @property
    def most_searches(self) -> int:
        """How many plans are sought beside the run's own, at most."""
        skipping = sum(phase.skipping > 0 for phase in self.phases or ())
        of_phases = (self.begins_with_own + skipping) * self.redraws
        return of_phases - self.begins_with_own + self.has_full_iterations


def _require_phase(phase: Phase, field: str) -> None:
    """Raise `InputError` unless a phase, counted in steps or shares, is one."""
    fields.number(phase.skipping, f"{field}.skipping", 0.0)
    if phase.skipping > 1:
        problem = "is more than all iterations"
        raise InputError(f"{field}.skipping", phase.skipping, problem, "Write a number up to 1")
    if phase.from_share is not None:
        fields.number(phase.from_share, f"{field}.from_share", 0.0)
        if phase.from_share >= 1:
            problem = "begins after the last iteration"
            raise InputError(f"{field}.from_share", phase.from_share, problem, "Write less than 1")
        if phase.from_step:
            problem = "says when the phase begins, and so does from_share"
            raise InputError(f"{field}.from_step", phase.from_step, problem, "Remove one of them")
    if phase.path_share is not None:
        fields.number(phase.path_share, f"{field}.path_share", 0.0, above=True)
        if phase.path_share > 1:
            problem = "is more than all stages"
            raise InputError(f"{field}.path_share", phase.path_share, problem, "Write 1 at most")
        if phase.path_length is not None:
            problem = "says how many stages are visited, and so does path_share"
            remedy = "Remove one of them"
            raise InputError(f"{field}.path_length", phase.path_length, problem, remedy)
    for name, least in (("from_step", 0), ("path_length", 1), ("path_share", 0), ("max_swaps", 0)):
        value = getattr(phase, name)
        if value is not None and name != "path_share":
            fields.integer(value, f"{field}.{name}", least)
        if value is not None and name != "from_step" and phase.skipping == 0:
            problem = "has no effect where no iteration of the phase skips"
            raise InputError(f"{field}.{name}", value, problem, "Remove it, or raise skipping")


def _require_order(before: Phase, after: Phase, field: str) -> None:
    """Raise `InputError` unless a phase begins after the one before it."""
    if (before.from_share is None) != (after.from_share is None):
        raise InputError(
            field,
            after.name,
            "its begin is told otherwise than that of the phase before it",
            "Write from_share for all phases, or from_step for all",
        )
    name = "from_step" if after.from_share is None else "from_share"
    earlier, later = getattr(before, name), getattr(after, name)
    if later <= earlier:
        raise InputError(
            f"{field}.{name}",
            later,
            f"the phase before it begins at {earlier}",
            "List the phases in the order in which they begin",
        )


NO_RECIPE = RecipeConfig()
"""Every iteration takes the run's own plan."""


@dataclass(frozen=True)
class TrainConfig(Section, name="train"):
    """The length of training, and where the run can be watched.

    Attributes:
        steps: iterations, all together: those before a run was resumed count.
        metrics_port: host I serves its metrics for Prometheus at port metrics_port + I. It listens
            on the address on which it listens for the other hosts. null: no host does.
    """

    steps: Count = 100
    metrics_port: Annotated[int, Whole(1, LAST_PORT)] | None = None


@dataclass(frozen=True)
class LogConfig(Section, name="log"):
    """What a run tells besides metrics.jsonl, whose lines every tracker gets.

    Attributes:
        tensorboard: write event files to RUN/tensorboard.
        wandb: the project on Weights & Biases that the run belongs to.
        profile_steps: steps, counted from 1, of which JAX's profiler writes traces to RUN/profile,
            in which operations bear the names of their stages and microbatches.
    """

    tensorboard: bool = False
    wandb: str | None = None
    profile_steps: tuple[Count, ...] | None = None

    def profiles(self, step: int) -> bool:
        """Tell whether the iteration that leads to `step` is traced by the profiler."""
        return step in (self.profile_steps or ())


@dataclass(frozen=True)
class ValidationConfig(Section, name="validation"):
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

    every: Count | None = None
    sequences: Count = 64
    patience: Count | None = None

    def __post_init__(self):
        """Refuse what would validate nothing."""
        super().__post_init__()
        if self.patience is not None and self.every is None:
            raise InputError(
                "validation.patience",
                self.patience,
                "counts validations, and there are none",
                "Write validation.every too, or remove it",
            )


@dataclass(frozen=True)
class Config(Section, name=""):
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
        """Read a configuration from a mapping, as `load_config` reads a file.

        Overrides have the form ``key.sub=value``.

        Raises:
            InputError: for unknown keys, wrong types and values out of range.
        """
        from skippipe_jax.config.parsing import parse_config

        return parse_config(tree, overrides)

    def __post_init__(self):
        """Refuse what the sections say against each other, and values out of range."""
        super().__post_init__()
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
