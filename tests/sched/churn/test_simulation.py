"""A run under churn: by hand to the second, and what holds for all of them."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.churn.policies import POLICIES
from skippipe_sched.churn.simulation import (
    DETECTING,
    DOWN,
    REGROUPING,
    Change,
    ChurnCosts,
    StepSchedule,
    draw_changes,
    simulate_run,
)
from skippipe_sched.churn.sweep import fault_free_steps

from tests.sched.examples import case_with, in_order, planned

GIBIBYTE = 2**30
COSTS = ChurnCosts(
    heartbeat_s=3,
    regroup_s=2,
    restore_s=7,
    restart_s=20,
    save_every=3,
    save_s=4,
    copy_every=2,
    state_factor=3,
)
# Any state of 3 GiB takes 4 s from any node to any other.
LINK = {"latency_ms": 1000, "bandwidth_GiB_per_s": 1}


@cache
def plan_of(*sizes):
    """A plan of one microbatch through all stages, which the runs here do not look into."""
    stages = in_order(sizes)
    case = case_with(
        nodes=sum(sizes),
        locations=["here"],
        links=[],
        same_location=LINK,
        stage_bytes=GIBIBYTE,
        stages=list(sizes),
        path_length=len(sizes),
        memory=9,
    )
    plan, _ = planned(case, stages, [tuple(nodes[0] for nodes in stages)] * sizes[0])
    return plan


def lived(sizes, policy, outages, end_s=150.0, costs=COSTS):
    """A run whose iteration takes 10 s while all nodes are there, and 15 s otherwise."""
    changes = [Change(float(lost), node, is_return=False) for node, lost, _ in outages]
    changes += [Change(float(back), node, is_return=True) for node, _, back in outages]
    nodes = sum(sizes)

    def iteration_s(placement):
        return 10.0 if sum(map(len, placement)) == nodes else 15.0

    return simulate_run(plan_of(*sizes), policy, costs, tuple(sorted(changes)), end_s, iteration_s)


def spent(record):
    return [record.spent_s[kind] for kind in (DETECTING, REGROUPING, DOWN)]


# Steps count at 10, 20, 30; saved by 34; 44. Node 3 is lost at 50, and back at 100.
ONE = [(3, 50, 100)]


@pytest.mark.parametrize("policy", ["stop", "rewind", "average", "skip"])
def test_the_others_go_on_without_one(policy):
    """Noticed at 53, and in 15 s each from 55 on: 70, 85, saved by 89, 104. Then it is taken in, at
    106, and has its state at 110: 120, 130, saved by 134, 144."""
    record = lived([2, 2], policy, ONE)
    assert record.steps == 10
    assert (record.losses, record.returns, record.undone) == (1, 1, 0)
    assert record.recoveries == {}
    assert spent(record) == [3, 2 + 2 + 4, 0]


def test_all_start_again_when_one_is_back():
    """From step 3, at 120: 130, 140, 150."""
    record = lived([2, 2], "restart", ONE)
    assert (record.steps, record.undone, record.returns) == (6, 1, 0)
    assert record.recoveries == {"restart": 1}
    assert spent(record) == [3, 0, 100 - 53 + 20]


# Of stages (0, 1, 2) and (3, 4) the second is lost; noticed at 55, the others go on at 57.
STAGE = [(3, 50, 100), (4, 52, 102)]
BY_HAND = {
    # Node 0 moves; from step 3 at 64 on: 79, 94, 109, saved by 113, when both are taken in, with
    # their state at 119: 129, 139, 149.
    "rewind": (9, 1, {"rewind": 1}, [5, 2 + 7 + 2 + 4, 0]),
    # It is the last stage, which has no two neighbours.
    "average": (9, 1, {"rewind": 1}, [5, 2 + 7 + 2 + 4, 0]),
    # All are there at 102; from step 3 at 122: 132, 142.
    "stop": (5, 1, {"restart": 1}, [5, 2, 102 - 57 + 20]),
    "restart": (5, 1, {"restart": 1}, [5, 0, 102 - 55 + 20]),
    # Node 0 has a copy of step 0, whole with step 2, and moves: 72, 87, saved by 91, 106; both are
    # taken in at 108, with their state at 112: 122, 132, saved by 136, 146.
    "buddy": (10, 0, {"buddy": 1}, [5, 2 + 2 + 4, 0]),
    # 72, 87, saved by 91, 106; both are taken in and read the checkpoint by 115: 125, 135, saved by
    # 139, 149.
    "skip": (10, 0, {"skip": 1}, [5, 2 + 2 + 7, 0]),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_stage_is_lost(policy):
    steps, undone, recoveries, seconds = BY_HAND[policy]
    record = lived([3, 2], policy, STAGE)
    assert (record.steps, record.undone) == (steps, undone)
    assert record.recoveries == recoveries
    assert spent(record) == seconds


def test_who_has_moved_goes_back_to_its_own_stage():
    """Node 0 serves the second stage until others are back that do."""
    plan, seen = plan_of(3, 2), []

    def iteration_s(placement):
        seen.append(placement)
        return 10.0

    changes = [Change(50.0, 3, is_return=False), Change(52.0, 4, is_return=False)]
    changes += [Change(100.0, 4, is_return=True)]
    simulate_run(plan, "rewind", COSTS, tuple(changes), 150.0, iteration_s)
    assert seen == [((0, 1, 2), (3, 4)), ((1, 2), (0,)), ((0, 1, 2), (4,))]


def test_an_inner_stage_becomes_the_mean_of_its_neighbours():
    """A node of the first stage moves, and needs the parameters of the last, a third of a state, in
    2 s. From 57 on: 72, 87, saved by 91, 106, 121, 136.
    """
    record = lived([3, 1, 2], "average", [(3, 50, 1000)])
    assert (record.steps, record.undone, record.recoveries) == (9, 0, {"average": 1})
    assert spent(record) == [3, 2 + 2, 0]


@pytest.mark.parametrize("policy", ["average", "buddy", "skip"])
def test_what_a_policy_cannot_mend_goes_back_to_the_checkpoint(policy):
    """The data stage has none before it, and no path begins elsewhere; its buddy is lost too."""
    sizes, outages = [1, 3, 3], [(0, 50, 1000)]
    if policy == "buddy":
        outages.append((1, 51, 1000))
    record = lived(sizes, policy, outages)
    assert (record.recoveries, record.undone) == ({"rewind": 1}, 1)


@pytest.mark.parametrize(
    ("sizes", "lost", "restarts"),
    [([2, 2], [0, 1], 1), ([3, 3], [0, 1, 2], 1), ([2], [1], 0), ([1, 1, 1], [2], 1)],
    ids=["half of four", "half of six", "half of two", "too few for the stages"],
)
def test_hosts_start_again_if_half_are_lost_unless_there_were_two_or_stages_need_more(
    sizes, lost, restarts
):
    record = lived(sizes, "rewind", [(node, 50, 100) for node in lost])
    assert record.recoveries == {"restart": restarts} if restarts else not record.recoveries
    assert (record.steps == 10) == (not restarts)


def test_who_is_lost_while_others_go_on_is_waited_for_too():
    """Node 5 is lost while a generation forms, node 3 in the first step after that."""
    record = lived([4, 3], "rewind", [(6, 50, 1000), (5, 54, 1000), (3, 64, 1000)], end_s=85.0)
    assert record.losses == 3
    # Noticed from 50 to 53, 54 to 57 and 64 to 67; generations formed until 54, in vain, 59 and 69.
    assert spent(record) == [9, 1 + 2 + 2, 0]
    assert record.steps == 5  # 44, 84.


def test_who_is_lost_while_it_fetches_has_held_nothing():
    """Node 3 is back at 100, taken in at 106, and lost again at 108."""
    outages = [(3, 50, 100), (3, 108, 1000)]
    record = lived([2, 2], "rewind", outages)
    # At 113 again without it: 128, 143.
    assert (record.steps, record.losses, record.recoveries) == (9, 2, {})
    assert spent(record) == [6, 2 + 2 + 2 + 2, 0]


def test_who_is_back_before_it_is_missed_has_lost_its_state():
    record = lived([2, 2], "rewind", [(3, 50, 51)])
    assert (record.losses, record.returns) == (1, 0)
    assert spent(record) == [3, 2 + 4, 0]


def test_the_end_cuts_everything_short():
    assert spent(lived([2, 2], "rewind", ONE, end_s=52.0)) == [2, 0, 0]
    assert spent(lived([2, 2], "rewind", ONE, end_s=54.0)) == [3, 1, 0]
    assert spent(lived([2, 2], "restart", ONE, end_s=110.0)) == [3, 0, 57]
    assert lived([2, 2], "restart", [(3, 50, 1000)], end_s=300.0).steps == 3


seconds = st.sampled_from([0.0, 1.0, 7.5, 60.0])


@st.composite
def costs_of_runs(draw: st.DrawFn) -> ChurnCosts:
    """Noticing a loss takes no less than a checkpoint, which the loss may cut short."""
    heartbeat_s = draw(seconds)
    return ChurnCosts(
        heartbeat_s=heartbeat_s,
        regroup_s=draw(seconds),
        restore_s=draw(seconds),
        restart_s=draw(seconds),
        save_every=draw(st.integers(1, 20)),
        save_s=heartbeat_s * draw(st.sampled_from([0.0, 0.5, 1.0])),
        copy_every=draw(st.integers(1, 20)),
        state_factor=draw(st.sampled_from([0.0, 3.0])),
    )


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    policy=st.sampled_from([*POLICIES]),
    costs=costs_of_runs(),
    mtbf_s=st.sampled_from([100.0, 500.0, 5e3]),
    repair_s=st.sampled_from([0.0, 20.0, 1e3]),
    seed=st.integers(0, 99),
)
def test_goodput_is_between_0_and_1(sizes, policy, costs, mtbf_s, repair_s, seed):
    """Where fewer nodes never make an iteration quicker."""
    plan, end_s = plan_of(*sizes), 2000.0

    def iteration_s(placement):
        assert placement[0]
        assert all(placement) or policy == "skip"
        nodes = [node for stage in placement for node in stage]
        assert len(set(nodes)) == len(nodes)
        return 10.0 + 5.0 * (sum(sizes) - len(nodes))

    changes = draw_changes(sum(sizes), mtbf_s, repair_s, end_s, seed)
    record = simulate_run(plan, policy, costs, changes, end_s, iteration_s)
    assert 0 <= record.steps <= fault_free_steps(10.0, costs, end_s)
    assert record.undone >= 0
    assert min(record.spent_s.values()) >= 0
    assert 10 * (record.steps + record.undone) + sum(record.spent_s.values()) <= end_s + 1e-6
    assert record.losses <= sum(not change.is_return for change in changes)
    calm = simulate_run(plan, policy, costs, (), end_s, iteration_s)
    assert calm.steps == fault_free_steps(10.0, costs, end_s)
    assert (calm.losses, calm.undone, calm.recoveries) == (0, 0, {})


def test_a_copy_is_on_its_way_beside_so_many_steps():
    """A copy of 3 GiB in two parts takes 2.5 s each, hidden by a step; a tenfold one 16 s each, so
    that steps count at 16, 32, 48, and so on."""
    assert lived([3, 2], "buddy", []).steps == 13
    slow = replace(COSTS, state_factor=30, save_s=0)
    assert lived([3, 2], "buddy", [], costs=slow).steps == 9


def test_a_copy_that_is_not_whole_yet_is_none():
    """Of the four steps before the loss, and of the two that a generation had before the next."""
    costs = replace(COSTS, copy_every=5)
    assert lived([3, 2], "buddy", STAGE, costs=costs).recoveries == {"rewind": 1}
    outages = [(0, 25, 1000), (4, 70, 1000), (5, 72, 1000)]
    for copy_every, recovery in ((2, "buddy"), (3, "rewind")):
        costs = replace(COSTS, copy_every=copy_every)
        assert lived([4, 2, 2], "buddy", outages, costs=costs).recoveries == {recovery: 1}


@pytest.mark.parametrize("policy", ["buddy", "average"])
def test_where_the_last_step_is_that_of_the_checkpoint_going_back_costs_nothing(policy):
    record = lived([3, 1, 3], policy, [(3, 40, 1000)])
    assert (record.recoveries, record.undone) == ({"rewind": 1}, 0)


# Faults: Poisson while a node is there, drawn by a seed, the same however many policies ask.


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


# When steps count, and checkpoints are whole: by formula as by going through the steps.

# Eighths of a second, so that sums are exact.
SECONDS = st.integers(0, 80).map(lambda eighths: eighths / 8)


def gone_through(pace, end_s):
    """The steps and the last checkpoint at the end, step by step."""
    time_s, step, saved = pace.start_s, pace.step, None
    while time_s + pace.iteration_s <= end_s:
        time_s, step = time_s + pace.iteration_s, step + 1
        if step % pace.save_every == 0:
            time_s += pace.save_s
            saved = step if time_s <= end_s else saved
    return step, saved


@given(
    start_s=SECONDS,
    step=st.integers(0, 9),
    iteration_s=SECONDS.map(lambda seconds: seconds + 0.125),
    save_every=st.integers(1, 5),
    save_s=SECONDS,
    watched_s=SECONDS,
)
def test_a_pace_is_what_going_through_the_steps_says(
    start_s, step, iteration_s, save_every, save_s, watched_s
):
    pace = StepSchedule(start_s, step, iteration_s, save_every, save_s)
    end_s = start_s + 4 * watched_s
    found = pace.steps_by(end_s), pace.saved_by(end_s)
    assert found == gone_through(pace, end_s)
    free_s = pace.free_after(end_s)
    assert free_s >= end_s
    assert free_s in [pace.free_s(found[0]), pace.free_s(found[0] + 1)]
