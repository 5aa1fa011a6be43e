"""What the planner makes can be compiled, whatever the method and the case."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.methods import METHODS, make_plan
from skippipe_sched.problem.plan import Plan, Predicted
from skippipe_sched.search.budget import Search

from skippipe_jax.program.compiler import compile_plan
from tests.sched.examples import cases
from tests.sched.optima import SEEDS, kept_optimum
from tests.sched.optimum import random_small_case


@pytest.mark.parametrize("method", METHODS)
@given(case=cases(), seed=st.integers(0, 2**40))
@settings(max_examples=10)
def test_every_plan_has_a_program_for_each_host(method, case, seed):
    try:
        plan = make_plan(case, method, Search(seed, 0.01))
    except InputError:  # The case's jump limit leaves no balanced paths.
        return
    hosts = len(case.nodes)
    assert len(compile_plan(plan, tuple(range(hosts)))) == hosts


@pytest.mark.parametrize("seed", SEEDS)
def test_orders_that_wait_on_purpose_have_programs_too(seed):
    case, best = random_small_case(seed), kept_optimum(seed)
    predicted = Predicted(best.iteration_s, best.iteration_s, 0.0, best.iteration_s)
    plan = Plan("optimum", best.stages, best.paths, best.order, predicted, case)
    assert len(compile_plan(plan, tuple(range(len(case.nodes))))) == len(case.nodes)
