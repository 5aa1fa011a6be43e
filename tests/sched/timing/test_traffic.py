"""What the links carry is what the plan sends."""

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.timing.averaging import averaging_s
from skippipe_sched.timing.traffic import link_traffic, location_traffic, wide_area_bytes

from tests.sched.examples import case_with, outer, planned, policies, routed_cases

GIBIBYTE = 2**30


def test_what_overlaps_on_a_link_is_busy_once():
    # Both forwards leave half a second apart and are under way for one.
    alone, together = (
        planned(
            case_with(
                activation_bytes=0,
                forward_s=0.5,
                contention="none",
                microbatches_per_data_node=count,
            ),
            [[0], [1]],
            [[0, 1]] * count,
        )
        for count in (1, 2)
    )
    assert link_traffic(*alone)[0].busy_s == pytest.approx(2.0)
    there = next(flow for flow in link_traffic(*together) if flow.source == 0)
    spans = sorted((t.start_s, t.end_s) for t in together[1].transfers if t.source == 0)
    assert any(end > start for (_, end), (start, _) in pairwise(spans))
    moments = [0.01 * step for step in range(int(100 * together[1].iteration_s))]
    busy_s = 0.01 * sum(any(start <= m < end for start, end in spans) for m in moments)
    assert there.busy_s == pytest.approx(busy_s, abs=0.05)
    assert there.busy_s < sum(end - start for start, end in spans) - 0.4


@given(routed_cases(), st.none() | policies())
def test_traffic_adds_up(routed, policy):
    """Beside averaging behind the iterations, too, of which an iteration has its part."""
    case, stages, paths = routed
    case = case if policy is None else outer(case, **policy)
    plan, timeline = planned(case, stages, paths)
    flows = link_traffic(plan, timeline)
    assert len({(flow.source, flow.target) for flow in flows}) == len(flows)
    assert [flow.busy_s for flow in flows] == sorted((f.busy_s for f in flows), reverse=True)
    sent = Counter()
    for path in paths:
        for a, b in [*pairwise(path), (path[-1], path[0])] if len(path) > 1 else []:
            sent.update({(a, b): case.activation_bytes})
            sent.update({(b, a): case.gradient_bytes})
    assert {(flow.source, flow.target): flow.bytes for flow in flows if flow.use == "pipeline"} == {
        link: pytest.approx(size) for link, size in sent.items()
    }
    for stage, nodes in enumerate(stages):
        ring = [f for f in flows if f.use == "averaging" and f.source in nodes]
        expected = 2 * (len(nodes) - 1) * case.stage_bytes[stage]
        if policy is not None:
            message = case.averaging.fragment_bytes(case.stage_bytes[stage])
            messages = policy["fragments"] / policy["every"] * len(nodes) * (len(nodes) - 1)
            expected = messages * message
        assert sum(flow.bytes for flow in ring) == pytest.approx(expected)
        following = {flow.source: flow.target for flow in ring}
        assert sorted(following.values()) == sorted(nodes if len(nodes) > 1 else ())
        if len(nodes) > 1:
            order = [nodes[0]]
            while len(order) < len(nodes):
                order.append(following[order[-1]])
            assert max(flow.busy_s for flow in ring) <= averaging_s(case, stage, order) * 1.0001
    assert {flow.use for flow in flows} <= {"pipeline", "averaging"}
    if policy is None:
        assert all(0 <= flow.busy_s <= timeline.iteration_s * 1.0001 for flow in flows)


@given(routed_cases())
def test_traffic_of_locations_is_that_of_their_nodes(routed):
    plan, timeline = planned(*routed)
    members = defaultdict(list)
    for flow in link_traffic(plan, timeline):
        source, target = (plan.case.nodes[n].location for n in (flow.source, flow.target))
        members[source, target, flow.use].append(flow)
    between = location_traffic(plan, timeline)
    assert {(flow.source, flow.target, flow.use) for flow in between} == set(members)
    for flow in between:
        group = members[flow.source, flow.target, flow.use]
        assert flow.bytes == pytest.approx(sum(member.bytes for member in group))
        assert flow.busy_s <= sum(member.busy_s for member in group) * 1.0001
        assert flow.busy_s >= max(member.busy_s for member in group) * 0.9999
    assert wide_area_bytes(plan.case, link_traffic(plan, timeline)) == pytest.approx(
        sum(flow.bytes for flow in between if flow.source != flow.target)
    )


def test_of_fragments_an_iteration_has_its_part():
    """Three replicas send two messages each, of a quarter of the bytes, four times in 20."""
    links = [["a", "b", 100, 1], ["b", "c", 100, 1], ["c", "a", 100, 1]]
    case = case_with(
        nodes=3,
        locations=["a", "b", "c"],
        links=links,
        stages=[3],
        path_length=1,
        stage_bytes=20 * GIBIBYTE,
    )
    case = outer(case, every=20, fragments=4, dtype="float32")
    plan, timeline = planned(case, [[0, 1, 2]], [[0], [1], [2]])
    assert timeline.late_s > 0  # That changes nothing of what is sent.
    flows = link_traffic(plan, timeline)
    assert {flow.use for flow in flows} == {"averaging"}
    assert [flow.bytes for flow in flows] == [pytest.approx(4 / 20 * 2 * 5 * GIBIBYTE)] * 3
    # Two steps of five seconds and a tenth, in every fifth iteration.
    assert [flow.busy_s for flow in flows] == [pytest.approx((2 * 5 + 0.2) / 5)] * 3
    assert wide_area_bytes(case, flows) == pytest.approx(6 * GIBIBYTE)
