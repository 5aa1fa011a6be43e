"""The lower bound: never above the true optimum, reached where it should be, quick on any size."""

import time
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.methods import balanced, make_plan
from skippipe_sched.problem.case import load_case, parse_case
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.bound import lower_bound_s
from skippipe_sched.timing.one_node import NodeWork, busy_s, relaxed_busy_s
from skippipe_sched.timing.simulate import simulate

from tests.sched.examples import PAPER, same_place
from tests.sched.optima import SEEDS, kept_optimum
from tests.sched.optimum import optimum_s, random_small_case, with_connections

ROUNDING = 1 - 1e-12
# Of small cases, and with connections the solver takes longer.
SHARED = (11, 27, 38, 49)
SHARED_NIGHTLY = (5, 8, 14, 17, 19, 23, 30, 34, 35, 37, 42, 43, 46, 47, 48)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_is_never_above_the_optimum(seed):
    case = random_small_case(seed)
    assert lower_bound_s(case, case.path_length) * ROUNDING <= kept_optimum(seed).iteration_s


@pytest.mark.parametrize(
    "seed", [*SHARED, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in SHARED_NIGHTLY)]
)
def test_the_bound_is_never_above_the_optimum_where_connections_are_shared(seed):
    case = with_connections(random_small_case(seed), seed)
    least_s = optimum_s(case)
    assert lower_bound_s(case, case.path_length) * ROUNDING <= least_s
    # A solver that is too strict would be beaten by the search.
    found_s = make_plan(case, "joint", Search(budget_s=0.2)).predicted.iteration_s
    assert least_s * ROUNDING <= found_s


# Where the bound is reached.


@pytest.mark.parametrize("gradient_bytes", [0, 2**28])
def test_the_bound_is_reached_by_one_microbatch_alone(gradient_bytes):
    sizes = {"activation_bytes": 2**26, "gradient_bytes": gradient_bytes}
    case = _on_grid(same_place([1, 1, 1], **sizes))
    assert lower_bound_s(case, 3) == pytest.approx(optimum_s(case))


def _on_grid(case):
    return parse_case({**case.source, "same_location": {"latency_ms": 0, "bandwidth_GiB_per_s": 1}})


@pytest.mark.parametrize("memory", [1, 2, 3])
def test_the_bound_is_reached_by_a_data_node_with_near_and_idle_others(memory):
    case = _on_grid(same_place([1, 3], microbatches_per_data_node=3, memory=memory))
    assert lower_bound_s(case, 2) == pytest.approx(optimum_s(case))


def test_the_bound_is_reached_by_data_nodes_alone():
    case = same_place(
        [3], path_length=1, microbatches_per_data_node=[2, 5, 1], stage_bytes=2**30, forward_s=2
    )
    timeline = simulate(case, [(0, 1, 2)], [(0,)] * 2 + [(1,)] * 5 + [(2,)])
    assert timeline.iteration_s == pytest.approx(lower_bound_s(case, 1))


# The parts, and what the bound follows.


def _every_schedule_s(work):
    """When the last backward ends, over all orders of microbatches that need not come in turn."""
    done = [0] * work.microbatches  # Operations that each has behind it.
    ready = [0.0] * work.microbatches
    lengths = (work.forward_s, work.loss_s, work.backward_s)
    away = (work.away_s, work.away_back_s, 0.0)

    def least(free_s):
        if all(operations == 3 for operations in done):
            return free_s
        best = float("inf")
        for m, operations in enumerate(list(done)):
            in_flight = sum(0 < number < 3 for number in done)
            if operations == 3 or (operations == 0 and in_flight == work.memory):
                continue
            before = ready[m]
            end_s = max(free_s, before) + lengths[operations]
            done[m], ready[m] = operations + 1, end_s + away[operations]
            best = min(best, least(end_s))
            done[m], ready[m] = operations, before
        return best

    return least(0.0)


@given(
    microbatches=st.integers(1, 3),
    memory=st.integers(1, 3),
    seconds=st.lists(st.integers(0, 6), min_size=5, max_size=5),
)
def test_a_busy_node_takes_the_least_of_all_schedules(microbatches, memory, seconds):
    work = NodeWork(microbatches, memory, *map(float, seconds))
    assert busy_s(work) == _every_schedule_s(work)
    assert relaxed_busy_s(work) <= busy_s(work)


