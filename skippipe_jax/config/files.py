"""A configuration file with all that it extends, and which of these files says each key."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config.plan import PlanConfig

EXTENDS = "extends"
"""The key of a file, at its top, that names another one: relative to itself."""

SET = "--set"


@dataclass(frozen=True)
class ConfigFiles:
    """What a configuration file and those that it extends say together, and then `--set`.

    Attributes:
        tree: the mapping, without `extends`.
        says: by its path in the mapping, the file that says a value which is no mapping, or
            `SET`; empty where there is one file only.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    says: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Let an `InputError` name the file that says the value, where there are several."""
        try:
            yield
        except InputError as error:
            place = error.field.removeprefix("config.")
            ends = [*(found.start() for found in re.finditer(r"[.\[]", place)), len(place)]
            around = [place[:end] for end in reversed(ends)]
            files = [self.says[one] for one in around if one in self.says] or [
                file for one, file in self.says.items() if one.startswith(f"{place}.")
            ]
            if files in ([], [SET]):
                raise
            named = f"{files[-1]}: {error.field}"
            raise type(error)(named, error.value, error.problem, error.remedy) from error

    def told(self, text: str) -> str:
        """Return the YAML of the whole configuration, each value with the file that says it."""
        import yaml  # Slow to load; see `fields.parse_yaml`.

        lines = text.splitlines()

        def tell(node: yaml.Node, prefix: str) -> None:
            for key, value in node.value:
                place = prefix + key.value
                if isinstance(value, yaml.MappingNode):
                    tell(value, f"{place}.")
                elif place in self.says:
                    is_list = isinstance(value, yaml.SequenceNode) and not value.flow_style
                    lines[(key if is_list else value).end_mark.line] += f"  # {self.says[place]}"

        tell(yaml.compose(text), "")
        return "\n".join(lines) + "\n"


def read_files(path: Path, named: str, overrides: Sequence[str] = ()) -> ConfigFiles:
    """Read a configuration file and those that it extends, and override keys; `named` names it.

    Of two mappings the keys are merged, at every depth; any other value replaces that of the file
    which is extended.

    Raises:
        InputError: if a file cannot be read, is no mapping or extends itself, or for an override
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
            raise InputError(named, given, problem, "Let one of them extend none")
    whole: dict[str, Any] = {}
    for file, tree in reversed(trees.items()):
        _keep_link_table(tree, file.parent, path.parent)
        whole = _merged(whole, tree)
    for override in overrides:
        set_key(whole, override)
    if len(trees) == 1:
        return ConfigFiles(whole)
    told_by = {place: str(file) for file, own in reversed(trees.items()) for place in _places(own)}
    keys = [override.partition("=")[0] for override in overrides]
    is_set = {one for one in _places(whole) if any(f"{one}.".startswith(f"{k}.") for k in keys)}
    says = {one: SET if one in is_set else told_by[one] for one in _places(whole)}
    return ConfigFiles(whole, says)


def mapping(value: Any, name: str, shown: Any) -> dict[str, Any]:
    """Return a mapping; raise `InputError`, naming it `name` and showing `shown`, if it is none."""
    if not isinstance(value, dict):
        raise InputError(name, shown, "is not a mapping", "Write key: value lines")
    return value


def set_key(tree: dict[str, Any], override: str) -> None:
    """Write what ``key.sub=value`` says into a mapping.

    Raises:
        InputError: if it has another form, or a part of the key is none.
    """
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise InputError(SET, override, "is not key.sub=value", "Write --set train.steps=200")
    *parents, last = name.split(".")
    if parents[:1] == ["plan"] and isinstance(tree.get("plan"), str):
        # Of what `auto` stands for a key can be set.
        tree["plan"] = dict(PlanConfig.SHORTHAND.get(tree["plan"], {})) or tree["plan"]
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise InputError(SET, override, f"{parent} holds no keys", "Name another key")
    # A glob would be an alias of YAML, of which there can be none.
    tree[last] = text if text.startswith("*") else fields.parse_yaml(text, SET, override)


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in own.items():
        before = base.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            value = _merged(before, value)
        result[key] = value
    return result


def _places(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The paths of all values that are no mappings."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _places(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _keep_link_table(tree: Mapping[str, Any], folder: Path, first: Path) -> None:
    """Let the link table of a case in a file of `folder` be found from the folder `first`."""
    plan = tree.get("plan")
    case = plan.get("case") if isinstance(plan, dict) else None
    if isinstance(case, dict) and str(case.get("links")).endswith(".csv"):
        case["links"] = os.path.relpath(folder / case["links"], first)
