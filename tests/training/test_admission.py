"""Whether it pays that a host comes, and what it has measured of itself."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import pytest
from skippipe_sched.problem.links import Link
from skippipe_sched.problem.node_addition import NewNode

from skippipe_jax.config import parse_config
from skippipe_jax.connections.link_probe import MeasuredLink
from skippipe_jax.runtime.spread import single
from skippipe_jax.training.elastic import join_measurements as measuring
from skippipe_jax.training.elastic.extra_hosts import extend_case
from skippipe_jax.training.elastic.join_measurements import (
    JoinMeasurements,
    forward_seconds,
    new_nodes,
)
from skippipe_jax.training.elastic.joining import Admission, admission
from tests.sched.examples import plan_of

# Node 0 sends all, and nodes 1 and 2 share what comes after.
PLAN = plan_of([[0], [1, 2]], [[0, 1], [0, 2]] * 3, path_length=2)
HOST_OF = (0, 1, 2, 3, 4)
LINKS = {
    0: MeasuredLink(0.1, 1.0, 1e9),
    1: MeasuredLink(0.1, 1.0, 100.0),
    2: MeasuredLink(0.5, 1.0, 1000.0),
}
SIZES = (1e6, 2000.0)


def coming(members: tuple[int, ...], forward_s: float = 0.001) -> Admission:
    fast = {node: Link(0.0, 1e12) for node in range(3)}
    new = {3: NewNode("place 3", forward_s, links_to=fast, links_from=fast)}
    return admission(PLAN, HOST_OF, 3, members, PLAN.stages, new, LINKS, SIZES)


def test_it_pays_where_what_is_saved_within_the_horizon_is_more_than_what_it_takes():
    found = coming((0, 1, 2))
    assert found.transfer_s == pytest.approx(0.5 + 2000.0 / 1000.0)
    assert 0 < found.saved < 1
    assert found.is_spare
    even_s = found.transfer_s / found.saved
    assert found.pays(1.01 * even_s)
    assert not found.pays(0.99 * even_s)
    told = found.decline_reason(100.0)
    assert "stalls the run 2.5 s" in told
    saved_s = 100 * found.saved
    assert f"({found.saved:.2%}) save {saved_s:.3g} s within join.horizon = 100 s" in told


def test_a_slow_host_saves_nothing():
    found = coming((0, 1, 2), forward_s=1e3)
    assert found.saved == 0.0
    assert not found.pays(1e9)
    assert "join --anyway overrides this" in found.decline_reason(1e9)
    assert found.pays(1e9, anyway=True)


def test_a_stage_of_a_single_host_is_always_worth_another():
    found = coming((0, 1), forward_s=1e3)
    assert not found.is_spare
    assert found.pays(0.0)
    assert found.transfer_s == pytest.approx(0.1 + 2000.0 / 100.0), "the only host that gives it"


@pytest.mark.parametrize("members", [(0, 1, 2), (0, 1)], ids=["of two", "of one"])
def test_it_never_pays_where_no_host_is_reached_that_has_the_state(
    members: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(LINKS, 1)
    monkeypatch.delitem(LINKS, 2)
    found = coming(members)
    assert found.transfer_s == math.inf
    assert not found.pays(1e9)
    assert not found.pays(1e9, anyway=True)
    assert "could not reach a host with the state" in found.decline_reason(1e9)


def test_what_a_host_has_measured_is_kept_told_and_planned_for(tmp_path: Path):
    assert JoinMeasurements.kept(tmp_path) is None
    own = JoinMeasurements(
        {0: MeasuredLink(0.1, 10.0, 20.0), 4: MeasuredLink(0.2, 30.0, 40.0)}, 0.25
    )
    own.keep(tmp_path)
    kept = JoinMeasurements.kept(tmp_path)
    assert kept is not None
    assert JoinMeasurements.parse(kept) == own
    assert JoinMeasurements.parse(own.to_json()) == own
    # Host 0 has nodes 0 and 1, and places 3 and 4 have one each.
    found = new_nodes({3: own, 0: JoinMeasurements()}, (0, 0, 1, 3, 4), 3)
    to = {0: Link(0.1, 10.0), 1: Link(0.1, 10.0), 4: Link(0.2, 30.0)}
    back = {0: Link(0.1, 20.0), 1: Link(0.1, 20.0), 4: Link(0.2, 40.0)}
    assert found == {3: NewNode("place 3", 0.25, links_to=to, links_from=back)}
    plan = extend_case(PLAN, (0, 1, 2, 3, 4), found)
    latency_s, bandwidth = plan.case.link_matrices
    assert (latency_s[4, 3], bandwidth[4, 3]) == pytest.approx((0.2, 40.0))
    assert (latency_s[3, 4], bandwidth[3, 4]) == pytest.approx((0.2, 30.0))
    assert plan.case.nodes[3].forward_s == 0.25
    assert extend_case(PLAN, (0, 1, 2), {}) is PLAN


def test_seconds_are_measured_where_those_of_the_case_were(monkeypatch: pytest.MonkeyPatch):
    small = {"width": 16, "layers": 2, "heads": 2, "kv_heads": 2, "ffn_width": 32, "context": 16}
    data = {"sequence_length": 16, "microbatch_size": 1}
    here = single(jax.local_devices()[0])
    monkeypatch.setattr(measuring, "STAGE_S", 0.0)
    told = parse_config({"model": small, "data": data})
    assert forward_seconds(told, PLAN, 1, here) is None
    config = parse_config({"model": small, "data": data, "plan": "auto"})
    seconds = forward_seconds(config, PLAN, 1, here)
    assert seconds is not None
    assert 0 < seconds < 10
