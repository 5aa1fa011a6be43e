"""Description of all configuration keys, from docstrings: text, JSON schema, and differences."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from skippipe_sched.problem.case import OPTIONAL, REQUIRED

from skippipe_jax.config.choices import Choice, bounds_of
from skippipe_jax.config.model import PRESETS
from skippipe_jax.config.parsing import EXTENDS, to_tree
from skippipe_jax.config.run import Config

# One attribute in a docstring: its name and its description, on this line and the ones below.
ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n     +.*)*)", re.M)
NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "mapping"}


@dataclasses.dataclass(frozen=True)
class Key:
    """Key of a configuration: type, default as in YAML, description and allowed words.

    `path` is its full name, as ``--set`` takes it.
    """

    name: str
    path: str
    hint: Any
    default: Any
    about: str
    choices: Choice | None

    @property
    def is_section(self) -> bool:
        """True if the key always holds a section."""
        return dataclasses.is_dataclass(self.hint)

    def kind(self, section: str = "section") -> str:
        """Return the type in words; `section` is the word for a section."""
        return _type_in_words(self.hint, section, self.choices)


@dataclasses.dataclass(frozen=True)
class Section:
    """Section of a configuration: path (empty for the outermost), description and keys."""

    name: str
    about: str
    keys: tuple[Key, ...]


def sections(kind: Any = Config, name: str = "") -> Iterator[Section]:
    """Return the section that a dataclass describes, at path `name`, and all nested ones."""
    about, descriptions = described(kind)
    hints, bounds = typing.get_type_hints(kind), bounds_of(kind)
    keys = tuple(
        Key(
            name=field.name,
            path=f"{name}.{field.name}".lstrip("."),
            hint=hints[field.name],
            default=to_tree(
                field.default
                if field.default_factory is dataclasses.MISSING
                else field.default_factory()
            ),
            about=descriptions[field.name],
            choices=own if isinstance(own := bounds.get(field.name), Choice) else None,
        )
        for field in dataclasses.fields(kind)
    )
    yield Section(name, about, keys)
    for key in keys:
        for inner in filter(dataclasses.is_dataclass, types_within(key.hint)):
            yield from sections(inner, key.path)


def described(kind: Any) -> tuple[str, dict[str, str]]:
    """Return the description of a dataclass and of each of its attributes."""
    about, _, attributes = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
    return about, {name: " ".join(text.split()) for name, text in ATTRIBUTE.findall(attributes)}


def types_within(hint: Any) -> Iterator[Any]:
    """Return a type and all types that it contains."""
    yield hint
    for part in parts(hint):
        yield from types_within(part)


def parts(hint: Any) -> tuple[Any, ...]:
    """Return the types that a union or a tuple contains."""
    return tuple(part for part in typing.get_args(hint) if part is not Ellipsis)


def describe_keys() -> str:
    """Return all keys as text, each with type, default and description."""
    lines = []
    for key in (key for section in sections() for key in section.keys):
        value = "" if key.is_section else f" = {json.dumps(key.default)}"
        lines.append(f"{key.path}{value}\n    {key.kind()}: {key.about}")
    return "\n".join(lines)


def _type_in_words(hint: Any, section: str, choices: Choice | None) -> str:
    if dataclasses.is_dataclass(hint):
        return section
    if hint is types.NoneType:
        return "null"
    if hint is str and choices is not None:
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    inner = [_type_in_words(part, section, choices) for part in parts(hint)]
    if typing.get_origin(hint) is dict:
        return f"mapping to {inner[1]}"
    if typing.get_origin(hint) is tuple:
        return f"list of {inner[0]}{'s' * (int in parts(hint))}"
    return ", ".join(inner[:-1]) + f" or {inner[-1]}" if inner else NAMES[hint]


# The last two belong to a case that leaves stages or path lengths open.
CASE_KEYS = (*REQUIRED, *OPTIONAL, "stage_count", "skip_ratio")
DRAFT = "https://json-schema.org/draft/2020-12/schema"
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


def schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of the whole configuration."""
    by_name = {section.name: section for section in sections()}

    def of_section(kind: Any, path: str) -> dict[str, Any]:
        as_object = {
            "type": "object",
            "description": by_name[path].about,
            "properties": {key.name: of_key(key) for key in by_name[path].keys},
            "additionalProperties": False,
        }
        shorthands = list(getattr(kind, "SHORTHAND", ()))
        return {"anyOf": [{"enum": shorthands}, as_object]} if shorthands else as_object

    def of_key(key: Key) -> dict[str, Any]:
        default = {} if key.is_section else {"default": key.default}
        return {"description": key.about} | default | of_type(key.hint, key.path, key.choices)

    def of_type(hint: Any, path: str, choices: Choice | None) -> dict[str, Any]:
        if dataclasses.is_dataclass(hint):
            return of_section(hint, path)
        if hint is str and choices is not None:
            return {"enum": list(choices)}
        if hint is dict:
            return {"type": "object", "propertyNames": {"enum": list(CASE_KEYS)}}
        inner = [of_type(part, path, choices) for part in parts(hint)]
        if typing.get_origin(hint) is tuple:
            return {"type": "array", "items": inner[0]}
        if hint is float and path.endswith("_s"):
            return {"type": ["number", "string"]}
        return {"anyOf": inner} if inner else {"type": TYPES[hint]}

    root = of_section(Config, "")
    about = "path, relative to this file, of a base file for the keys that this file does not set"
    root["properties"][EXTENDS] = {"description": about, "type": "string"}
    return {"$schema": DRAFT, "title": "Configuration of a run"} | root


def to_text() -> str:
    """Return the schema as the text of its file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def differences(config: Config) -> dict[str, Any]:
    """Return the keys that differ from the defaults, as a mapping that yields the configuration.

    Shapes from a model preset are left out.
    """
    default = to_tree(Config())
    if config.model.preset is not None:
        default["model"] |= PRESETS[config.model.preset]
    return _different(to_tree(config), default)


def summary(config: Config) -> str:
    """Return the differences from the defaults as YAML, with the path of the complete one."""
    shown = yaml.safe_dump(
        differences(config), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )
    return f"# Settings that differ from the defaults (all: {config.run_dir}/config.yaml)\n{shown}"


def _different(tree: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    changed = {}
    for key, value in tree.items():
        unset = default[key]
        if isinstance(value, dict) and isinstance(unset, dict):
            if inner := _different(value, unset):
                changed[key] = inner
        elif value != unset:
            changed[key] = value
    return changed
