"""The packages keep their order: who imports whom, and how long functions get."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from docs import rooms
from tests.measures import (
    MAX_LINES_OF_FUNCTION,
    MAX_PARAMETERS,
    Function,
    functions,
    imports_of,
    in_cycles,
    lines_of,
    modules,
    parameters_of,
)

ROOT = Path(__file__).parents[1]
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


# Before any test runs: once a test has had a RecursionError, Python 3.11 may parse no more.
MODULES = modules()
FUNCTIONS: dict[str, Function] = {
    f"{module.name}: {name}": function
    for module in MODULES
    for name, function in functions(module.tree)
}


def test_no_function_is_too_long():
    found = {name for name, own in FUNCTIONS.items() if lines_of(own) > MAX_LINES_OF_FUNCTION}
    assert found == LONG_FUNCTIONS


def test_no_modules_import_each_other():
    names = {module.name for module in MODULES}
    assert in_cycles({module.name: imports_of(module, names) for module in MODULES}) == set()


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
