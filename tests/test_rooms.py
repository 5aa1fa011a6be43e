"""The packages keep their order: who imports whom, and how long functions get."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from docs import rooms

ROOT = Path(__file__).parents[1]
PACKAGES = {"skippipe_jax": ROOT, "skippipe_sched": ROOT / "sched"}
MAX_LINES_OF_FUNCTION = 70
MAX_PARAMETERS = 8
# Exceptions, as `module: function`. Nobody adds to them; whoever makes one short takes it off.
LONG_FUNCTIONS = {
    "skippipe_jax.consensus.next_generation: next_generation",
    "skippipe_jax.runtime.stage_functions: _operations",
}
WIDE_SIGNATURES = {
    "skippipe_jax.connections.mesh: Mesh.__init__",
    "skippipe_jax.runtime.runtime: Runtime.__init__",
    "skippipe_jax.runtime.runtime: open_runtime",
}


def test_a_room_imports_only_from_lower_floors():
    """Nor do the planner, the configuration and programs import JAX."""
    checked = subprocess.run(
        [sys.executable, Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "sched")))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    """Yield all functions within a node, each with its qualified name."""
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}{child.name}"
            if not isinstance(child, ast.ClassDef):
                yield name, child
            name += "."
        yield from functions(child, name)


def functions_of_packages() -> Iterator[tuple[str, Function]]:
    for package, root in PACKAGES.items():
        for path in (root / package).rglob("*.py"):
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            yield from functions(ast.parse(path.read_text(encoding="utf-8")), f"{module}: ")


# Before any test runs: once a test has had a RecursionError, Python 3.11 may parse no more.
FUNCTIONS = dict(functions_of_packages())


def parameters_of(function: Function) -> int:
    """Count the parameters of a function, without `self` or `cls`."""
    given = ast.iter_child_nodes(function.args)
    names = [own.arg for own in given if isinstance(own, ast.arg)]
    return len(names) - (names[0] in ("self", "cls") if names else 0)


def test_no_function_is_too_long():
    lengths = {name: (own.end_lineno or 0) - own.lineno + 1 for name, own in FUNCTIONS.items()}
    assert {name for name in lengths if lengths[name] > MAX_LINES_OF_FUNCTION} == LONG_FUNCTIONS


def test_no_signature_has_too_many_parameters():
    found = {name for name, own in FUNCTIONS.items() if parameters_of(own) > MAX_PARAMETERS}
    assert found == WIDE_SIGNATURES


def test_imports_that_are_left_out_are_led_to_by_others():
    imports = rooms.imports_of(rooms.floors_of_contracts())
    shown: dict[rooms.Room, set[rooms.Room]] = {room: set() for room in imports}
    for room, other in rooms.shown_imports(imports):
        shown[room].add(other)

    def reached(room: rooms.Room, by: dict[rooms.Room, set[rooms.Room]]) -> set[rooms.Room]:
        return by[room].union(*(reached(other, by) for other in by[room]))

    assert sum(map(len, shown.values())) < sum(map(len, imports.values()))
    for room in imports:
        assert reached(room, shown) == reached(room, imports)
