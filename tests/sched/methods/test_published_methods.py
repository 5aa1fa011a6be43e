"""The published methods: DT-FM's placement, the full pipeline, random paths, the path search."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched import methods
from skippipe_sched.methods import dtfm, dtfm_skip, full, skippipe
from skippipe_sched.problem.case import load_case, parse_case
from skippipe_sched.problem.plan import stage_of_nodes
from skippipe_sched.problem.rules import violations
from skippipe_sched.search.budget import End, Search
from skippipe_sched.timing.averaging import quickest_averaging_s
from skippipe_sched.timing.simulate import simulate

from tests.sched.examples import PAPER, PUBLISHED, in_order, same_place

PLACEMENT = PUBLISHED.stages
METHODS = {
    name: method.load()
    for name, method in methods.METHODS.items()
    if name not in ("joint", "full-joint", "balanced")
}


def _timeline(case, routes):
    return simulate(case, routes.stages, routes.paths, routes.order)


@pytest.fixture(scope="module")
def paper():
    case = load_case(Path(PAPER))
    dtfm.place(case, Search(budget_s=0.01))  # What it compiles is no searching.
    return case


# DT-FM's placement.


def test_a_placement_that_is_given_is_kept(paper):
    for routes in METHODS.values():
        assert routes(paper, Search(budget_s=0.05, placement=PLACEMENT)).stages == PLACEMENT


@pytest.mark.parametrize(
    ("activation_bytes", "stage_bytes", "spanning"), [(2**30, 0, 3), (0, 2**34, 1)]
)
def test_stages_span_clusters_where_activations_weigh_most_and_not_where_averaging_does(
    activation_bytes, stage_bytes, spanning
):
    """Three nodes a cluster, the even and the odd ones: one stage of two at least spans them."""
    case = same_place(
        [2, 2, 2],
        locations=["east", "west"],
        links=[["east", "west", 10, 0.125]],
        same_location={"latency_ms": 1, "bandwidth_GiB_per_s": 8},
        activation_bytes=activation_bytes,
        stage_bytes=stage_bytes,
    )
    stages = dtfm.place(case, Search(budget_s=0.2))
    assert sum(len({node % 2 for node in nodes}) > 1 for nodes in stages) == spanning


def test_slow_nodes_are_spread_over_the_stages():
    speeds = [1.0, 1.0, 1.0, 4.0, 4.0, 4.0]
    case = same_place([2, 2, 2], nodes=[{"forward_s": s} for s in speeds])
    stages = dtfm.place(case, Search(budget_s=0.2))
    assert [sorted(speeds[node] for node in nodes) for nodes in stages] == [[1.0, 4.0]] * 3


def test_the_data_node_with_the_most_microbatches_is_the_fastest():
    case = same_place(
        [3],
        nodes=[{"forward_s": s} for s in (1.0, 3.0, 2.0)],
        microbatches_per_data_node=[1, 2, 5],
    )
    assert dtfm.place(case, Search(budget_s=0.1)) == ((1, 2, 0),)


def test_the_placement_of_the_paper_averages_sooner_than_the_published_one(paper):
    stages = dtfm.place(paper, Search(budget_s=1.0))
    ours, published = (
        max(quickest_averaging_s(paper, stage, nodes) for stage, nodes in enumerate(placement))
        for placement in (stages, PLACEMENT)
    )
    assert ours < 0.8 * published


@given(data=st.data())
def test_the_estimate_of_a_ring_is_never_above_the_quickest_one_and_exact_for_three(data):
    size = data.draw(st.integers(2, 5))
    latencies = {(a, b): data.draw(st.integers(1, 100)) for a in range(size) for b in range(a)}
    case = same_place(
        [size],
        locations=[str(node) for node in range(size)],
        links=[[str(a), str(b), latency, 1] for (a, b), latency in latencies.items()],
        stage_bytes=2**20,
    )
    nodes = tuple(range(size))
    model = dtfm._model(case)
    estimate_s = dtfm._averaging_s(np.ones(size, dtype=int), 0, model)
    quickest_s = quickest_averaging_s(case, 0, nodes)
    assert estimate_s <= quickest_s * (1 + 1e-9)
    if size <= 3:
        assert estimate_s == pytest.approx(quickest_s)


def test_a_thousand_nodes_are_placed_much_better_than_at_random(paper):
    case = parse_case({**paper.source, "nodes": 1000, "stages": [5] * 200, "path_length": 200})
    stages = dtfm.place(case, Search(budget_s=1.0))
    model = dtfm._model(case)
    shuffled = np.random.default_rng(0).permutation(np.repeat(np.arange(200), 5))
    placed_s = dtfm._cost(dtfm._score(np.array(stage_of_nodes(stages)), model), model)
    assert placed_s < 0.6 * dtfm._cost(dtfm._score(shuffled, model), model)


# All methods.


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_plan(method, paper):
    first, second = (METHODS[method](paper, _Patient(7, budget_s=0.2)) for _ in range(2))
    assert first == second


class _Patient(Search):
    """A search whose clock never stops it: only the number of steps counts."""

    def stopped(self) -> bool:
        return False


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_search_returns_at_once_what_it_has(method, paper):
    search = Search(budget_s=1000.0, end=End(interrupted=True))
    routes = METHODS[method](paper, search)
    assert violations(paper, routes.stages, routes.paths) == []
    assert search.end.cut_short
    assert search.elapsed_s < 5.0


@pytest.mark.parametrize("contention", ["none", "link"])
@pytest.mark.parametrize("method", ["full", "skippipe"])
def test_the_best_plan_is_the_one_that_is_returned(method, contention, paper):
    search = Search(budget_s=0.5, placement=PLACEMENT)
    case = replace(paper, contention=contention)
    assert _timeline(case, METHODS[method](case, search)).iteration_s == search.best_s


# The full pipeline.


def test_the_full_pipeline_is_an_honest_baseline(paper):
    timeline = _timeline(paper, full.routes(paper, Search(budget_s=1.0, placement=PLACEMENT)))
    assert timeline.pipeline_s < 73.0  # Published: 105.28 s.
    assert timeline.iteration_s < 109.5  # Published: 141.8 s.


def test_many_microbatches_are_matched_in_blocks(paper):
    case = parse_case({**paper.source, "microbatches_per_data_node": 60})
    paths = full.matched(case, PLACEMENT, full._first_paths(case, PLACEMENT))
    assert len(paths) > full.MATCHED_AT_ONCE
    assert violations(case, PLACEMENT, paths) == []


# Random balanced paths.


def test_random_paths_differ_from_seed_to_seed_and_have_no_swaps(paper):
    drawn = {
        dtfm_skip.routes(paper, Search(seed, budget_s=0.05, placement=PLACEMENT)).paths
        for seed in range(3)
    }
    assert len(drawn) == 3
    stage_of = stage_of_nodes(PLACEMENT)
    for paths in drawn:
        assert all(stage_of[a] < stage_of[b] for path in paths for a, b in pairwise(path))


def test_random_swaps_are_as_many_as_paths_have_room_for(paper):
    search = Search(budget_s=0.05, placement=PLACEMENT)
    paths = dtfm_skip.routes(paper, search, swaps=True).paths
    stage_of = stage_of_nodes(PLACEMENT)
    stages = [[stage_of[node] for node in path] for path in paths]
    # Two are allowed, but three inner stages have no room for two swaps of neighbours.
    assert {sum(a > b for a, b in pairwise(path)) for path in stages} == {0, 1}
    in_order = replace(paper, rules=replace(paper.rules, max_swaps=0))
    search = Search(budget_s=0.05, placement=PLACEMENT)
    without = dtfm_skip.routes(in_order, search, swaps=True).paths
    assert [sorted(stage_of[node] for node in path) for path in without] == [
        [stage_of[node] for node in path] for path in without
    ]


# The path search.


def test_the_path_search_reaches_the_published_plan(paper):
    search = Search(budget_s=3.0, placement=PLACEMENT)
    timeline = _timeline(paper, skippipe.routes(paper, search))
    assert timeline.pipeline_s <= 33.0


def test_seeing_meetings_helps_where_all_would_take_the_near_node():
    # Both data nodes are near node 2 and only a little farther from node 3.
    case = parse_case(
        {
            **same_place([2, 2]).source,
            "nodes": [{"location": place} for place in ("a", "a", "b", "c")],
            "links": [["a", "b", 100, 1], ["a", "c", 150, 1], ["b", "c", 100, 1]],
            "microbatches_per_data_node": 2,
            "memory": 4,
        }
    )
    placement = in_order((2, 2))
    blind, seeing = (
        _timeline(case, method(case, Search(budget_s=0.5, placement=placement))).iteration_s
        for method in (METHODS["skippipe-no-tc2"], skippipe.routes)
    )
    assert seeing < 0.9 * blind


def test_the_search_keeps_all_rules_where_data_nodes_cannot_keep_one_path_each(paper):
    # Seven microbatches a data node do not fill the replicas evenly: 35 * 3 / 5 = 21 a stage.
    case = parse_case({**paper.source, "microbatches_per_data_node": [7, 7, 6, 5, 5]})
    search = Search(budget_s=2.0, placement=PLACEMENT)
    routes = skippipe.routes(case, search)
    assert violations(case, routes.stages, routes.paths) == []
    at_random = dtfm_skip.random_paths(case, PLACEMENT, np.random.default_rng(0))
    random_s = simulate(case, PLACEMENT, at_random).pipeline_s
    assert _timeline(case, routes).pipeline_s < 0.8 * random_s
