"""Conversion between YAML files, overrides and `Config`; the saved configuration of a run."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.methods import DEFAULT_METHOD

from skippipe_jax.config.data import has_tokenizer, vocabulary_size_of
from skippipe_jax.config.model import PRESETS, ModelConfig
from skippipe_jax.config.pretrained import (
    MODEL_CONFIG,
    RUN,
    SHAPES,
    parse_init_from,
    read_model,
    require_no_window,
    require_shapes,
)
from skippipe_jax.config.run import Config, PlanConfig


@dataclass(frozen=True)
class FormerKey:
    """Removed key: the problem and the remedy, one sentence each.

    `neutral` is the value without effect, which saved runs may contain.
    """

    problem: str
    remedy: str
    neutral: Any = None


FORMER_KEYS: Mapping[str, FormerKey] = {
    "recipe.average_parameters_every": FormerKey(
        "was removed: the section averaging configures the averaging of replicas",
        "Write averaging: {mode: outer}, with this number as every; add fragments: 1, delay: 0, "
        "dtype: float32, rate: 1 and momentum: 0 to average parameters as before, with separate "
        "moments on each replica",
    ),
    "recipe.skip_scaling": FormerKey(
        "was removed: division by the share of microbatches that visit a stage made models worse",
        "Remove it, and set recipe: {preset: quality} to keep the quality of full paths",
        neutral="none",
    ),
    "data.prefetch": FormerKey(
        "was removed: the batches of the next step are always read during the current one",
        "Remove it",
        neutral=True,
    ),
    "replan.method": FormerKey(
        f"was removed: replanning always uses {DEFAULT_METHOD}",
        "Remove it",
        neutral=DEFAULT_METHOD,
    ),
}
"""Removed keys, by their paths in the configuration."""


def without_former_keys(content: Any, section: str, *, ignore_values: bool = False) -> Any:
    """Return the content of a section without its removed keys, which saved runs may have.

    Raises:
        InputError: for a removed key whose value had an effect, unless `ignore_values` is set.
    """
    if not isinstance(content, dict):
        return content
    former = {
        key: FORMER_KEYS[path] for key in content if (path := f"{section}.{key}") in FORMER_KEYS
    }
    for key, former_key in former.items():
        value, neutral = content[key], former_key.neutral
        # True equals 1, but only True was a value of the key.
        is_neutral = type(value) is type(neutral) and value == neutral
        if value is not None and not is_neutral and not ignore_values:
            raise InputError(f"{section}.{key}", value, former_key.problem, former_key.remedy)
    return {key: entry for key, entry in content.items() if key not in former}


EXTENDS = "extends"
"""Top-level key of a file that names the file it extends, relative to itself."""

SET = "--set"


@dataclass(frozen=True)
class ConfigFiles:
    """Merged content of a configuration file, the files that it extends, and `--set`.

    Attributes:
        tree: the mapping, without `extends`.
        origins: origin of each value that is not a mapping, by its path: a file, or `SET`. Empty if
            there is only one file.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Add the file that holds the value to an `InputError`, if there are several files."""
        try:
            yield
        except InputError as error:
            path = error.field.removeprefix("config.")
            ends = [*(match.start() for match in re.finditer(r"[.\[]", path)), len(path)]
            prefixes = [path[:end] for end in reversed(ends)]
            files = [self.origins[prefix] for prefix in prefixes if prefix in self.origins] or [
                file for inner, file in self.origins.items() if inner.startswith(f"{path}.")
            ]
            if files in ([], [SET]):
                raise
            named = f"{files[-1]}: {error.field}"
            raise type(error)(named, error.value, error.problem, error.remedy) from error

    def annotated(self, text: str) -> str:
        """Return the YAML of the whole configuration, each value with its file as a comment."""
        import yaml  # Slow to load; see `fields.parse_yaml`.

        lines = text.splitlines()

        def annotate(node: yaml.Node, prefix: str) -> None:
            for key, value in node.value:
                path = prefix + key.value
                if isinstance(value, yaml.MappingNode):
                    annotate(value, f"{path}.")
                elif path in self.origins:
                    is_list = isinstance(value, yaml.SequenceNode) and not value.flow_style
                    lines[(key if is_list else value).end_mark.line] += f"  # {self.origins[path]}"

        annotate(yaml.compose(text), "")
        return "\n".join(lines) + "\n"


def read_files(path: Path, named: str, overrides: Sequence[str] = ()) -> ConfigFiles:
    """Read a configuration file and the files that it extends, and apply overrides.

    Mappings are merged key by key, at every depth; any other value replaces that of the extended
    file. `named` is the name of the file in errors.

    Raises:
        InputError: if a file cannot be read, is not a mapping or extends itself, or for an override
            of another form than ``key.sub=value``.
    """
    trees: dict[Path, dict[str, Any]] = {}
    file = path
    while True:
        tree = fields.load_yaml(file, named)
        trees[file] = tree = {} if tree is None else mapping(tree, named, str(file))
        if EXTENDS not in tree:
            break
        named = f"{file}: {EXTENDS}"
        given = fields.text(tree.pop(EXTENDS), named)
        file = file.parent / Path(given).expanduser()
        if file.resolve() in [other.resolve() for other in trees]:
            problem = "leads back to a file that extends this one"
            raise InputError(named, given, problem, "Remove extends from one of these files")
    merged: dict[str, Any] = {}
    for file, tree in reversed(trees.items()):
        _rebase_link_table(tree, file.parent, path.parent)
        merged = _merged(merged, tree)
    for override in overrides:
        set_key(merged, override)
    if len(trees) == 1:
        return ConfigFiles(merged)
    origins = {
        own: str(file) for file, content in reversed(trees.items()) for own, _ in leaves(content)
    }
    for override in overrides:
        key = override.partition("=")[0]
        origins |= {own: SET for own, _ in leaves(merged) if f"{own}.".startswith(f"{key}.")}
    return ConfigFiles(merged, {own: origins[own] for own, _ in leaves(merged)})


def mapping(value: Any, name: str, shown: Any) -> dict[str, Any]:
    """Return `value` if it is a mapping, else raise `InputError` with `name` and `shown`."""
    if not isinstance(value, dict):
        raise InputError(name, shown, "is not a mapping", "Write key: value lines")
    return value


def set_key(tree: dict[str, Any], override: str) -> None:
    """Set the value of an override ``key.sub=value`` in a mapping.

    Raises:
        InputError: if it has another form, or a part of the key does not hold a mapping.
    """
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise InputError(
            SET,
            override,
            "is not key.sub=value",
            "Write --set KEY=VALUE, such as --set train.steps=200",
        )
    *parents, last = name.split(".")
    if parents[:1] == ["plan"] and isinstance(tree.get("plan"), str):
        # An override may set a key of the mapping that `auto` is short for.
        tree["plan"] = dict(PlanConfig.SHORTHAND.get(tree["plan"], {})) or tree["plan"]
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise InputError(SET, override, f"{parent} is not a section", "Name another key")
    # YAML would parse a glob as an alias, which cannot be defined here.
    tree[last] = text if text.startswith("*") else fields.parse_yaml(text, SET, override)


def _merged(base: Mapping[str, Any], extending: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in extending.items():
        before = base.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            value = _merged(before, value)
        result[key] = value
    return result


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of all values that are not mappings."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _rebase_link_table(tree: Mapping[str, Any], folder: Path, first: Path) -> None:
    """Make the path of a case's link table, in a file of `folder`, relative to `first`."""
    plan = tree.get("plan")
    case = plan.get("case") if isinstance(plan, dict) else None
    if isinstance(case, dict) and str(case.get("links")).endswith(".csv"):
        case["links"] = os.path.relpath(folder / case["links"], first)


