"""The configuration of a run: one tree of frozen dataclasses, YAML on disk."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml
from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.methods import DEFAULT_METHOD, METHODS
from skippipe_sched.search import DEFAULT_BUDGET_S

from skippipe_jax.cluster.membership import ClusterConfig
from skippipe_jax.data.batches import DataConfig
from skippipe_jax.data.tokenizer import has_tokenizer
from skippipe_jax.interop.huggingface import SHAPES, folder_of, read_model
from skippipe_jax.models.llama import PRESETS, ModelConfig
from skippipe_jax.optim.adamw import OptimizerConfig
from skippipe_jax.program.schedule import RecipeConfig
from skippipe_jax.storage.checkpoint import CheckpointConfig


@dataclass(frozen=True)
class PlanConfig:
    """Where the plan comes from: a plan file, or a case that is planned for when the run starts.

    `plan: auto` is short for `plan: {measure: true}`.

    Attributes:
        file: a plan (JSON).
        case: a case: the path of a YAML file, or the case itself, whose link table then lies beside
            the config file.
        measure: links, seconds, bytes and memory are measured when the run starts, and `case` says
            only what cannot be: stages, path lengths, microbatches and rules, as far as the
            defaults of `skippipe_jax.profile` do not suit.
        method: the planner's method.
        seed: of the search.
        budget_s: seconds that the search for one plan may take.
    """

    SHORTHAND: ClassVar[Mapping[str, Mapping[str, Any]]] = {"auto": {"measure": True}}

    file: str | None = None
    case: str | dict | None = None
    measure: bool = False
    method: str = DEFAULT_METHOD
    seed: int = 0
    budget_s: float = DEFAULT_BUDGET_S

    def __post_init__(self):
        """Refuse a plan from two places, or from none."""
        fields.text(self.method, "plan.method", METHODS)
        fields.integer(self.seed, "plan.seed", 0, fields.LARGEST_SEED)
        fields.number(self.budget_s, "plan.budget_s", 0.0, above=True)
        if self.file is not None and self.case is not None:
            raise InputError(
                "plan.file", self.file, "plan.case is given too", "Remove one of the two"
            )
        if self.measure and self.file is not None:
            raise InputError(
                "plan.measure",
                True,
                "a plan file is given too, which needs no measured case",
                "Remove one of the two",
            )
        if self.measure and isinstance(self.case, str):
            raise InputError(
                "plan.case",
                self.case,
                "a case in a file is complete, but plan.measure asks to measure it",
                "Write stages, path_length and so on under plan.case itself, or remove measure",
            )


@dataclass(frozen=True)
class NetworkConfig:
    """How nodes exchange arrays, or how a network between them is emulated.

    `network: emulate` is short for `network: {mode: emulate}`.

    Attributes:
        mode: `real`, or `emulate`: every hop is delayed by the case's latency, bandwidth and
            overhead, hops on one directed link one after another, and averaging takes the seconds
            that the case predicts.
        emulate_compute: with `emulate`, every operation takes at least the case's seconds.
        jitter: with `emulate`, everything takes (1 + x) times as long, x exponential with this
            mean, drawn anew for each iteration from the seed.
        averaging: `collective` sums a stage's gradients (or parameters, by
            `recipe.average_parameters_every`) over its replicas by a collective of JAX, `ring`
            passes them round chunk by chunk in the planner's order of the replicas. `auto` takes
            the ring between processes where a link has less than 1 GiB/s in the case.
        activation_dtype: `bfloat16` rounds activations and their gradients for each hop between
            nodes, which halves their bytes. null: they travel as they are computed.
        averaging_dtype: `bfloat16` rounds gradients, and sums of some replicas' gradients, for
            each step of the ring. Replicas that share a device exchange nothing.
        deadline_s: seconds that a host waits for anything from another before the run ends.
    """

    SHORTHAND: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        mode: {"mode": mode} for mode in ("real", "emulate")
    }

    mode: str = "real"
    emulate_compute: bool = False
    jitter: float = 0.0
    averaging: str = "auto"
    activation_dtype: str | None = None
    averaging_dtype: str | None = None
    deadline_s: float = 300.0

    def __post_init__(self):
        """Refuse what has no effect."""
        fields.text(self.mode, "network.mode", ("real", "emulate"))
        fields.text(self.averaging, "network.averaging", ("auto", "collective", "ring"))
        fields.number(self.jitter, "network.jitter", 0.0)
        fields.number(self.deadline_s, "network.deadline_s", 0.0, above=True)
        for name in ("activation_dtype", "averaging_dtype"):
            if getattr(self, name) is not None:
                fields.text(getattr(self, name), f"network.{name}", ("bfloat16",))
        for name in ("emulate_compute", "jitter"):
            if getattr(self, name) and self.mode == "real":
                raise InputError(
                    f"network.{name}",
                    getattr(self, name),
                    "the network is real, and so nothing is delayed",
                    "Write network.mode: emulate too, or remove it",
                )
        if self.averaging == "collective" and self.averaging_dtype is not None:
            raise InputError(
                "network.averaging_dtype",
                self.averaging_dtype,
                "only the ring rounds what it sends, and network.averaging is collective",
                "Write averaging: ring, or remove it",
            )


@dataclass(frozen=True)
class TrainConfig:
    """How long to train.

    Attributes:
        steps: iterations, all together: those before a run was resumed count.
    """

    steps: int = 100

    def __post_init__(self):
        """Refuse a run without iterations."""
        fields.integer(self.steps, "train.steps", 1)


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
        """Whether the iteration that leads to `step` is traced by the profiler."""
        return step in (self.profile_steps or ())


@dataclass(frozen=True)
class ValidationConfig:
    """Held-out loss of the full model, every stage in order, while it trains.

    The checkpoint with the lowest is kept whatever `checkpoint.keep` says; only steps that are
    saved can be it, so let `every` and `checkpoint.every` meet.

    Attributes:
        every: compute it after every so many iterations. null: never.
        sequences: over so many held-out sequences, rounded up to whole microbatches, or over as
            many as there are.
    """

    every: int | None = None
    sequences: int = 64

    def __post_init__(self):
        """Refuse what would validate nothing."""
        if self.every is not None:
            fields.integer(self.every, "validation.every", 1)
        fields.integer(self.sequences, "validation.sequences", 1)

    def validates(self, step: int) -> bool:
        """Whether the held-out loss is computed after `step`."""
        return self.every is not None and step % self.every == 0


@dataclass(frozen=True)
class Config:
    """Everything that decides a run. Relative paths start at the current directory.

    Attributes:
        run_dir: the folder that the run writes.
        seed: draws the first parameters.
        init_from: where the first parameters come from instead: `hf:DIR`, the folder of a Hugging
            Face model, which gives the shapes in `model` too.
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
        data: the text.
        optimizer: how parameters are updated.
        train: how long.
        checkpoint: when to save.
        cluster: which host serves which node.
        network: how nodes exchange arrays.
        log: who is told besides metrics.jsonl.
        validation: held-out loss while training.
    """

    run_dir: str = "runs/default"
    seed: int = 0
    init_from: str | None = None
    execution: str = "strict"
    trace: str = "never"
    compilation_cache: str | None = "~/.cache/skippipe_jax"
    model: ModelConfig = field(default_factory=ModelConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    log: LogConfig = field(default_factory=LogConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)

    def __post_init__(self):
        """Refuse what the sections say against each other, and values out of range."""
        fields.integer(self.seed, "seed", 0, fields.LARGEST_SEED)
        if self.init_from is not None:
            folder_of(self.init_from)
        if "://" in self.run_dir:
            raise InputError(
                "run_dir",
                self.run_dir,
                "is no local folder",
                "Name one that all hosts share, and let checkpoint.copy_to name the URL of a copy",
            )
        fields.text(self.execution, "execution", ("strict", "ready-first"))
        if self.trace != "never" and not re.fullmatch("every [1-9][0-9]*", self.trace):
            raise InputError(
                "trace", self.trace, "says no interval", "Write never, or every 10, or the like"
            )
        self._require_that_replicas_agree()
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

        if self.data.packing == "documents" and self.model.attention == "cudnn":
            raise InputError(
                "model.attention",
                self.model.attention,
                "does not keep the documents of data.packing = 'documents' apart",
                "Write model.attention: xla, or data.packing: windows",
            )

    def _require_that_replicas_agree(self) -> None:
        """Refuse what needs equal replicas at a step at which they differ."""
        every = self.recipe.average_parameters_every
        if every is None:
            return
        for name, steps in (
            ("train.steps", self.train.steps),
            ("checkpoint.every", self.checkpoint.every),
            ("validation.every", self.validation.every),
        ):
            if steps is not None and steps % every:
                raise InputError(
                    name,
                    steps,
                    "replicas are equal only when they have averaged, and that is after every "
                    f"recipe.average_parameters_every = {every} iterations",
                    f"Write {-(-steps // every) * every}, or another multiple",
                )
        if self.network.averaging_dtype is not None:
            raise InputError(
                "network.averaging_dtype",
                self.network.averaging_dtype,
                "would round parameters and moments, not gradients, which are not averaged with "
                f"recipe.average_parameters_every = {every}",
                "Remove one of the two",
            )

    def traces(self, iteration: int) -> bool:
        """Whether the timeline of an iteration, counted from 0, is recorded."""
        return self.trace != "never" and (iteration + 1) % int(self.trace.split()[1]) == 0


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file and apply overrides of the form ``key.sub=value``.

    Raises:
        InputError: for unknown keys, wrong types and values out of range.
    """
    tree = fields.load_yaml(path, "--config")
    tree = {} if tree is None else _mapping(tree, "--config", str(path))
    return parse_config(tree, overrides)


