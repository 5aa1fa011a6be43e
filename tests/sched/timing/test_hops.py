"""Hops that share the connections of nodes: by hand, and as published."""

import pytest
from skippipe_sched.timing.bound import lower_bound_s
from skippipe_sched.timing.simulate import simulate

from tests.sched.examples import case_with, in_order

GIBIBYTE = 2**30


# By hand.

# A home and two others: an activation of 1 GiB takes its uplink 2 s, and each link 1 s.
HOME = {
    "nodes": [{"uplink_GiB_per_s": 0.5}, {}, {}],
    "locations": ["home", "b", "c"],
    "links": [["home", "b", 1000, 1], ["home", "c", 1000, 1], ["b", "c", 1000, 1]],
    "activation_bytes": GIBIBYTE,
    "gradient_bytes": 0,
    "stages": [1, 2],
    "microbatches_per_data_node": 2,
    "contention": "node",
}


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        pytest.param({}, [(1, 4), (3, 6)], id="the second begins when the first has left"),
        pytest.param({"contention": "link", "nodes": 3}, [(1, 3), (2, 4)], id="not shared"),
        pytest.param({"hop_overhead_s": 0.25}, [(1.25, 4.25), (3.5, 6.5)], id="overhead occupies"),
        pytest.param(
            {"nodes": [HOME["nodes"][0] | {"downlink_GiB_per_s": 0.25}, *HOME["nodes"][1:]]},
            [(1, 6), (5, 10)],
            id="sent no quicker than received",
        ),
        pytest.param(
            {"nodes": [HOME["nodes"][0], {"downlink_GiB_per_s": 0.125}, HOME["nodes"][2]]},
            [(1, 10), (3, 6)],
            id="a slow receiver makes its own hop longer",
        ),
    ],
)
def test_two_hops_of_a_sender(changes, sent):
    """Its forwards end after 1 and 2 s."""
    timeline = simulate(case_with(**HOME | changes), [[0], [1, 2]], [(0, 1), (0, 2)])
    forwards = [own for own in timeline.transfers if (own.source, own.operation.kind) == (0, "F")]
    assert [(own.start_s, own.end_s) for own in forwards] == sent


def test_a_ring_begins_when_the_connections_of_its_replicas_are_empty():
    """The gradients of the inner stage take 8 s to leave, after the last backward."""
    sizes = {"gradient_bytes": GIBIBYTE, "stage_bytes": GIBIBYTE}
    case = case_with(**HOME | sizes | {"nodes": 3, "uplink_GiB_per_s": 0.125})
    timeline = simulate(case, [[0], [1, 2]], [(0, 1), (0, 2)])
    inner = next(own for own in timeline.averagings if own.stage == 1)
    last_s = max(run.end_s for run in timeline.runs if run.operation.node in (1, 2))
    assert inner.start_s == last_s + 8
    # 2 (2-1) / 2 GiB at the eighth of a GiB/s that the connections leave, and 2 s of latency.
    assert inner.end_s - inner.start_s == 8 + 2


# As published: eight ranks in a chain, 200 Mbit/s each, 50 ms for every transfer.


@pytest.mark.parametrize(
    ("microbatches", "activation_bytes", "published_s"),
    [(64, 2048 * 8 * 1024, 100.475), (32, 322 * 16 * 1024, 19.889)],
)
def test_the_published_times_of_a_step_on_home_connections(
    microbatches, activation_bytes, published_s
):
    """All microbatches fit, and computing takes next to nothing, as there."""
    ranks = [f"rank {rank}" for rank in range(8)]
    case = case_with(
        nodes=8,
        locations=ranks,
        links=[[a, b, 0, 100] for place, a in enumerate(ranks) for b in ranks[:place]],
        contention="node",
        uplink_Mbit_per_s=200,
        downlink_Mbit_per_s=200,
        hop_overhead_s=0.05,
        activation_bytes=activation_bytes,
        forward_s=1e-6,
        stages=[1] * 8,
        path_length=8,
        microbatches_per_data_node=microbatches,
        memory=microbatches,
    )
    timeline = simulate(case, in_order([1] * 8), [tuple(range(8))] * microbatches)
    assert timeline.iteration_s == pytest.approx(published_s, rel=0.03)
    # The connection of every rank is busy for most of it, and the bound knows.
    assert lower_bound_s(case, 8) > 0.9 * timeline.iteration_s
