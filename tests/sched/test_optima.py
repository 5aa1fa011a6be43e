"""The optima that other tests go by are optima, of these very cases."""

import pytest
from skippipe_sched.problem.rules import violations
from skippipe_sched.timing.simulate import simulate

from tests.sched.optima import SEEDS, kept_optimum
from tests.sched.optimum import optimum_s, random_small_case

FEW = (8, 27, 43)


@pytest.mark.parametrize(
    "seed", [s if s in FEW else pytest.param(s, marks=pytest.mark.slow) for s in SEEDS]
)
def test_the_solver_finds_what_is_kept(seed):
    assert optimum_s(random_small_case(seed)) == kept_optimum(seed).iteration_s


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_reaches_what_is_kept(seed):
    case, best = random_small_case(seed), kept_optimum(seed)
    assert violations(case, best.stages, best.paths) == []
    assert simulate(case, best.stages, best.paths, best.order).iteration_s == best.iteration_s


def test_the_optimum_orders_operations_too():
    """Backward first, then first come first served, is not always best on the same paths."""
    case, best = random_small_case(27), kept_optimum(27)
    assert best.iteration_s <= 0.9 * simulate(case, best.stages, best.paths).iteration_s
