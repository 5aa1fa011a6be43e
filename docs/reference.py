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
from pathlib import Path

from skippipe_sched.methods import METHODS

from skippipe_jax.cli.main import parser, parsers
from skippipe_jax.config import Config
from skippipe_jax.config.describe import Section, sections, to_text
from skippipe_jax.experts.config import ExpertsConfig

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT / "experiments" / "config.schema.json"
MARK = "<!-- What follows is written by: python -m docs.reference -->\n"
CONCEPTS = ROOT / "docs" / "concepts.md"
METHODS_BEGIN, METHODS_END = (
    "<!-- methods: python -m docs.reference -->\n",
    "<!-- end of methods -->\n",
)
# Sections of experts with the keys of a section of a run.
SAME_KEYS = {"domains": "data.mixture"}
HELP_WIDTH = 92
# In the usage of a command, an option that may be left out; in its list, --help itself.
OPTIONAL = re.compile(r" \[-[^][]*(?:\[[^][]*\][^][]*)*\]")
HELP = re.compile(r"^  -h, --help .*\n", re.M)


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
    """Return all keys of a configuration, section by section, as Markdown."""
    return "\n".join(map(_section, sections(kind)))


def _section(section: Section) -> str:
    name = section.name
    heading = f"## `{name}` {{#{_anchor(name)}}}" if name else "## At the top"
    if name in SAME_KEYS:
        of_run = SAME_KEYS[name]
        return f"{heading}\n\nThe keys of [`{of_run}`](configuration.md#{_anchor(of_run)}).\n"
    rows = [
        f"| `{key.name}` | {key.kind(f'[section](#{_anchor(key.path)})')} | "
        f"`{json.dumps(key.default)}` | {key.about} |"
        for key in section.keys
        if not key.is_section
    ]
    # A heading below describes each of them.
    links = [f"[`{key.name}`](#{_anchor(key.path)})" for key in section.keys if key.is_section]
    return "\n".join(
        [
            heading,
            "",
            section.about,
            "",
            "| key | holds | default | means |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            *([f"Sections: {', '.join(links)}.", ""] if links else []),
        ]
    )


def _anchor(name: str) -> str:
    return name.replace(".", "-").replace("_", "-")


def commands() -> str:
    """Return the output of --help of every command, as Markdown."""
    shown: dict[str, str] = {}
    return "\n".join(
        f"## {command.prog}\n\n```text\n{_help(command, shown)}```\n"
        for command in parsers(parser())
    )


def _help(parser: argparse.ArgumentParser, shown: dict[str, str]) -> str:
    """Return the --help of a command, without repetitions.

    `shown` has the groups of options of earlier commands, with the names of these commands.
    """
    parser.formatter_class = functools.partial(parser.formatter_class, width=HELP_WIDTH)  # pyright: ignore[reportCallIssue]
    usage, _, rest = parser.format_help().partition("\n\n")
    required = OPTIONAL.sub("", " ".join(usage.split()))
    paragraphs = HELP.sub("", rest).rstrip("\n").split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        title, _, options = paragraph.partition("\n")
        if title.endswith(":") and options.startswith("  -"):
            earlier = shown.setdefault(paragraph, parser.prog)
            if earlier != parser.prog:
                paragraphs[number] = f"{title}\n  as of {earlier}"
    usage = required.replace(parser.prog, f"{parser.prog} [options]")
    return "\n\n".join([usage, *paragraphs]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
