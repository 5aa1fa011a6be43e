"""Cases with nodes that have come, and plans in which they serve."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from skippipe_sched.methods.repair import repair_plan
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.problem.links import GIBIBYTE, Link
from skippipe_sched.problem.node_addition import NewNode, usual_link, with_more_nodes
from skippipe_sched.problem.rules import violations

from tests.sched.examples import plan_of

SOURCE = {
    "nodes": [
        {"location": "Vienna", "forward_s": 0.1, "memory": 3},
        {"location": "Linz", "forward_s": 0.2, "memory": 2},
        {"location": "Linz", "forward_s": 0.3, "memory": 4},
    ],
    "links": [["Vienna", "Linz", 10.0, 1.0], ["Linz", "Vienna", 30.0, 0.25]],
    "same_location": {"latency_ms": 1.0, "bandwidth_GiB_per_s": 2.0},
    "bandwidth_factor": 0.5,
    "activation_bytes": 1e6,
    "stage_bytes": 1e6,
    "stages": [1, 2],
    "path_length": 2,
    "microbatches_per_data_node": 4,
}


def link(case: Case, source: int, target: int) -> Link:
    latency_s, bandwidth = case.link_matrices
    return Link(float(latency_s[source, target]), float(bandwidth[source, target]))


def close(one: Link, other: Link) -> bool:
    return (one.latency_s, one.bandwidth) == pytest.approx((other.latency_s, other.bandwidth))


def test_what_nobody_has_measured_is_like_the_mean():
    case = parse_case(SOURCE)
    usual = usual_link(case)
    assert usual.latency_s == pytest.approx((10 + 10 + 30 + 30 + 1 + 1) / 6e3)
    seconds = np.array([2, 2, 8, 8, 1, 1]) / GIBIBYTE
    assert 1 / usual.bandwidth == pytest.approx(seconds.mean())
    more = with_more_nodes(case, [NewNode("place 3"), NewNode("place 4")])
    assert [node.forward_s for node in more.nodes] == pytest.approx([0.1, 0.2, 0.3, 0.2, 0.2])
    assert [node.memory for node in more.nodes] == [3, 2, 4, 2, 2]
    for pair in ((0, 3), (3, 0), (2, 4), (3, 4), (4, 3)):
        assert close(link(more, *pair), usual)
    # What there was stays.
    assert close(link(more, 0, 1), link(case, 0, 1))
    assert close(link(more, 1, 0), link(case, 1, 0))
    assert close(link(more, 1, 2), link(case, 1, 2))
    assert parse_case(dict(more.source)).nodes == more.nodes


def test_what_was_measured_counts_and_where_several_nodes_are_their_mean():
    case = parse_case(SOURCE)
    new = NewNode(
        "place 3",
        0.05,
        links_to={0: Link(0.1, 100.0)},
        links_from={1: Link(0.2, 100.0), 2: Link(0.4, 300.0)},
    )
    more = with_more_nodes(case, [new])
    assert more.nodes[3].forward_s == 0.05
    assert close(link(more, 3, 0), Link(0.1, 100.0))
    assert close(link(more, 0, 3), usual_link(case))
    for node in (1, 2):
        assert close(link(more, node, 3), Link(0.3, 150.0))
        assert close(link(more, 3, node), usual_link(case))


def test_a_connection_is_that_of_the_quickest_links_and_others_stay():
    nodes = [node | {"uplink_Mbit_per_s": 80} for node in SOURCE["nodes"]]
    case = parse_case(SOURCE | {"nodes": nodes, "contention": "node"})
    links_to = {0: Link(0.1, 100.0), 1: Link(0.1, 300.0)}
    more = with_more_nodes(case, [NewNode("place 3", 0.05, links_to, {2: Link(0.2, 1e9)})])
    assert [node.uplink for node in more.nodes] == [10e6, 10e6, 10e6, pytest.approx(300.0)]
    assert [node.downlink for node in more.nodes] == [np.inf] * 3 + [pytest.approx(1e9)]


def test_a_node_alone_has_links_like_those_within_a_place():
    case = parse_case(SOURCE | {"nodes": SOURCE["nodes"][:1], "stages": [1], "path_length": 1})
    assert usual_link(case) == case.link_table.same_location


def test_the_quick_plan_gives_those_who_have_come_their_share():
    plan = plan_of([[0, 1], [2]], [[0, 2], [0, 2], [1, 2], [1, 2]], path_length=2)
    come = replace(plan, case=with_more_nodes(plan.case, [NewNode("place 3"), NewNode("place 4")]))
    # The first of them is not there, and neither is a data node.
    found = repair_plan(come, [0, 2, 4], ((0,), (2, 4)))
    assert found.method == f"{plan.method}, nodes lost: 1, nodes added: 1"
    assert found.stages == ((0,), (1, 2))
    assert sorted(path[1] for path in found.microbatches) == [1, 1, 2, 2]
    assert [node.location for node in found.case.nodes][2] == "place 4"
    assert not violations(found.case, found.stages, found.microbatches)
    whole = repair_plan(come, [0, 1, 2, 4], ((0, 1), (2, 4)))
    assert whole.method == f"{plan.method}, nodes added: 1"
    alone = repair_plan(plan, [0, 1, 2], ((1, 0), (2,)))
    assert whole.predicted.iteration_s < alone.predicted.iteration_s
