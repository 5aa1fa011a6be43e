"""The search is the same whether its kernels are compiled or not, and begins before they are."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from skippipe_sched.methods import joint, make_plan
from skippipe_sched.problem.case import load_case
from skippipe_sched.problem.rules import violations
from skippipe_sched.search.annealer import Annealer, Chain, Round
from skippipe_sched.search.budget import Search
from skippipe_sched.search.compiled import interpreting

from tests.sched.examples import PAPER, outer

BALANCED_S = 83.5


def searched(case) -> Chain:
    own = joint._Joint(case, Search(5))
    chain = own.start(0)
    annealer = Annealer(own.problem, sum(case.microbatches), case.path_length, lambda: False)
    annealer.settle(chain, 4000.0)
    annealer.anneal(chain, Round(1, 1.0, 0.03, 0.003), 40, chain.cost_s)
    annealer.polish(chain, 40)
    return chain


@pytest.mark.parametrize("change", [lambda case: case, outer])
def test_kernels_do_the_same_to_the_bit_compiled_or_not(change):
    case = change(load_case(Path(PAPER)))
    compiled = searched(case)
    with interpreting():
        interpreted = searched(case)
    assert interpreted.cost_s == compiled.cost_s < np.inf
    for one, other in zip(interpreted.candidate, compiled.candidate, strict=True):
        assert np.array_equal(one, other)
    assert interpreted.order is not None
    assert compiled.order is not None
    assert np.array_equal(interpreted.order.operations, compiled.order.operations)


def test_a_method_alone_finds_all_kernels_that_it_calls():
    program = (
        "from pathlib import Path\n"
        "from skippipe_sched.methods import make_plan\n"
        "from skippipe_sched.problem.case import load_case\n"
        "from skippipe_sched.search.budget import Search\n"
        f"make_plan(load_case(Path({str(PAPER)!r})), 'full', Search(budget_s=0.01))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def cold(monkeypatch, compiler: str, budget_s: float):
    """A plan on a machine on which another process compiles by a program in Python."""

    def start_compiling(module: str) -> subprocess.Popen[bytes]:
        assert module == joint.__name__
        return subprocess.Popen([sys.executable, "-c", compiler])

    monkeypatch.setattr(joint, "is_compiled", lambda: False)
    monkeypatch.setattr(joint, "start_compiling", start_compiling)
    search = Search(1, budget_s, waits_for_compiler=False)
    return make_plan(load_case(Path(PAPER)), "joint", search), search


def test_a_short_search_has_a_plan_before_anything_is_compiled(monkeypatch):
    plan, search = cold(monkeypatch, "import time; time.sleep(60)", 2.0)
    assert search.end.interpreted
    assert search.end.cut_short
    assert violations(plan.case, plan.stages, plan.microbatches) == []
    assert plan.predicted.iteration_s < BALANCED_S


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
    assert "was not compiled" in said("--budget", "1")
    assert time.monotonic() - start_s < 1.0 + 2.0  # What is searched, and all around it.
    assert said("--budget", "10") == ""  # It has waited for the other process.
    assert "was not compiled" not in said("--budget", "1")
