"""Parts of the reference that are written from the code when the site is built.

A page has a comment where such a part belongs, as <!-- generated: configuration -->. What is told
of a key of the configuration is its class's docstring; of a command, its own --help.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import json
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from skippipe_jax.config import Config

MODULES = (
    "skippipe_sched.__main__",
    "skippipe_jax.train",
    "skippipe_jax.launch",
    "skippipe_jax.profile",
    "skippipe_jax.memory",
    "skippipe_jax.evaluate",
    "skippipe_jax.generate",
    "skippipe_jax.harness",
    "skippipe_jax.report",
    "skippipe_jax.tokenize",
    "skippipe_jax.convert",
)
HELP_WIDTH = 92

MARK = re.compile(r"<!-- generated: (\w+) -->")
# One attribute in a docstring: its name, and what is told of it on this line and the ones below.
ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n     +.*)*)", re.M)
NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", dict: "mapping"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for every page: fill in the parts that it asks for."""
    return MARK.sub(
        lambda mark: {"configuration": configuration, "commands": commands}[mark[1]](), markdown
    )


def configuration() -> str:
    """All keys of the configuration, section by section, as Markdown."""
    return "\n".join(_section(kind, name) for name, kind in sections(Config))


def sections(kind: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The dataclasses of a configuration, each with the name of its place, the outer one first."""
    yield name, kind
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        for inner in filter(dataclasses.is_dataclass, _types_within(hints[field.name])):
            yield from sections(inner, f"{name}.{field.name}".lstrip("."))


def _section(kind: Any, name: str) -> str:
    about, told = described(kind)
    hints = typing.get_type_hints(kind)
    rows = [
        f"| `{field.name}` | {_type(hints[field.name], name, field.name)} | {_default(field)} | "
        f"{told[field.name]} |"
        for field in dataclasses.fields(kind)
    ]
    title = f"## `{name}` {{#{_anchor(name)}}}" if name else "## At the top"
    return "\n".join(
        [
            title,
            "",
            about,
            "",
            "| key | holds | default | means |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def described(kind: Any) -> tuple[str, dict[str, str]]:
    """What the docstring of a dataclass tells of it, and of each of its attributes."""
    about, _, attributes = (inspect.getdoc(kind) or "").partition("\n\nAttributes:\n")
    told = {name: " ".join(text.split()) for name, text in ATTRIBUTE.findall(attributes)}
    return about, told


def _anchor(name: str) -> str:
    return name.replace(".", "-").replace("_", "-")


def _parts(hint: Any) -> tuple[Any, ...]:
    """The types that a union or a tuple is made of."""
    return tuple(part for part in typing.get_args(hint) if part is not Ellipsis)


def _types_within(hint: Any) -> Iterator[Any]:
    yield hint
    for part in _parts(hint):
        yield from _types_within(part)


def _type(hint: Any, section: str, key: str) -> str:
    if dataclasses.is_dataclass(hint):
        return f"[section](#{_anchor(f'{section}.{key}'.lstrip('.'))})"
    if hint is types.NoneType:
        return "null"
    parts = [_type(part, section, key) for part in _parts(hint)]
    if typing.get_origin(hint) is tuple:
        return f"list of {parts[0]}"
    return ", ".join(parts[:-1]) + f" or {parts[-1]}" if parts else NAMES[hint]


def _default(field: dataclasses.Field[Any]) -> str:
    return "" if field.default is dataclasses.MISSING else f"`{json.dumps(field.default)}`"


def commands() -> str:
    """What every command says when it is asked for --help, as Markdown."""
    return "\n".join(
        f"## {parser.prog.removeprefix('python -m ')}\n\n```text\n{_help(parser)}```\n"
        for module in MODULES
        for parser in parsers(module)
    )


def parsers(module: str) -> Iterator[argparse.ArgumentParser]:
    """The parser of a command, or those of the commands that it consists of."""
    parser = importlib.import_module(module)._parser()
    inner = [
        command
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for command in action.choices.values()
    ]
    yield from inner or [parser]


def _help(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = functools.partial(parser.formatter_class, width=HELP_WIDTH)  # pyright: ignore[reportCallIssue]
    return parser.format_help()