def test_too_many_interleavings_give_a_weaker_bound():
    work = NodeWork(200, 12, 0.4, 2.0, 0.1, 3.0, 0.6)
    assert busy_s(work) == relaxed_busy_s(work) >= 200 * 1.1


@pytest.fixture(scope="module")
def paper():
    return load_case(Path(PAPER))


def test_the_bound_of_the_paper_case_is_strong(paper):
    routes = balanced.routes(paper, Search())
    found_s = simulate(paper, routes.stages, routes.paths).iteration_s
    assert 33.0 < lower_bound_s(paper, 4) < found_s


def test_the_bound_of_one_cluster_sees_how_memory_and_work_interleave(paper):
    """Two waves of three microbatches: a bit more than their round trips one after another."""
    cluster = parse_case({**paper.source, "locations": ["Belgium"]})
    hop_s = float(cluster.forward_hop_s[0, 1])
    trip_s = 4 * 0.44 * 2.5 + 0.11 + 8 * hop_s
    away_s, back_s = 4 * hop_s + 3 * 0.44, 4 * hop_s + 3 * 0.66
    work = NodeWork(6, 3, 0.44, away_s, 0.11, back_s, 0.66)
    averaging_s = 8 / 5 * paper.stage_bytes[0] / 2**31 + 8 * 0.001
    assert lower_bound_s(cluster, 4) == pytest.approx(busy_s(work) + averaging_s)
    assert busy_s(work) > 2 * trip_s + 2 * 0.66


@pytest.mark.parametrize(
    ("field", "better", "worse"),
    [
        ("memory", 4, 2),
        ("hop_overhead_s", 0.1, 0.6),
        ("forward_s", 0.3, 0.6),
        ("stage_bytes", 2**26, 2**30),
        ("microbatches_per_data_node", 4, 8),
        ("activation_bytes", 2**20, 2**27),
        ("gradient_bytes", 2**20, 2**27),
    ],
)
def test_the_bound_follows_what_a_case_gets_worse_by(paper, field, better, worse):
    better_s, given_s, worse_s = (
        lower_bound_s(case, 4)
        for case in (
            parse_case({**paper.source, field: better}),
            paper,
            parse_case({**paper.source, field: worse}),
        )
    )
    assert better_s < given_s < worse_s


def _scattered(nodes, places, random):
    """Nodes of many speeds and memories at places of a plane, linked by their distance."""
    spots = random.uniform(0, 100, (places, 2))
    return {
        "nodes": [
            {
                "location": f"place {index % places}",
                "forward_s": float(random.uniform(0.2, 0.9)),
                "memory": int(random.integers(1, 9)),
            }
            for index in range(nodes)
        ],
        "links": [
            [
                f"place {a}",
                f"place {b}",
                float(np.hypot(*(spots[a] - spots[b]))),
                0.01 * (1 + a % 9),
            ]
            for a, b in permutations(range(places), 2)
        ],
    }


@pytest.mark.parametrize("places", [None, 100])
def test_the_bound_of_a_thousand_nodes_takes_seconds(paper, places):
    scattered = _scattered(1000, places, np.random.default_rng(0)) if places else {"nodes": 1000}
    case = parse_case(
        {
            **paper.source,
            "stages": [125] * 8,
            "path_length": 6,
            "microbatches_per_data_node": 48,
            **scattered,
        }
    )
    start_s = time.process_time()
    bound_s = lower_bound_s(case, 6)
    assert time.process_time() - start_s < 15
    # All visits, spread over all nodes, and as if all nodes were the fastest.
    assert bound_s > 48 * 6 / 8 * 2.5 * min(node.forward_s for node in case.nodes)


@pytest.mark.parametrize("seed", range(2))
def test_no_plan_beats_the_bound_where_near_places_count_as_one(paper, seed):
    random = np.random.default_rng(seed)
    case = parse_case({**paper.source, **_scattered(20, 20, random)})
    routes = balanced.routes(case, Search(seed))
    iteration_s = simulate(case, routes.stages, routes.paths).iteration_s
    assert 0 < lower_bound_s(case, 4) <= iteration_s
