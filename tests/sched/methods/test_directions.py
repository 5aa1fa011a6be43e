"""Activations go the quick way of a link, and their gradients, which are smaller, the slow one."""

from itertools import product

import numpy as np
import pytest
from skippipe_sched.methods import dtfm, full
from skippipe_sched.methods.repair import _dealt
from skippipe_sched.methods.skippipe import Constraint, _PathSearch
from skippipe_sched.problem.case import parse_case
from skippipe_sched.search.budget import Search

from tests.sched.examples import TWO_NODES, planned

STAGES = ((0, 1), (2, 3), (4, 5))
# Along these all activations find quick links.
PATHS = ((0, 2, 4), (1, 3, 5))


def directed_case(**changes):
    """Three stages of two nodes; the n-th of each is a quick way on to the n-th of the next.

    Against that way, which also leads from the last stage to the first, and from it to the other
    node of the next stage, links are slow, the later the slower. A gradient has no bytes.
    """
    places = [f"place {node}" for node in range(6)]
    links = dict.fromkeys(product(range(6), repeat=2), 1.0)
    slow = (0.2, 0.1, 0.05)
    for stage, following, gib in zip(STAGES, (*STAGES[1:], STAGES[0]), slow, strict=True):
        for here, there in product(range(2), repeat=2):
            way = (stage[here], following[there])
            links[way if here != there else way[::-1]] = gib
    given = {
        "nodes": 6,
        "locations": places,
        "links": [[places[a], places[b], 100, links[a, b]] for a, b in links if a != b],
        "activation_bytes": 2**30,
        "gradient_bytes": 0,
        "stages": [2, 2, 2],
        "path_length": 3,
    }
    return parse_case(TWO_NODES | given | changes)


def test_matching_follows_the_activations():
    paths = full.matched(directed_case(), STAGES, ((0, 3, 4), (1, 2, 5)))
    assert sorted(paths) == list(PATHS)


def test_the_quickest_path_follows_the_activations():
    quickest = _PathSearch(directed_case(), STAGES, Search(), meetings=True)
    for path in PATHS:
        assert quickest.find(path[0], [], np.zeros(6), 0.0) == path


def test_a_path_is_where_the_simulator_has_it():
    """The other node, which is nowhere quicker, is taken if this one is busy just then."""
    case = directed_case()
    quickest = _PathSearch(case, STAGES, Search(), meetings=True)
    _, timeline = planned(case, STAGES, PATHS)
    runs = [run for run in timeline.runs if run.operation.node in PATHS[0]]
    for run in runs:
        node = frozenset([run.operation.node])
        meeting = Constraint(node, run.start_s + 0.01, run.end_s - 0.01)
        assert quickest._meets(PATHS[0], [meeting], 0.0)
    for run in runs:
        before = Constraint(frozenset([run.operation.node]), run.start_s - 0.02, run.start_s - 0.01)
        idle = not any(
            other.operation.node == run.operation.node
            and other.start_s < before.end_s
            and other.end_s > before.start_s
            for other in runs
        )
        assert quickest._meets(PATHS[0], [before], 0.0) != idle


def test_visits_of_lost_nodes_follow_the_activations():
    plan, _ = planned(directed_case(), STAGES, ((0, 3, 4), (1, 2, 5)))
    dealt = _dealt(plan, {1: {2: 1, 3: 1}}, all_visits=True)
    assert dealt == list(PATHS)


@pytest.mark.parametrize(("activation_bytes", "gradient_bytes"), [(2**30, 0), (0, 2**30)])
def test_dtfm_counts_both_ways(activation_bytes, gradient_bytes):
    """Both take 0.1 s of latency, and the one that has bytes 1 s or 5 s, as the way is."""
    case = directed_case(activation_bytes=activation_bytes, gradient_bytes=gradient_bytes)
    assert dtfm._model(case).round_trip_s[0, 2] == pytest.approx(2 * 0.1 + 3)
