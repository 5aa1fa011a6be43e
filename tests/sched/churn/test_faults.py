"""Faults: Poisson while a node is there, drawn by a seed, the same however many policies ask."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.churn.simulation import AvailabilityTrace, Change, draw_changes


@given(
    nodes=st.integers(1, 6),
    mtbf_s=st.sampled_from([1.0, 10.0, 1e4]),
    repair_s=st.sampled_from([0.0, 3.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_a_node_is_lost_and_then_back_so_much_later(nodes, mtbf_s, repair_s, seed):
    changes = draw_changes(nodes, mtbf_s, repair_s, 100.0, seed)
    assert list(changes) == sorted(changes, key=lambda change: change.time_s)
    assert all(0 <= change.time_s < 100 for change in changes)
    for node in range(nodes):
        own = [change for change in changes if change.node == node]
        assert [change.is_return for change in own] == [bool(i % 2) for i in range(len(own))]
        for lost, back in zip(own[::2], own[1::2], strict=False):
            assert back.time_s - lost.time_s == pytest.approx(repair_s)
    assert changes == draw_changes(nodes, mtbf_s, repair_s, 100.0, seed)


def test_lives_are_exponential_and_half_as_long_at_half_the_time_between_faults():
    def first_faults_s(mtbf_s):
        changes = draw_changes(400, mtbf_s, 1e9, 1e6, seed=0)
        return np.array([s for s, _ in sorted((c.time_s, c.node) for c in changes)])

    lives_s = first_faults_s(100.0)
    assert len(lives_s) == 400
    # Of an exponential the mean and the standard deviation are the same.
    assert lives_s.mean() == pytest.approx(100, rel=0.1)
    assert lives_s.std() == pytest.approx(100, rel=0.2)
    assert first_faults_s(50.0) == pytest.approx(lives_s / 2)
    assert draw_changes(2, 1.0, 1.0, 10.0, 0) != draw_changes(2, 1.0, 1.0, 10.0, 1)


def test_who_is_there_follows_the_changes():
    hosts = AvailabilityTrace(3, (Change(1.0, 2, is_return=False), Change(4.0, 2, is_return=True)))
    assert (hosts.present, hosts.next_s) == ({0, 1, 2}, 1.0)
    assert hosts.apply_next().node == 2
    assert (hosts.present, hosts.next_s) == ({0, 1}, 4.0)
    hosts.apply_next()
    assert (hosts.present, hosts.next_s) == ({0, 1, 2}, float("inf"))
