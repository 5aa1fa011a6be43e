"""What the planner loads, and what its tests do."""

import re
import subprocess
import sys
from pathlib import Path

from skippipe_sched.methods import make_plan

from tests.sched.examples import same_place

# Each step loads more. Only the lower bound of `simulate` needs SciPy: for linear programs.
PROGRAM = """
import sys
from pathlib import Path
import skippipe_sched.methods
from skippipe_sched.__main__ import _parser, main

def loads_none_of(*unwanted):
    loaded = {name.partition(".")[0] for name in sys.modules} & set(unwanted)
    assert not loaded, sorted(loaded)

def run(*words):
    sys.argv = ["skippipe_sched", *words]
    assert main() == 0

_parser().format_help()
loads_none_of("numba", "scipy", "jax", "numpy", "yaml", "tqdm")
path = sys.argv[1]
options = [(f"--{name}", f"{path}-{name}") for name in ("output", "flows", "paths", "trace")]
run("plot", path, *(word for option in options for word in option))
loads_none_of("numba", "scipy", "jax")
from skippipe_sched.methods.repair import fill_empty_stages, repair_plan
from skippipe_sched.problem.plan import load_plan
plan = load_plan(Path(path))
repair_plan(plan, {0, 2, 3}, fill_empty_stages(plan, {0, 2, 3}))
loads_none_of("numba", "scipy", "jax")
run("simulate", path, "--jitter", "0.3", "--draws", "2")
loads_none_of("numba", "jax")
"""


def test_only_a_search_compiles_and_only_a_bound_solves(tmp_path):
    plan = tmp_path / "plan.json"
    make_plan(same_place([2, 2]), "balanced").save(plan)
    words = [sys.executable, "-c", PROGRAM, str(plan)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_tests_of_the_planner_import_nothing_of_the_runtime():
    for path in Path(__file__).parent.rglob("*.py"):
        assert not re.search("^ *(import|from) skippipe_jax", path.read_text(), re.MULTILINE), path