T = TypeVar("T")
CONFIG = "config.yaml"
"""File in which a run saves its complete configuration."""

OTHER_TRAINERS_KEYS = {
    "lr": "optimizer.learning_rate",
    "batch_size": "data.microbatch_size",
    "seq_len": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "epochs": "train.steps",
    "num_train_epochs": "train.steps",
    "max_steps": "train.steps",
    "output_dir": "run_dir",
}
"""Keys of other trainers, and the corresponding keys here."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file and the files that it extends, and apply overrides ``key.sub=value``.

    Raises:
        InputError: for unknown keys, wrong types and values out of range.
    """
    files = read_files(path, "--config", overrides)
    with files.naming():
        return parse_config(files.tree)


def load_as(kind: type[T], path: Path, field: str, overrides: Sequence[str] = ()) -> T:
    """Read a YAML file as a dataclass, as `load_config` does; `field` names the file in errors.

    Raises:
        InputError: as `load_config` does.
    """
    files = read_files(path, field, overrides)
    with files.naming():
        return _parse(kind, files.tree, "")


def parse_config(tree: Any, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration that a mapping describes, with preset and shapes filled in.

    Overrides, in the form of `load_config`, are written into the mapping first.
    """
    tree = dict(mapping(tree, "config", tree))
    for override in overrides:
        set_key(tree, override)
    if tree.get("init_from") is not None:
        init_from = fields.text(tree["init_from"], "init_from")
        model, data = tree.get("model", {}), tree.get("data", {})
        tree["model"] = _with_shapes(mapping(model, "model", model), init_from)
        tree["data"] = _with_tokenizer(mapping(data, "data", data), init_from)
    model = tree.get("model") or {}
    if isinstance(model, dict) and "vocabulary_size" not in model:
        vocabulary_size = vocabulary_size_of(tree.get("data") or {})
        if vocabulary_size is not None:
            tree["model"] = model = model | {"vocabulary_size": vocabulary_size}
    if isinstance(model, dict) and model.get("preset") is not None:
        # Shapes from weights and tokenizer are set by now, so they take precedence over the preset.
        preset = fields.text(model["preset"], "model.preset", PRESETS)
        tree["model"] = PRESETS[preset] | model
    if isinstance(tree.get("run_dir"), str):
        tree["run_dir"] = os.path.expanduser(tree["run_dir"])
    return _parse(Config, tree, "")


def _with_shapes(model: dict[str, Any], init_from: str) -> dict[str, Any]:
    """Return the model section, with missing shapes taken from the weights.

    Raises:
        InputError: if it differs from the weights, except in a shorter context.
    """
    if all(key in model for key in SHAPES):
        return model
    origin, hints = parse_init_from(init_from), typing.get_type_hints(ModelConfig)
    folder = origin.folder
    if origin.kind == RUN:
        # A run saves all shapes, so its own `init_from`, which may be deleted, is not read.
        tree = _saved_tree(folder, "init_from")
        file, of_weights = folder / CONFIG, _parse_saved(folder, tree, ["init_from=null"]).model
    else:
        file = folder / MODEL_CONFIG
        of_weights = read_model(folder, "init_from")
    configured = {
        key: _parse(hints[key], model[key], f"model.{key}") for key in SHAPES if key in model
    }
    require_shapes(file, of_weights, configured)
    if origin.kind != RUN:
        require_no_window(folder, configured.get("context", of_weights.context))
    shapes = to_tree(of_weights)
    return {key: shapes[key] for key in (*SHAPES, "initial_deviation")} | model


def _with_tokenizer(data: dict[str, Any], init_from: str) -> dict[str, Any]:
    """Return the data section; its default tokenizer is the one that came with the weights."""
    folder = parse_init_from(init_from).tokenizer
    is_given = data.get("tokenizer") is not None or data.get("source") == "tokens"
    if is_given or not has_tokenizer(folder):
        return data
    return data | {"tokenizer": str(folder)}


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run: its config is written last and marks it."""
    # Unlike Path.exists, this raises no error for a name that is too long.
    return os.path.exists(folder / CONFIG)


def saved_config(folder: Path, field: str, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a run, with overrides; `field` names the folder in errors.

    Raises:
        InputError: if the folder does not hold a run.
    """
    tree = _saved_tree(folder, field)
    saved = _parse_saved(folder, tree)
    return parse_config(tree, overrides) if overrides else saved


def _saved_tree(folder: Path, field: str) -> Any:
    if not is_run(folder):
        problem = f"does not contain a run: {folder.absolute() / CONFIG} does not exist"
        raise InputError(field, str(folder), problem, "Name a run directory")
    path = folder / CONFIG
    return _in_current_keys(fields.load_yaml(path, str(path)))


def _parse_saved(folder: Path, tree: Any, overrides: Sequence[str] = ()) -> Config:
    try:
        return parse_config(tree, overrides)
    except InputError as error:
        raise InputError(
            f"{folder / CONFIG}: {error.field}",
            error.value,
            error.problem,
            "Restore this damaged file of the run, or start another run",
        ) from error


def _in_current_keys(tree: Any) -> Any:
    """Return the saved settings of a run, updated to the keys of this version.

    Removed keys are dropped. Conversations longer than a sequence were split before `data.too_long`
    had a default for them.
    """
    if isinstance(tree, dict):
        # Removed keys are dropped whatever their value: the trained model remains usable.
        tree = {key: without_former_keys(tree[key], key, ignore_values=True) for key in tree}
    data = tree.get("data") if isinstance(tree, dict) else None
    if not isinstance(data, dict) or "too_long" in data:
        return tree
    mixture = data.get("mixture")
    sources = [data, *(mixture if isinstance(mixture, list) else [])]
    if any(isinstance(one, dict) and one.get("source") == "chat" for one in sources):
        return tree | {"data": data | {"too_long": "split"}}
    return tree


def to_tree(config: Any) -> Any:
    """Return the mapping that `parse_config` reads, with every key."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_tree(getattr(config, f.name)) for f in dataclasses.fields(config)}
    return [to_tree(entry) for entry in config] if isinstance(config, tuple) else config


def to_yaml(config: Config) -> str:
    """Return the complete configuration as YAML."""
    import yaml  # Slow to load; see `fields.parse_yaml`.

    return yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True)


def _parse(kind: Any, value: Any, name: str) -> Any:
    """Return `value` as a value of type `kind`; `name` is its path in the tree."""
    if dataclasses.is_dataclass(kind):
        types_of = typing.get_type_hints(kind)
        hints = {field.name: types_of[field.name] for field in dataclasses.fields(kind)}
        shorthand = getattr(kind, "SHORTHAND", {})
        if isinstance(value, str) and value in shorthand:
            value = shorthand[value]
        current = without_former_keys(value, name)
        prefix = f"{name}." if name else ""
        for key in OTHER_TRAINERS_KEYS.keys() & {*current} if isinstance(current, dict) else ():
            if key not in hints:
                remedy = f"Write {OTHER_TRAINERS_KEYS[key]} instead"
                raise InputError(f"{prefix}{key}", current[key], "unknown key", remedy)
        entries = fields.checked_mapping(current, name or "config", hints)
        return typing.cast(Any, kind)(
            **{key: _parse(hints[key], entry, prefix + key) for key, entry in entries.items()}
        )
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _parse_union(arguments, value, name)
    if origin is tuple:
        entries = fields.sequence(value, name)
        return tuple(_parse(arguments[0], entry, f"{name}[{i}]") for i, entry in enumerate(entries))
    if origin is dict:
        entries = mapping(value, name, value)
        return {
            fields.text(key, name): _parse(arguments[1], entry, f"{name}.{key}")
            for key, entry in entries.items()
        }
    if kind is dict:
        return dict(mapping(value, name, value))
    if kind is bool:
        if not isinstance(value, bool):
            raise InputError(name, value, "must be true or false", "Write true or false")
        return value
    if kind is str and isinstance(value, datetime.date):
        value = value.isoformat()  # YAML reads 2026-11-22 as a date.
    if kind is float and name.endswith("_s"):
        return fields.duration(value, name)
    # Sections check the bounds of sizes and counts.
    integer = functools.partial(fields.integer, maximum=fields.MAX_SEED)
    readers = {int: integer, float: fields.number, str: fields.text}
    return readers[kind](value, name)


def _parse_union(kinds: Sequence[Any], value: Any, name: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    choices = [kind for kind in kinds if kind is not type(None)]
    mappings = [kind for kind in choices if dict in (kind, typing.get_origin(kind))]
    if mappings and isinstance(value, dict):
        return _parse(mappings[0], value, name)
    return _parse(choices[0], value, name)