def parse_config(tree: Any, overrides: Sequence[str] = ()) -> Config:
    """The configuration that a mapping describes, its model preset and shapes filled in.

    Overrides, as `load_config` takes them, are written into the mapping first.
    """
    tree = dict(_mapping(tree, "config", tree))
    for override in overrides:
        _override(tree, override)
    model = tree.get("model")
    if isinstance(model, dict) and model.get("preset") is not None:
        preset = fields.text(model["preset"], "model.preset", PRESETS)
        tree["model"] = PRESETS[preset] | model
    if tree.get("init_from") is not None:
        init_from = fields.text(tree["init_from"], "init_from")
        tree["model"] = _with_shapes(_mapping(tree.get("model", {}), "model", model), init_from)
        data = tree.get("data", {})
        tree["data"] = _with_tokenizer(_mapping(data, "data", data), init_from)
    return _parse(Config, tree, "")


def _with_shapes(model: dict[str, Any], init_from: str) -> dict[str, Any]:
    """The model section, with the shapes that it leaves out taken from the weights."""
    if all(key in model for key in SHAPES):
        return model
    of_weights = to_tree(read_model(folder_of(init_from)))
    return {key: of_weights[key] for key in SHAPES} | model


def _with_tokenizer(data: dict[str, Any], init_from: str) -> dict[str, Any]:
    """The data section, by default with the tokenizer that came with the weights."""
    folder = folder_of(init_from)
    is_given = data.get("tokenizer") is not None or data.get("source") == "tokens"
    if is_given or not has_tokenizer(folder):
        return data
    return data | {"tokenizer": str(folder)}


