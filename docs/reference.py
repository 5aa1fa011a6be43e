"""Parts of the documentation that are written from the code: `python -m docs.reference` does it.

Of the pages of configuration and commands it writes what stands below a mark, on the page of
concepts the table of planning methods, and the JSON schema whole. What is told of a key of the
configuration is its class's docstring; of a command, its own --help.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import textwrap
import types
from pathlib import Path

from skippipe_sched.methods import METHODS

from skippipe_jax.cli.main import parser, parsers
from skippipe_jax.config import Config
from skippipe_jax.config.describe import Key, Section, parts, sections, to_text
from skippipe_jax.experts.config import ExpertsConfig

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT / "experiments" / "config.schema.json"
MARK = "<!-- What follows is written by: python -m docs.reference -->\n"
CONCEPTS = ROOT / "docs" / "concepts.md"
METHODS_BEGIN, METHODS_END = (
    "<!-- methods: python -m docs.reference -->\n",
    "<!-- end of methods -->\n",
)
# How the lists of keys are read.
LEGEND = """\
In parentheses: the default, then other values or the type, if not obvious. `null` switches off,
unless the key says otherwise.
"""
# Sections of experts with the keys of a section of a run.
SAME_KEYS = {"domains": "data.mixture"}
HELP_WIDTH = 92
# In the usage of a command, an option that may be left out; in its list, --help itself.
OPTIONAL = re.compile(r" \[-[^][]*(?:\[[^][]*\][^][]*)*\]")
HELP = re.compile(r"^  -h, --help .*\n?", re.M)
# Words of options of an earlier command that a reference to it replaces.
LEAST_REPEATED = 7
# Between two options of a list.
OPTION = re.compile(r"\n(?=  -)")


def main() -> int:
    """Write all that is written from the code, where it is not so already."""
    for path, text in written().items():
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)} is written anew")
    return 0


def written() -> dict[Path, str]:
    """Return the files that are written from the code, and their contents."""
    pages = {
        ROOT / "docs" / "configuration.md": configuration,
        ROOT / "docs" / "commands.md": commands,
        ROOT / "docs" / "experts.md": functools.partial(configuration, ExpertsConfig),
    }
    found = {SCHEMA: to_text()}
    for page, below in pages.items():
        above, mark, _ = page.read_text(encoding="utf-8").partition(MARK)
        found[page] = f"{above}{mark}\n{below()}"
    above, _, rest = CONCEPTS.read_text(encoding="utf-8").partition(METHODS_BEGIN)
    below = rest.partition(METHODS_END)[2]
    found[CONCEPTS] = f"{above}{METHODS_BEGIN}\n{methods()}\n{METHODS_END}{below}"
    return found


def methods() -> str:
    """Return the descriptions of the planning methods, as a Markdown table."""
    rows = [f"| `{name}` | {method.about} |\n" for name, method in METHODS.items()]
    return "".join(["| method | does |\n", "| --- | --- |\n", *rows])


def configuration(kind: type = Config) -> str:
    """Return all keys of a configuration, section by section, as Markdown lists."""
    return "\n".join(map(_section, sections(kind)))


def _section(section: Section) -> str:
    name = section.name
    heading = f"## `{name}`" if name else "## At the top"
    if name in SAME_KEYS:
        of_run = SAME_KEYS[name]
        return f"{heading}\n\nThe keys of [`{of_run}`](configuration.md#{_anchor(of_run)}).\n"
    rows = [
        f"- `{key.name}` ({_value(key)}): {key.about}" for key in section.keys if not key.is_section
    ]
    return "\n".join(
        [
            heading,
            "",
            section.about,
            "",
            *([] if name else [LEGEND]),
            *rows,
            "",
        ]
    )


def _value(key: Key) -> str:
    """Return the default of a key, with the other values or the type that it does not show."""
    default = key.default if key.default and isinstance(key.default, str) else None
    shown = f"`{default or json.dumps(key.default)}`"
    inner = [hint for hint in parts(key.hint) if hint is not types.NoneType]
    more = ""
    if key.choices is not None:
        others = [f"`{word}`" for word in key.choices if word != key.default]
        if any(word not in key.about for word in others):
            more = ", ".join(others)
    elif key.default is None or len(inner) > 1 or (inner and not key.default):
        more = key.kind(f"[section](#{_anchor(key.path)})").removesuffix(" or null")
    return f"{shown}, {more}" if more not in ("", "text") else shown


def _anchor(name: str) -> str:
    return name.replace(".", "")


def commands() -> str:
    """Return the output of --help of every command, as Markdown."""
    shown: dict[str, str] = {}
    return "\n".join(
        f"## {command.prog}\n\n```text\n{_help(command, shown)}```\n"
        for command in parsers(parser())
    )


def _help(parser: argparse.ArgumentParser, shown: dict[str, str]) -> str:
    """Return the --help of a command; an option as of an earlier command refers to that command.

    `shown` has the options of earlier commands as they are written, with the names of these
    commands.
    """
    parser.formatter_class = functools.partial(parser.formatter_class, width=HELP_WIDTH)  # pyright: ignore[reportCallIssue]
    usage, _, rest = parser.format_help().partition("\n\n")
    required = OPTIONAL.sub("", " ".join(usage.split()))
    paragraphs = HELP.sub("", rest).rstrip("\n").split("\n\n")
    paragraphs = [_unshown(paragraph, parser.prog, shown) for paragraph in paragraphs]
    if required != f"usage: {parser.prog}":
        paragraphs.insert(0, required)
    return "\n\n".join(filter(lambda text: text != "options:", paragraphs)) + "\n"


def _unshown(paragraph: str, command: str, shown: dict[str, str]) -> str:
    """Return a paragraph of a help in which options shown earlier refer to their first command."""
    parts = OPTION.split(paragraph)
    options = [" ".join(part.split()) if part.startswith("  -") else "" for part in parts]
    earlier = [shown.setdefault(option, command) if option else command for option in options]
    repeated = {first: [] for first in earlier if first != command}
    for option, first in zip(options, earlier, strict=True):
        if first != command:
            repeated[first].append(option)
    # A reference to less would be as long.
    repeated = {
        first: repeats
        for first, repeats in repeated.items()
        if len(" ".join(repeats).split()) >= LEAST_REPEATED
    }
    lines: list[str] = []
    for part, first in zip(parts, earlier, strict=True):
        if first not in repeated:
            lines.append(part)
        elif (line := _reference(repeated[first], first)) not in lines:
            lines.append(line)
    return "\n".join(lines)


def _reference(options: list[str], command: str) -> str:
    names = ", ".join(re.findall(r"--[\w-]+", option)[0] for option in options)
    return textwrap.fill(
        f"{names}: see {command.removeprefix('skippipe ')}",
        HELP_WIDTH - 2,
        initial_indent="  ",
        subsequent_indent=" " * 8,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    sys.exit(main())
