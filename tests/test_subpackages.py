"""The packages keep their order: who imports whom, and how long functions get."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from docs import subpackages
from docs.subpackages import Subpackage
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


def test_a_sub_package_imports_only_from_lower_layers():
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
    imports = subpackages.imports_of(subpackages.layers_of_contracts())
    shown: dict[Subpackage, set[Subpackage]] = {own: set() for own in imports}
    for own, other in subpackages.shown_imports(imports):
        shown[own].add(other)

    def reached(own: Subpackage, by: dict[Subpackage, set[Subpackage]]) -> set[Subpackage]:
        return by[own].union(*(reached(other, by) for other in by[own]))

    assert sum(map(len, shown.values())) < sum(map(len, imports.values()))
    for own in imports:
        assert reached(own, shown) == reached(own, imports)