def to_tree(config: Any) -> Any:
    """The mapping that `parse_config` reads, every key in it."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_tree(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return [to_tree(entry) for entry in config] if isinstance(config, tuple) else config


def to_yaml(config: Config) -> str:
    """The configuration in full, as YAML."""
    return yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True)


# How the model is cut into stages and computed, and when batches are made ready; neither parameters
# nor batches depend on these.
FREE_TO_CHANGE = ("model.stage_layers", "model.recompute", "model.attention", "data.prefetch")


def require_same_run(config: Config, saved: Config) -> list[tuple[str, Any, Any]]:
    """Refuse to resume a run under a configuration that would make it another run.

    Model, first parameters and data must be as they were. The plan, the recipe, how the model is
    cut into stages, how the optimizer goes on, how long to train, how often to save, and on which
    hosts to run may change. Returns what has changed in how the model is cut and computed, and data
    made ready: key, new and old value.
    """
    new, old = to_tree(config), to_tree(saved)
    changes = []
    for section in ("seed", "init_from", "model", "data"):
        for name, now, before in _differences(section, new[section], old[section]):
            if name in FREE_TO_CHANGE:
                changes.append((name, now, before))
                continue
            raise InputError(
                name,
                now,
                f"the run that is to be resumed has {before!r}",
                f"Set {name}={json.dumps(before)}, or start another run with another run_dir",
            )
    return changes


def _differences(name: str, new: Any, old: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(new, dict) and isinstance(old, dict):
        found = []
        for key in dict.fromkeys([*old, *new]):
            found += _differences(f"{name}.{key}", new.get(key), old.get(key))
        return found
    return [(name, new, old)] if new != old else []


def _override(tree: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise InputError("--set", override, "is not key.sub=value", "Write --set train.steps=200")
    *parents, last = name.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise InputError("--set", override, f"{parent} holds no keys", "Name another key")
    tree[last] = fields.parse_yaml(text, "--set", override)


def _mapping(value: Any, name: str, shown: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(name, shown, "is not a mapping", "Write key: value lines")
    return value


def _parse(kind: Any, value: Any, name: str) -> Any:
    """`value` as a value of type `kind`, where `name` is its place in the tree."""
    if dataclasses.is_dataclass(kind):
        types_of = typing.get_type_hints(kind)
        hints = {field.name: types_of[field.name] for field in dataclasses.fields(kind)}
        shorthand = getattr(kind, "SHORTHAND", {})
        if isinstance(value, str) and value in shorthand:
            value = shorthand[value]
        given = fields.mapping(value, name or "config", hints)
        prefix = f"{name}." if name else ""
        return typing.cast(Any, kind)(
            **{key: _parse(hints[key], entry, prefix + key) for key, entry in given.items()}
        )
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _parse_union(arguments, value, name)
    if origin is tuple:
        entries = fields.sequence(value, name)
        return tuple(_parse(arguments[0], entry, f"{name}[{i}]") for i, entry in enumerate(entries))
    if kind is bool:
        if not isinstance(value, bool):
            raise InputError(name, value, "must be true or false", "Write true or false")
        return value
    # Sizes and counts have bounds of their own.
    whole = functools.partial(fields.integer, maximum=fields.LARGEST_SEED)
    readers = {int: whole, float: fields.number, str: fields.text}
    return readers[kind](value, name)


def _parse_union(kinds: Sequence[Any], value: Any, name: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    choices = [kind for kind in kinds if kind is not type(None)]
    if dict in choices and isinstance(value, dict):
        return value
    return _parse(choices[0], value, name)
