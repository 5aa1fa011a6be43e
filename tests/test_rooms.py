"""The house keeps its order: who imports whom, what stays light, and how long things get."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "skippipe_jax", ROOT / "sched" / "skippipe_sched")
MOST_MODULES_AT_THE_TOP = 15
LONGEST_FILE, LONGEST_CLASS = 480, 350
# Longer ones, and why. Whoever makes one short takes it off the list.
LONG_FILES: dict[str, str] = {}
LONG_CLASSES: dict[str, str] = {}
HEAVY = ("jax", "flax", "orbax", "grain")
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def python(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """What Python says in a process that has imported nothing yet."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "sched")))},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_room_imports_only_from_lower_floors():
    checked = python(Path(sys.executable).with_name("lint-imports"), "--no-cache")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    "package", ["skippipe_sched", "skippipe_jax.config", "skippipe_jax.program"]
)
def test_what_computes_nothing_on_devices_loads_no_jax(package: str):
    done = python("-c", IMPORT_ALL, package)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert package.split(".")[0] in loaded
    assert not {*HEAVY} & {*loaded}


def test_the_top_holds_the_commands_and_the_face_only():
    assert len([*PACKAGES[0].glob("*.py")]) <= MOST_MODULES_AT_THE_TOP


def modules() -> Iterator[tuple[str, str]]:
    """The modules of both packages, by their paths, and their text."""
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            yield path.relative_to(package.parent).as_posix(), path.read_text(encoding="utf-8")


def test_no_file_is_too_long():
    found = {name: len(text.splitlines()) for name, text in modules()}
    assert {name for name, lines in found.items() if lines > LONGEST_FILE} == LONG_FILES.keys()


# Before any test runs: once a test has had a RecursionError, Python 3.11 may parse no more.
LINES_OF_CLASSES = {
    f"{name}: {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
    for name, text in modules()
    for node in ast.walk(ast.parse(text))
    if isinstance(node, ast.ClassDef)
}


def test_no_class_is_too_long():
    too_long = {name for name, lines in LINES_OF_CLASSES.items() if lines > LONGEST_CLASS}
    assert too_long == LONG_CLASSES.keys()
