"""What the planner loads, and what its tests do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from skippipe_sched.methods import make_plan

from tests.sched.examples import same_place

SLOW = ("numba", "scipy", "jax")
PROGRAM = """
import sys
{statements}
loaded = {{name.partition(".")[0] for name in sys.modules}} & set({unwanted!r})
sys.exit(f"loads {{sorted(loaded)}}" if loaded else 0)
"""


def loads_none_of(unwanted: tuple[str, ...], statements: str) -> None:
    program = PROGRAM.format(statements=statements, unwanted=unwanted)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_and_parsers_load_not_even_numpy():
    statements = "import skippipe_sched.methods\nfrom skippipe_sched.__main__ import _parser\n"
    loads_none_of((*SLOW, "numpy", "yaml", "tqdm"), statements + "_parser().format_help()")


def test_drawing_a_plan_compiles_and_solves_nothing(tmp_path):
    plan = str(tmp_path / "plan.json")
    make_plan(same_place([2, 1]), "balanced").save(Path(plan))
    command = ["skippipe_sched", "plot", plan]
    for option in ("--output", "--flows", "--paths", "--trace"):
        command += [option, f"{plan}{option}.svg"]
    statements = f"from skippipe_sched.__main__ import main\nsys.argv = {command!r}\n"
    loads_none_of(SLOW, statements + "assert main() == 0")


def test_simulating_a_plan_compiles_nothing(tmp_path):
    """Only the lower bound needs SciPy: for linear programs."""
    plan = str(tmp_path / "plan.json")
    make_plan(same_place([2, 1]), "balanced").save(Path(plan))
    command = ["skippipe_sched", "simulate", plan, "--jitter", "0.3", "--draws", "2"]
    statements = f"from skippipe_sched.__main__ import main\nsys.argv = {command!r}\n"
    loads_none_of(("numba", "jax"), statements + "assert main() == 0")


def test_going_on_without_a_node_compiles_and_solves_nothing(tmp_path):
    plan = str(tmp_path / "plan.json")
    make_plan(same_place([2, 2]), "balanced").save(Path(plan))
    statements = (
        "from pathlib import Path\n"
        "from skippipe_sched.methods.repair import fill_empty_stages\n"
        "from skippipe_sched.methods.repair import repair_plan\n"
        "from skippipe_sched.problem.plan import load_plan\n"
        f"plan = load_plan(Path({plan!r}))\n"
        "repair_plan(plan, {0, 2, 3}, fill_empty_stages(plan, {0, 2, 3}))\n"
    )
    loads_none_of(SLOW, statements)


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.rglob("*.py")), ids=lambda p: p.stem)
def test_tests_of_the_planner_import_nothing_of_the_runtime(path):
    tree = ast.parse(path.read_text())
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import)
             for alias in node.names]  # fmt: skip
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in names if name.partition(".")[0] == "skippipe_jax"]
