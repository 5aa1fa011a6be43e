"""The bound over placements: never above the optimum, never below the quick bound, and tight."""

import math
import statistics
from collections import Counter
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from skippipe_sched.problem.case import load_case, parse_case
from skippipe_sched.problem.rules import violations
from skippipe_sched.timing import placement_bound
from skippipe_sched.timing.averaging import quickest_averaging_s
from skippipe_sched.timing.bound import lower_bound_s
from skippipe_sched.timing.placement_bound import placement_bound_s
from skippipe_sched.timing.simulate import forecast

from tests.sched.examples import PAPER, every_placement, outer, policies, same_place
from tests.sched.optima import SEEDS, kept_optimum
from tests.sched.optimum import optimum, random_small_case

ROUNDING = 1 - 1e-9
# No case here takes nearly as long.
LIMIT_S = 60.0


def bound_between(case, optimum_s):
    """The bound, looked for above the optimum too: there must be none."""
    bound_s = placement_bound_s(case, case.path_length, 2 * optimum_s, LIMIT_S)
    assert lower_bound_s(case, case.path_length) <= bound_s
    assert bound_s * ROUNDING <= optimum_s
    return bound_s


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param([14, 30, 34, 35, 42, 49], id="small"),
        # Every third, so that gradients have bytes of their own in half of them.
        pytest.param(SEEDS[::3], id="more", marks=pytest.mark.nightly),
        pytest.param(SEEDS, id="all", marks=pytest.mark.slow),
    ],
)
def test_it_lies_below_the_known_optima_by_little(seeds):
    gaps = []
    for seed in seeds:
        optimum_s = kept_optimum(seed).iteration_s
        gaps.append(optimum_s / bound_between(random_small_case(seed), optimum_s) - 1)
    assert statistics.mean(gaps) < 0.08


def _small(seed: int) -> bool:
    case = random_small_case(seed)
    return len(case.nodes) <= 3 and sum(case.microbatches) * case.path_length <= 6


SMALL = [seed for seed in range(50, 350) if _small(seed)]


@given(seed=st.sampled_from(SMALL), places=st.integers(1, 3), told_apart=st.sampled_from([0, 4]))
@settings(max_examples=4, deadline=None)
def test_it_is_not_above_the_optimum_of_other_cases(seed, places, told_apart):
    """Nodes of several speeds and memories, some at one place; with and without contention.

    Where inner stages are not told apart it may only be less.
    """
    source = random_small_case(seed).source
    nodes = [node | {"location": f"place {i % places}"} for i, node in enumerate(source["nodes"])]
    same = {"latency_ms": 31.25, "bandwidth_GiB_per_s": 1.0}
    case = parse_case({**source, "nodes": nodes, "same_location": same})
    optimum_s = optimum(case).iteration_s
    bound_s = bound_between(case, optimum_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement_bound, "MOST_DISTINGUISHED", told_apart)
        assert bound_between(case, optimum_s) <= bound_s / (1 - 2 * placement_bound.PRECISION)


@given(policy=policies(), data=st.data())
@settings(max_examples=6, deadline=None)
def test_no_plan_that_averages_behind_iterations_beats_it(policy, data):
    sizes = data.draw(st.sampled_from([[1, 1], [2, 1], [1, 2], [1, 1, 1], [2, 2]]))
    case = same_place(
        sizes,
        nodes=[
            {"location": f"place {i}", "forward_s": data.draw(st.sampled_from([0.5, 1.0, 2.0]))}
            for i in range(sum(sizes))
        ],
        links=[
            [f"place {a}", f"place {b}", data.draw(st.integers(1, 2000)), 0.5]
            for a, b in permutations(range(sum(sizes)), 2)
        ],
        microbatches_per_data_node=2,
        memory=data.draw(st.integers(1, 2)),
        stage_bytes=data.draw(st.sampled_from([0, 2**28, 2**32])),
    )
    case = outer(case, **policy)
    plans_s = [
        forecast(case, stages, paths).iteration_s
        for stages, paths in _full_plans(case)
        if not violations(case, stages, paths)
    ]
    assume(plans_s)
    bound_between(case, min(plans_s))


def _full_plans(case):
    """Every placement and all paths through every stage in order, on any of its replicas."""
    sent = [place for place, count in enumerate(case.microbatches) for _ in range(count)]
    for stages in every_placement(case):
        for routes in product(product(*stages[1:]), repeat=len(sent)):
            yield stages, tuple((stages[0][n], *r) for n, r in zip(sent, routes, strict=True))


# Its parts.


@pytest.fixture(scope="module")
def paper():
    return load_case(Path(PAPER))


def test_it_is_the_quick_bound_where_there_are_too_many_placements(paper, monkeypatch):
    monkeypatch.setattr(placement_bound, "MOST_SETS", 2_000)
    assert placement_bound_s(paper, 4, 44.5, LIMIT_S) == lower_bound_s(paper, 4)


def test_without_time_it_is_the_quick_bound(paper):
    assert placement_bound_s(paper, 4, 44.5, 0.0) == lower_bound_s(paper, 4)


@pytest.mark.nightly
def test_it_lifts_the_bound_of_the_paper_case(paper):
    least_s = lower_bound_s(paper, 4)
    assert placement_bound._Search(paper, 4).proves(36.0, math.inf)
    assert 1.06 * least_s < 36.0


def test_rings_are_the_quickest_of_each_set_of_nodes(paper):
    search = placement_bound._Search(paper, 4)
    of_node = search.classes.of_node
    for stage in (0, 1):
        sets = search.sets[stage]
        for index in np.random.default_rng(0).integers(len(sets.ring_s), size=5):
            left = Counter(dict(enumerate(sets.of_stage[index].tolist())))
            nodes = []
            for node, k in enumerate(of_node.tolist()):
                if left[k] > 0:
                    left[k] -= 1
                    nodes.append(node)
            expected_s = quickest_averaging_s(paper, stage, tuple(nodes))
            assert sets.ring_s[index] == pytest.approx(expected_s)


def test_cheapest_trips_are_those_of_all():
    """The dynamic program against every trip, at random prices and with delays of stages."""
    random = np.random.default_rng(1)
    case = random_small_case(28)
    search = placement_bound._Search(case, case.path_length)
    of = search.classes
    first = search.box(tuple(np.arange(len(sets.ring_s)) for sets in search.sets))
    box = replace(first, delay_s=np.array([1.0, 3.0, 0.5, 2.0]))
    program = placement_bound._Program(search, box, 12.0)
    rows = [
        (start, sequence, way)
        for sequence in of.sequences
        for start, *way in permutations(range(len(of.count)), case.path_length)
    ]
    trips = search.trips_of(*(np.array(part) for part in zip(*rows, strict=True)))
    equal, upper = program.rows_of(trips)
    for _ in range(5):
        prices = placement_bound._Solution(
            0.0,
            np.zeros(0),
            np.zeros(0),
            random.uniform(0, 9, len(program.equal_to)),
            -random.uniform(0, 1, len(program.upper_to)),
        )
        cost_s = -(prices.equal @ equal.toarray() + prices.upper @ upper.toarray())
        least_s, new = search.cheapest(program, prices)
        for k in range(len(of.count)):
            # Paths that visit a node twice, not one after the other, are let pass.
            assert least_s[k] <= cost_s[trips.start == k].min() + 1e-9
        found_s = program.rows_of(new)
        again_s = -(prices.equal @ found_s[0].toarray() + prices.upper @ found_s[1].toarray())
        for k in set(new.start.tolist()):
            assert again_s[new.start == k].min() == pytest.approx(least_s[k])
