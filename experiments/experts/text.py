"""Text of several domains that every machine has which runs Python with NumPy and SciPy.

    python -m experiments.experts.text runs/experts/text

writes DOMAIN.jsonl for each, a document a line. The same installation gives the same files, another
one other files: the text is the standard library's and that of the packages beside it. Documents
that are equal come once, of long ones the beginning is taken, and of a domain with much text as
many documents as are enough, chosen by their own hashes.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import scipy
from skippipe_sched.errors import run_command

from experiments.benchmarks.harness import reporting
from skippipe_jax.storage.files import atomic_write

LONGEST, SHORTEST = 20_000, 400
"""Characters of a document at most, and at least."""
MOST = 1_200_000
"""Characters of a domain at most, but for its last document."""

STANDARD = Path(sysconfig.get_path("stdlib"))
PACKAGES = Path(sysconfig.get_path("purelib"))
NUMPY, SCIPY = Path(np.__file__).parent, Path(scipy.__file__).parent
NOT_CODE = {"test", "tests", "site-packages", "dist-packages", "idle_test", "encodings"}
LICENCES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")


def standard_modules() -> Iterator[Path]:
    """The modules of the standard library, its tests and tables of characters aside."""
    for path in sorted(STANDARD.rglob("*.py")):
        if not NOT_CODE & set(path.relative_to(STANDARD).parts):
            yield path


def parsed(path: Path) -> ast.Module | None:
    """The syntax tree of a module; None of one for another Python, of which there are some."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return None


def documented(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """What a docstring may belong to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            yield node


def code() -> Iterator[str]:
    """Code of the standard library without comments and docstrings."""
    for tree in filter(None, map(parsed, standard_modules())):
        for node in list(documented(tree)):
            node.body = node.body[1:] or [ast.Pass()]
        yield ast.unparse(tree)


def docstrings() -> Iterator[str]:
    """What the standard library says of itself: a document has the docstrings of a module."""
    for tree in filter(None, map(parsed, standard_modules())):
        yield "\n\n".join(str(ast.get_docstring(node)) for node in documented(tree))


def files(paths: Iterable[Path]) -> Iterator[str]:
    """The texts of files."""
    for path in sorted(paths):
        if path.is_file():
            yield path.read_text(encoding="utf-8", errors="replace")


def manual() -> Iterator[str]:
    """Chapters of Python's reference, as its help() shows them."""
    from pydoc_data.topics import topics

    return (text for _, text in sorted(topics.items()))


# What each domain is: the standard library's tables of characters, headers in C of the interpreter,
# where they are installed, and of NumPy, NumPy's tests, code, what it says of itself, licences of
# Python and of the installed packages, Python's reference, NumPy's types for type checkers, what
# the installed packages say of themselves, and SciPy's code.
DOMAINS: dict[str, Callable[[], Iterable[str]]] = {
    "tables": lambda: files((STANDARD / "encodings").glob("*.py")),
    "headers": lambda: chain(
        files(Path(sysconfig.get_path("include")).rglob("*.h")), files(NUMPY.rglob("*.h"))
    ),
    "tests": lambda: files(NUMPY.rglob("test_*.py")),
    "code": code,
    "docstrings": docstrings,
    "licences": lambda: chain(
        files(STANDARD.glob("LICENSE*")),
        files(
            path
            for path in PACKAGES.glob("*.dist-info/**/*")
            if path.name.upper().startswith(LICENCES)
        ),
    ),
    "manual": manual,
    "stubs": lambda: files(NUMPY.rglob("*.pyi")),
    "descriptions": lambda: files(PACKAGES.glob("*.dist-info/METADATA")),
    "numerical": lambda: files(path for path in SCIPY.rglob("*.py") if "tests" not in path.parts),
}


def shortened(text: str) -> str:
    """The beginning of a text, `LONGEST` characters at most, to the end of a line if there is."""
    return text if len(text) <= LONGEST else text[: text.rfind("\n", 0, LONGEST) + 1 or LONGEST]


def chosen(texts: Iterable[str]) -> list[str]:
    """Different documents of about `MOST` characters in all, the first ones by their hashes."""
    # Of a long text the beginning alone: another piece of it might be held out.
    documents = {shortened(text) for text in texts if len(text) >= SHORTEST}
    by_hash = sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())
    found, size = [], 0
    for text in by_hash:
        if size >= MOST:
            break
        found.append(text)
        size += len(text)
    return found


def write(folder: Path) -> dict[str, int]:
    """Write all domains; returns the characters of each."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {}
    for name, read in DOMAINS.items():
        documents = chosen(read())
        lines = (json.dumps({"text": text}) + "\n" for text in documents)
        atomic_write(folder / f"{name}.jsonl", "".join(lines))
        sizes[name] = sum(map(len, documents))
    return sizes


def main() -> int:
    """Parse the command line and write; returns the exit code."""
    parser = reporting.documented_parser("python -m experiments.experts.text", __doc__)
    parser.add_argument("folder", type=Path, help="output folder of DOMAIN.jsonl")
    arguments = parser.parse_args()
    return run_command(lambda: _run(arguments.folder))


def _run(folder: Path) -> int:
    for name, size in write(folder).items():
        print(f"{name:12s} {size:9,} characters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
