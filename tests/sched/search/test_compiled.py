"""The search is the same whether its kernels are compiled or not, and begins before they are."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.methods import joint, make_plan
from skippipe_sched.problem.case import load_case
from skippipe_sched.problem.plan import load_plan
from skippipe_sched.problem.rules import violations
from skippipe_sched.search.annealer import Annealer, Chain, Round
from skippipe_sched.search.budget import Search
from skippipe_sched.search.compiled import Compilation, interpreting

from tests.sched.examples import PAPER, outer
from tests.sched.optimum import random_small_case, with_connections

BALANCED_S = 83.5


def searched(case) -> Chain:
    own = joint._Joint(case, Search(5))
    chain = own.start(0)
    annealer = Annealer(own.problem, sum(case.microbatches), case.path_length, lambda: False)
    annealer.settle(chain, 4000.0)
    if chain.cost_s == np.inf:  # It locks.
        return chain
    annealer.anneal(chain, Round(1, 1.0, 0.03, 0.003), 40, chain.cost_s)
    annealer.polish(chain, 40)
    return chain


def does_the_same_compiled_or_not(case) -> Chain:
    compiled = searched(case)
    with interpreting():
        interpreted = searched(case)
    assert interpreted.cost_s == compiled.cost_s
    for one, other in zip(interpreted.candidate, compiled.candidate, strict=True):
        assert np.array_equal(one, other)
    for one, other in zip(interpreted.order or (), compiled.order or (), strict=True):
        assert np.array_equal(one, other)
    return compiled


@pytest.mark.parametrize("change", [lambda case: case, outer])
def test_kernels_do_the_same_to_the_bit_compiled_or_not(change):
    compiled = does_the_same_compiled_or_not(change(load_case(Path(PAPER))))
    assert compiled.order is not None


@given(
    st.integers(0, 2**31),
    st.sampled_from([lambda case: case, outer, lambda case: with_connections(case, 0)]),
)
def test_kernels_do_the_same_on_small_cases(seed, change):
    does_the_same_compiled_or_not(change(random_small_case(seed)))


def test_a_method_alone_finds_all_kernels_that_it_calls():
    program = (
        "from pathlib import Path\n"
        "from skippipe_sched.methods import make_plan\n"
        "from skippipe_sched.problem.case import load_case\n"
        "from skippipe_sched.search.budget import Search\n"
        f"make_plan(load_case(Path({str(PAPER)!r})), 'full', Search(budget_s=0.01))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def compile_by(monkeypatch, program: str) -> None:
    """Let this be a machine on which another process compiles by a program in Python."""
    compilation = Compilation(program)
    monkeypatch.setattr(joint, "is_compiled", lambda: False)
    monkeypatch.setattr(joint, "compilation", lambda: compilation)


def cold(monkeypatch, program: str, budget_s: float):
    """A plan on such a machine."""
    compile_by(monkeypatch, program)
    search = Search(1, budget_s, waits_for_compiler=False)
    return make_plan(load_case(Path(PAPER)), "joint", search), search


FIRST_PLAN = """
import sys
from pathlib import Path
from skippipe_sched.methods import joint, make_plan
from skippipe_sched.problem.case import load_case
from skippipe_sched.search import annealing
from skippipe_sched.search.budget import Search
from skippipe_sched.search.compiled import Compilation, is_compiled

def counted(*arguments):
    counted.calls += 1
    return evaluate(*arguments)

counted.calls = 0
evaluate, annealing.evaluate_prepared = annealing.evaluate_prepared, counted
compilation = Compilation("import time; time.sleep(20)")
joint.compilation = lambda: compilation
# In place of a clock.
Search.elapsed_s = property(lambda self: 2.0 if counted.calls >= 250 else 0.0)
assert not is_compiled()
search = Search(1, 2.0, waits_for_compiler=False)
plan = make_plan(load_case(Path(sys.argv[1])), "joint", search)
compilation._process.kill()
assert search.end.interpreted and search.end.cut_short
assert "numba" not in sys.modules
print(counted.calls, plan.predicted.iteration_s)
"""


def test_a_short_search_has_a_plan_before_anything_is_compiled(tmp_path):
    """In a process that finds no compiled code; make_plan refuses a plan that breaks a rule."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_PLAN, PAPER],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    evaluations, iteration_s = map(float, done.stdout.split())
    assert 250 <= evaluations < 300
    assert iteration_s < BALANCED_S


@pytest.mark.parametrize(("waits", "improves"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("program", ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"])
def test_without_a_compiler_the_search_goes_on_and_says_so_once(
    monkeypatch, capsys, program, waits, improves
):
    case = random_small_case(1)
    known = make_plan(case, "balanced") if improves else None
    compile_by(monkeypatch, program)
    search = Search(0, 0.2, begin=known, waits_for_compiler=waits, improves=improves)
    for _ in range(2):
        plan = make_plan(case, "joint", search)
        assert violations(case, plan.stages, plan.microbatches) == []
        if known is not None:
            assert plan.predicted.iteration_s <= known.predicted.iteration_s
        while joint.compilation().succeeded() is None:
            time.sleep(0.01)
    assert search.end.uncompilable
    assert capsys.readouterr().err.count("could not be compiled") == 1


def test_once_all_is_compiled_the_search_is_the_same_as_ever(monkeypatch):
    known = make_plan(load_case(Path(PAPER)), "joint", Search(1, 0.3))
    plan, search = cold(monkeypatch, "", 0.3)
    assert not search.end.interpreted
    assert search.end.cut_short or plan.to_json() == known.to_json()


@pytest.mark.nightly
@pytest.mark.alone
def test_the_first_search_of_a_machine_has_a_plan_in_two_seconds_and_the_compiled_code_stays(
    tmp_path,
):
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}

    def said(*options: str) -> str:
        command = ["plan", str(Path(PAPER)), "-o", str(tmp_path / "plan.json"), *options]
        command = [sys.executable, "-m", "skippipe_sched", *command]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stderr

    start_s = time.monotonic()
    assert "is not compiled yet" in said("--budget", "1")
    assert time.monotonic() - start_s < 1.0 + 2.0  # What is searched, and all around it.
    told = said("--budget", "10")
    assert f"wrote {tmp_path / 'plan.json'}, a first plan with " in told
    assert "compiling the search" in told
    assert load_plan(tmp_path / "plan.json").predicted.iteration_s < float(
        told.partition("a first plan with ")[2].split()[0]
    )
    assert "is not compiled yet" not in said("--budget", "1")
