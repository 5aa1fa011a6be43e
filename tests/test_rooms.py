"""The packages keep their order: who imports whom, what stays light, and how long functions get."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.measures import (
    MAX_LINES_OF_FUNCTION,
    MAX_PARAMETERS,
    Function,
    functions,
    lines_of,
    modules,
    parameters_of,
)

ROOT = Path(__file__).parents[1]
# Exceptions, as `module: function`. Nobody adds to them; whoever makes one short takes it off.
LONG_FUNCTIONS = {
    "skippipe_jax.consensus.next_generation: next_generation",
    "skippipe_jax.optim.outer: fragment_functions",
    "skippipe_jax.runtime.stage_functions: stage_functions",
    "skippipe_sched.search.evaluator: evaluate",
    "skippipe_sched.search.evaluator: replay",
}
WIDE_SIGNATURES = {
    "skippipe_jax.cluster.joining: joined",
    "skippipe_jax.connections.mesh: Mesh.__init__",
    "skippipe_jax.runtime.flow: Flow.__init__",
    "skippipe_jax.runtime.runtime: Runtime.__init__",
    "skippipe_jax.runtime.runtime: open_runtime",
    "skippipe_jax.runtime.state: make_states",
    "skippipe_sched.search.anneal_division: trade",
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


# Before any test runs: once a test has had a RecursionError, Python 3.11 may parse no more.
FUNCTIONS: dict[str, Function] = {
    f"{module.name}: {name}": function
    for module in modules()
    for name, function in functions(module.tree)
}


def test_no_function_is_too_long():
    found = {name for name, own in FUNCTIONS.items() if lines_of(own) > MAX_LINES_OF_FUNCTION}
    assert found == LONG_FUNCTIONS


def test_no_signature_has_too_many_parameters():
    found = {name for name, own in FUNCTIONS.items() if parameters_of(own) > MAX_PARAMETERS}
    assert found == WIDE_SIGNATURES
