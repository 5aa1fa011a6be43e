"""The house keeps its order: who imports whom, what stays light, and how long things get."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "skippipe_jax", ROOT / "sched" / "skippipe_sched")
MOST_MODULES_AT_THE_TOP = 15
LONGEST_FILE, LONGEST_CLASS = 450, 250
# Longer ones, and why. Whoever makes one short takes it off the list.
LONG_FILES: dict[str, str] = {}
LONG_CLASSES = {
    "skippipe_jax/cluster/membership.py: Membership": "it is replaced whole, together with the hub",
}
HEAVY = ("jax", "flax", "orbax", "grain")
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_a_room_imports_only_from_lower_floors(capfd: pytest.CaptureFixture[str]):
    kept = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert kept == EXIT_STATUS_SUCCESS, capfd.readouterr().out


@pytest.mark.parametrize(
    "package", ["skippipe_sched", "skippipe_jax.config", "skippipe_jax.program"]
)
def test_what_computes_nothing_on_devices_loads_no_jax(package: str):
    loaded = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, package],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "sched")))},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
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


def test_no_class_is_too_long():
    found = {
        f"{name}: {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for name, text in modules()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    }
    assert {name for name, lines in found.items() if lines > LONGEST_CLASS} == LONG_CLASSES.keys()
