"""Do what pages of the documentation tell a reader to do; the tests do so with every page.

python -m docs.follow tutorial.md concepts.md

takes over the pictures that the pages show: `pictures/tutorial/plan.svg` is what the commands on
tutorial.md write as plan.svg.

On a page, a block with a title (or, of Python, a name in its first line) is a file to save.
Commands are run, except installations and those marked as not run here. What a ``text`` block shows
is what the command above it prints: each of its lines, to its end or to dots. Where it is titled
"for example", numbers may differ. A page marked as coming after another is followed in a copy of
the other's folder.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BLOCK = re.compile(
    r'^(?P<mark><!-- not run here -->\n)?```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n'
    r"(?P<text>.*?)^```$",
    re.M | re.S,
)
AFTER = re.compile(r"^<!-- after: (\S+) -->$", re.M)
NAMED = re.compile(r"# (\S+\.py)\n")
PICTURE = re.compile(r"\]\(pictures/([^)]+)\)")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
EXAMPLE = "for example"
# The reader's machine has one device, and compiles as JAX does by itself.
NOT_THE_READERS = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
PATIENCE_S = 300


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `runs` is false for commands that need other machines."""

    language: str
    title: str | None
    text: str
    runs: bool


@dataclass(frozen=True)
class Answer:
    """What a block of commands has printed."""

    commands: str
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Followed:
    """The folder in which a page was followed, and what each of its blocks of commands printed."""

    folder: Path
    answers: list[Answer]


def read(page: str) -> str:
    """Return the text of a page."""
    return (DOCS / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return [
        Block(found["language"], found["title"], found["text"], found["mark"] is None)
        for found in BLOCK.finditer(read(page))
    ]


def is_followed(page: str) -> bool:
    """Whether a page has commands that are run."""
    return any(map(_is_run, blocks(page)))


def before(page: str) -> str | None:
    """Return the page whose folder this page continues in."""
    found = AFTER.search(read(page))
    return found[1] if found else None


def follow(page: str, folder: Path, programs: Path | None = None) -> list[Answer]:
    """Save the files of a page in `folder`, and run its commands there, in order.

    Programs are looked for in the folder `programs` first, else beside this Python.

    Raises:
        AssertionError: if a command fails, or does not print what the page shows.
    """
    first = [] if programs is None else [str(programs)]
    path = os.pathsep.join([*first, str(Path(sys.executable).parent), os.environ["PATH"]])
    sources = os.pathsep.join(map(str, (ROOT, ROOT / "sched")))
    environment = os.environ | {"PATH": path, "PYTHONPATH": sources, "HF_HUB_OFFLINE": "1"}
    for variable in NOT_THE_READERS:
        environment.pop(variable, None)
    answers: list[Answer] = []
    for block in blocks(page):
        if not block.runs:
            continue
        named = NAMED.match(block.text)
        name = block.title or (named and named[1])
        if block.language == "text":
            assert block.text.strip(), f"{page} shows an empty output of {answers[-1].commands}"
            lacking = list(_not_printed(block, answers[-1]))
            assert not lacking, f"{page} shows {lacking}, but this was printed:\n{answers[-1]}"
        elif _is_run(block):
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
            assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
            answers.append(Answer(block.text, done.stdout, done.stderr))
        elif name is not None:
            (folder / name).write_text(block.text, encoding="utf-8")
    return answers


def pictures(page: str) -> list[str]:
    """Return the pictures on a page that its commands make, as paths below pictures/."""
    own = f"{Path(page).stem}/"
    return [name for name in PICTURE.findall(read(page)) if name.startswith(own)]


def made(picture: str, folder: Path) -> Path:
    """Return the file that the commands of a page wrote for a picture."""
    return min(folder.rglob(Path(picture).name), key=lambda path: len(path.parts))


def _is_run(block: Block) -> bool:
    return block.language == "bash" and block.runs and not block.text.startswith("pip install")


def _not_printed(shown: Block, answer: Answer) -> Iterator[str]:
    """Yield the lines of a block that a command did not print."""

    def plain(line: str) -> str:
        line = " ".join(line.split())
        return NUMBER.sub("0", line) if shown.title == EXAMPLE else line

    printed = [plain(line) for line in (answer.stdout + answer.stderr).splitlines()]
    for line in shown.text.splitlines():
        start, dots, _ = plain(line).partition("...")
        if not any(other.startswith(start) if dots else other == start for other in printed):
            yield line


def main() -> None:
    """Follow pages, and take over their pictures."""
    parser = argparse.ArgumentParser(prog="python -m docs.follow", description=__doc__)
    parser.add_argument("pages", nargs="+", metavar="PAGE.md")
    with tempfile.TemporaryDirectory() as scratch:
        for page in parser.parse_args().pages:
            folder = Path(scratch, page)
            folder.mkdir()
            earlier = before(page)
            if earlier is not None:
                follow(earlier, folder)
            for answer in follow(page, folder):
                print(f"$ {answer.commands}{answer.stdout}{answer.stderr}")
            for picture in pictures(page):
                (DOCS / "pictures" / picture).parent.mkdir(exist_ok=True)
                shutil.copy(made(picture, folder), DOCS / "pictures" / picture)


if __name__ == "__main__":
    main()
