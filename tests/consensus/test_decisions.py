"""The rules by which hosts agree, under losses of messages and hosts at every point.

What hypothesis drives is the pure core alone: a network that loses, delays, doubles and reorders
messages, hosts that crash, are started again, and suspect each other wrongly.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from skippipe_jax.consensus.decisions import advance, first_state
from skippipe_jax.consensus.generations import (
    Abandoned,
    Decided,
    Enter,
    Generation,
    Heartbeat,
    PlanRequest,
    Presence,
    Promise,
    Received,
    RolledBack,
    Told,
)
from skippipe_jax.consensus.next_generation import (
    HEARTBEATS_BEFORE_LEAVING,
    is_the_end,
    next_generation,
)
from tests.consensus.simulation import (
    KINDS,
    Simulation,
    covers,
    generations,
    last_of,
    lose,
    lose_all,
    pass_time,
    require_goes_on,
    restart,
    run,
    serves,
    step,
    stepped,
    tell_to_leave,
    tick,
)

ACTIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 63), st.integers(0, 7)), max_size=400
)


# Hosts 1 and 2 of four serve each other's stages.
SWAPPED = ((0, 1), (2, 3))


def check(
    hosts: int, actions: list[tuple[str, int, int]], *, rewinds: bool, extra_hosts: int = 0
) -> None:
    """Let all of it happen, and then let those go on that can."""
    simulation = Simulation(
        hosts, rewinds=rewinds, extra_hosts=extra_hosts, moves_to_safety=hosts + extra_hosts > 3
    )
    for action in actions:
        simulation.act(*action)
        if simulation.has_ended:
            return
    require_goes_on(simulation)


@pytest.mark.parametrize(("hosts", "extra_hosts"), [(2, 0), (3, 0), (4, 0), (5, 0), (2, 2), (3, 2)])
@settings(max_examples=40)
@given(actions=ACTIONS, rewinds=st.booleans())
def test_hosts_agree_whatever_is_lost(
    hosts: int, extra_hosts: int, actions: list[tuple[str, int, int]], rewinds: bool
):
    check(hosts, actions, rewinds=rewinds, extra_hosts=extra_hosts)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 3, 4, 5])
@settings(max_examples=2500)
@given(actions=ACTIONS, rewinds=st.booleans())
def test_hosts_agree_whatever_is_lost_ten_thousand_times(
    hosts: int, actions: list[tuple[str, int, int]], rewinds: bool
):
    check(hosts, actions, rewinds=rewinds)


HOST = st.integers(0, 4)


NOTHING = {"idle": set(), "wish": None, "told": None, "lost": None, "back": None}
ROUNDS = st.lists(
    st.fixed_dictionaries(
        {
            "idle": st.sets(HOST, max_size=2),
            "wish": st.none() | st.integers(0, 20),
            "told": st.none() | st.none() | HOST,
            "lost": st.none() | st.none() | HOST,
            "back": st.none() | HOST,
        }
    ),
    max_size=16,
)


@pytest.mark.parametrize("hosts", [2, 3, 5])
@settings(max_examples=60)
@given(rounds=ROUNDS, rewinds=st.booleans())
@example(rounds=[NOTHING, NOTHING | {"lost": 1, "back": 1}, NOTHING | {"lost": 2}], rewinds=False)
def test_stages_move_whoever_is_lost_meanwhile(
    hosts: int, rounds: list[dict[str, Any]], rewinds: bool
):
    """In each round leaders wish for other placements, and some have not taken what they lack."""
    simulation = Simulation(hosts, rewinds=rewinds, moves_to_safety=True)
    for happens in rounds:
        for host in [*simulation.live]:
            if happens["wish"] is not None:
                simulation.wish(host, happens["wish"])
        if happens["told"] is not None:
            simulation.tell(happens["told"], Told())
        for host in [*simulation.live]:
            if host not in happens["idle"]:
                simulation.hold(host)
        simulation.settle()
        if happens["lost"] is not None:
            lose(simulation, happens["lost"])
        if happens["back"] is not None and happens["back"] < hosts:
            restart(simulation, happens["back"])
        simulation.settle()
        if simulation.has_ended:
            return
    require_goes_on(simulation)


def test_hosts_beside_those_of_the_start_come_and_go():
    """Nobody waits for a place that was never taken, or misses who was never there."""
    simulation = stepped(2, extra_hosts=2)
    assert simulation.decided[1].members == (0, 1)
    simulation.start(3, is_diskless=True)
    simulation.calm(10)
    second = simulation.decided[2]
    assert (second.members, second.fresh, second.diskless) == ((0, 1, 3), (3,), (3,))
    assert second.cause == "host 3 joined"
    assert second.placement == ((0,), (1, 3))
    assert second.holders == ((0,), (1,))
    # Two of three are most, whichever these are.
    lose(simulation, 1)
    simulation.calm(10)
    third = simulation.decided[3]
    assert (third.members, third.placement) == ((0, 3), second.placement)
    assert third.holders == ((0,), (3,))
    simulation.start(2)
    simulation.calm(10)
    assert simulation.decided[4].members == (0, 2, 3)
    assert simulation.decided[4].cause == "host 2 joined", "it reaches the run folder, and is new"
    assert generations(simulation) == {4}
    assert len(simulation.live[2].applied) > simulation.decided[4].step


def test_a_minority_does_nothing():
    simulation = stepped(5)
    before = generations(simulation)
    for lost in (0, 1, 2):
        lose(simulation, lost)
    pass_time(simulation, 5)
    assert generations(simulation) == before
    assert {len(own.applied) for own in simulation.live.values()} == {1}


def test_of_two_hosts_one_goes_on_by_storage_alone():
    simulation = stepped(2)
    for host in (0, 1):
        simulation.tell(host, Presence(1 - host, is_there=False))
    tick(simulation)
    assert simulation.store[2].members == (0,)
    assert simulation.live[0].state.number == 2
    assert simulation.live[1].state.number == 0, "left out by what is stored"


def test_a_lost_stage_ends_the_run_or_takes_it_back():
    for rewinds in (True, False):
        simulation = stepped(4, rewinds=rewinds)
        simulation.save(0)
        step(simulation)
        lose_all(simulation, 1)
        assert simulation.decided[2].step == 2, "host 3 holds the stage of host 1"
        third = lose_all(simulation, 3)
        assert (third.is_rewound, third.is_last, third.step) == (rewinds, not rewinds, 1)
        assert simulation.has_ended == (not rewinds)
        if rewinds:
            assert covers(third.placement, frozenset({0, 2}))
            assert {len(own.applied) for own in simulation.live.values()} == {1}


def rewound() -> tuple[Simulation, Generation]:
    """Hosts 0 and 2 are left of four, and go back to the checkpoint of the first of two steps."""
    simulation = stepped(4)
    simulation.save(0)
    step(simulation)
    lose_all(simulation, 1)
    third = lose_all(simulation, 3)
    assert (third.members, third.is_rewound, third.step) == ((0, 2), True, 1)
    return simulation, third


def test_all_go_back_further_where_the_checkpoint_is_damaged():
    simulation, third = rewound()
    for host in third.members:
        simulation.tell(host, RolledBack(third.number, 0))
        own = simulation.live[host]
        own.applied, own.stages = [], {stage: [] for stage in own.served}
    step(simulation, *third.members)
    assert {len(own.applied) for own in simulation.live.values()} == {1}, "step 1 is made again"
    assert all(own.state.standing.saved == 0 for own in simulation.live.values())


def test_who_has_gone_back_further_than_others_goes_on_with_them():
    """It goes back with them again, by what they find then: the step has no totals to apply."""
    simulation, third = rewound()
    state, effects = advance(simulation.live[0].state, RolledBack(third.number, 0))
    assert not effects
    # The others had not heard of it when they promised.
    fourth = replace(third, number=4, is_rewound=False)
    state, effects = advance(state, Received(2, Decided(fourth)))
    assert effects == [Enter(fourth)]
    assert state.standing.applied == third.step
    sealed = structs.replace(simulation.live[0].state, promised=(1, 2))
    assert advance(sealed, RolledBack(third.number, 0)) == (sealed, []), "it has told its step"


def test_who_leaves_does_not_lead_those_that_go_back_without_it():
    """They have not read their checkpoint yet, and some of them are to serve another stage."""
    hosts, placement = tuple(range(5)), ((0, 1, 2, 3), (4,))
    rules = replace(
        Simulation(5).rules, safest=lambda *_: ((0, 1, 2), (3, 4)), placed=lambda own, *_: own
    )
    last = Generation(3, hosts, hosts, 0, 1, placement=placement, is_rewound=True)
    state = structs.replace(first_state(0, rules, last, 1), leaving={0: HEARTBEATS_BEFORE_LEAVING})
    promises = {
        host: Promise(4, (1, 0), first_state(host, rules, last, 1).standing, None) for host in hosts
    }
    following = next_generation(state, promises)
    assert (following.members, following.leader) == ((1, 2, 3, 4), 1)
    assert (following.is_rewound, following.placement) == (True, ((0, 1, 2), (3, 4)))


def test_who_came_after_a_checkpoint_knows_of_it():
    """Both hosts of a stage are started again, one after the other; then the others are lost."""
    simulation = stepped(4)
    simulation.save(0)
    for host in (1, 3):
        lose_all(simulation, host)
        simulation.start(host)
        simulation.calm(6)
    assert last_of(simulation).members == (0, 1, 2, 3)
    lose_all(simulation, 2)
    last = lose_all(simulation, 0)
    assert (last.members, last.is_rewound, last.step) == ((1, 3), True, 1)


def test_what_was_computed_in_a_generation_counts_in_no_other():
    """The totals of a step that is run again with others, by other paths."""
    simulation = stepped(4)
    for host in range(3):
        simulation.compute(host)
    lose_all(simulation, 3)
    assert generations(simulation) == {2}
    late = [held for _, _, held in simulation.computed]
    assert [(held.number, held.step) for held in late] == [(1, 2)] * 3
    for _ in late:
        simulation.hear_of_computed(0)
    run(simulation)
    assert all(len(own.applied) == 1 for own in simulation.live.values())
    step(simulation)
    assert all(len(own.applied) == 2 for own in simulation.live.values())


def test_a_host_is_taken_in_after_a_step_and_not_within_one():
    simulation = stepped(4)
    lose_all(simulation, 3)
    simulation.start(3)
    simulation.hold(0)
    pass_time(simulation, 3)
    assert generations(simulation) == {2, 0}
    step(simulation, 1, 2)
    third = simulation.decided[3]
    assert (third.members, third.fresh, third.step) == ((0, 1, 2, 3), (3,), 2)


def tick_without(simulation: Simulation, links: Collection[tuple[int, int]], rounds: int) -> None:
    """Time passes, in which nothing goes over some directed links, and steps are made."""
    for _ in range(rounds):
        for host in [*simulation.live]:
            simulation.hold(host)
        tick(simulation)
        while simulation.messages:
            source, sent = simulation.messages[0]
            if (source, sent.target) in links:
                del simulation.messages[0]
            else:
                simulation.deliver(0, keep=False)


@pytest.mark.parametrize(("one", "other"), [(2, 3), (0, 3), (1, 2)])
def test_of_two_that_do_not_hear_each_other_one_is_left_out_until_they_do(one: int, other: int):
    simulation = stepped(5)
    simulation.tell(one, Presence(other, is_there=False))
    simulation.tell(other, Presence(one, is_there=False))
    links = [(one, other), (other, one)]
    tick_without(simulation, links, rounds=12)
    assert simulation.live[other].state.number == 0
    numbers = {host: own.state.number for host, own in simulation.live.items() if host != other}
    assert set(numbers.values()) == {2}, "and it is not taken in again and again"
    counted = len(simulation.live[one].applied)
    tick_without(simulation, links, rounds=3)
    assert len(simulation.live[one].applied) == counted + 3
    simulation.calm(8)
    assert generations(simulation) == {3}
    assert simulation.decided[3].fresh == (other,)


def test_a_host_that_some_notice_earlier_to_be_lost_costs_no_other():
    """Host 4 misses host 2 long before the others do, which have heard the last of it."""
    simulation = stepped(5)
    simulation.crash(2)
    simulation.tell(4, Presence(2, is_there=False))
    pass_time(simulation, 10)
    assert generations(simulation) == {1}
    lose_all(simulation, 2)
    assert simulation.decided[2].members == (0, 1, 3, 4)


def test_who_hears_nobody_is_left_out_and_not_those_whom_it_misses():
    simulation = stepped(5)
    for other in (0, 2, 3, 4):
        simulation.tell(1, Presence(other, is_there=False))
    tick_without(simulation, [(other, 1) for other in (0, 2, 3, 4)], rounds=8)
    assert simulation.decided[2].members == (0, 2, 3, 4)
    assert simulation.decided[2].cause == "host 1 was partitioned from other hosts"


def test_who_is_told_to_leave_goes_after_a_step_if_others_hold_what_it_does():
    simulation = stepped(4)
    tell_to_leave(simulation, 0)
    assert generations(simulation) == {1}, "not within a step"
    step(simulation)
    second = simulation.decided[2]
    assert (second.members, second.leader, second.step) == ((1, 2, 3), 1, 2)
    assert second.cause == "host 0 left"
    assert 0 not in simulation.live, "it has gone"
    step(simulation)
    assert {len(own.applied) for own in simulation.live.values()} == {3}


def test_a_notice_has_to_be_some_beats_old():
    simulation = stepped(4)
    simulation.tell(0, Told())
    for _ in range(HEARTBEATS_BEFORE_LEAVING - 2):
        pass_time(simulation)
        step(simulation)
    assert generations(simulation) == {1}
    pass_time(simulation, 2)
    step(simulation)
    assert generations(simulation) == {2}


def test_what_only_one_that_leaves_holds_others_take_first():
    """Of stage 1 host 1 alone is left: hosts 0 and 2 have the other."""
    simulation = stepped(3)
    tell_to_leave(simulation, 1)
    step(simulation)
    second = simulation.decided[2]
    assert (second.members, second.leader) == ((0, 1, 2), 0)
    assert second.cause == "state transfer from host 1 before leaving"
    assert second.holders == ((0, 2), (1,))
    assert serves(second.placement, 2) == {1}
    assert second.fresh == (), "all hold something"
    step(simulation)
    third = simulation.decided[3]
    assert (third.members, third.holders) == ((0, 2), ((0,), (2,)))
    assert third.cause == "host 1 left"
    step(simulation)
    assert {len(own.applied) for own in simulation.live.values()} == {4}
    assert not any(generation.is_rewound for generation in simulation.decided.values())


def test_what_a_host_has_given_up_it_has_until_a_step_is_made_without_it():
    """Hosts 1 and 2 shall swap their stages, and before they have, the other replica is lost."""
    simulation = stepped(4)
    simulation.tell(0, PlanRequest(1, SWAPPED, "a plan"))
    step(simulation)
    second = simulation.decided[2]
    assert (second.placement, second.plan) == (SWAPPED, "a plan")
    assert second.cause == "a faster plan was found"
    assert second.holders == ((0, 2), (1, 3))
    third = lose_all(simulation, 3)
    assert (third.members, third.plan) == ((0, 1, 2), ""), "the plan was for others"
    assert third.holders == ((0, 2), (1,)), "host 1 serves stage 1 no longer, and has it"
    assert not third.is_rewound
    step(simulation)
    assert {len(own.applied) for own in simulation.live.values()} == {3}
    assert {own.state.standing.holds for own in simulation.live.values()} == {(0,), (1,)}


def test_a_leaders_wish_counts_where_another_host_outbids_it():
    """Host 0 has come back without state, and proposes before the others hear of host 1's wish."""
    simulation = stepped(4)
    lose_all(simulation, 0)
    restart(simulation, 0)
    pass_time(simulation)
    step(simulation)
    third = simulation.decided[3]
    assert (third.members, third.leader) == ((0, 1, 2, 3), 1)
    simulation.tell(1, PlanRequest(3, SWAPPED, "a plan"))
    simulation.tell(0, Abandoned(3))
    pass_time(simulation)
    assert simulation.decided[4].cause == "a faster plan was found"
    assert simulation.decided[4].plan == "a plan"


def test_a_wish_counts_in_its_generation_and_from_a_leader_alone():
    for host, number in ((1, 1), (0, 2)):
        simulation = stepped(4)
        simulation.tell(host, PlanRequest(number, SWAPPED, "a plan"))
        step(simulation)
        assert generations(simulation) == {1}
    # One under which a stage is served by nobody comes to nothing.
    simulation = stepped(4)
    simulation.tell(0, PlanRequest(1, ((0, 1, 2, 3), ()), "a plan"))
    step(simulation)
    assert covers(simulation.decided[2].placement, frozenset(range(4)))
    assert simulation.decided[2].plan == ""


@pytest.mark.parametrize(("hosts", "told"), [(4, (0, 1, 2)), (3, (0, 2)), (2, (1,)), (4, range(4))])
def test_where_too_many_are_told_to_leave_nobody_does(hosts: int, told: Collection[int]):
    """Most of them; or of two hosts one, if the other cannot serve both stages."""
    simulation = stepped(hosts)
    tell_to_leave(simulation, *told)
    for own in simulation.live.values():
        assert is_the_end(own.state)
    for _ in range(3):
        step(simulation)
    assert generations(simulation) == {1}


def test_who_has_left_is_not_taken_in_until_it_is_started_again():
    simulation = stepped(4)
    tell_to_leave(simulation, 3)
    step(simulation)
    for host in simulation.live:
        simulation.tell(host, Received(3, Heartbeat(0, 0, (0, -1), leaves=True)))
    step(simulation)
    assert generations(simulation) == {2}
    simulation.start(3)
    pass_time(simulation, 2)
    step(simulation)
    assert simulation.decided[3].members == (0, 1, 2, 3)
    assert simulation.decided[3].fresh == (3,)
    pass_time(simulation, HEARTBEATS_BEFORE_LEAVING)
    step(simulation)
    assert generations(simulation) == {3}, "the notice was for the process before"


def with_diskless(hosts: int, *diskless: int, **options: bool) -> Simulation:
    """Hosts of which some have taken the places of lost ones and their states, one by one."""
    simulation = stepped(hosts, **options)
    for host in diskless:
        lose(simulation, host)
        goes_on(simulation)
        simulation.start(host, is_diskless=True)
        goes_on(simulation)
    assert last_of(simulation).diskless == diskless
    return simulation


def goes_on(simulation: Simulation) -> None:
    """Those that live settle who they are, and make a few steps."""
    simulation.calm(8)
    run(simulation)
    step(simulation)


def test_who_does_not_reach_the_folder_leads_only_where_the_run_ends():
    simulation = with_diskless(5, 0, 1)
    assert last_of(simulation).leader == 2
    lose(simulation, 2)
    goes_on(simulation)
    assert (last_of(simulation).leader, last_of(simulation).diskless) == (3, (0, 1))
    lose(simulation, 3)
    goes_on(simulation)
    assert (last_of(simulation).members, last_of(simulation).leader) == ((0, 1, 4), 4)
    lose_all(simulation, 4)
    assert (last_of(simulation).members, last_of(simulation).is_last) == ((0, 1), True)
    assert simulation.has_ended


def test_who_is_apart_takes_its_state_from_those_that_read_a_checkpoint():
    simulation = with_diskless(5, 4)
    simulation.save(0)
    saved = len(simulation.live[0].applied)
    assert simulation.checkpoints.keys() == {0, saved}
    for lost in (1, 3):
        lose_all(simulation, lost)
        if lost == 1:
            goes_on(simulation)
    last = last_of(simulation)
    assert (last.members, last.is_rewound, last.step) == ((0, 2, 4), True, saved)
    assert (last.fresh, last.diskless) == ((4,), (4,))
    # Of those that can read it, one holds each stage.
    assert covers(last.placement, frozenset({0, 2}))
    goes_on(simulation)
    assert len({len(own.applied) for own in simulation.live.values()}) == 1
    assert len(simulation.live[4].applied) > saved


def test_of_two_the_one_that_reaches_the_folder_decides_alone():
    simulation = Simulation(2)
    placement = ((0,), (0, 1))
    first = Generation(1, (0, 1), (0, 0), 0, 0, placement=placement, diskless=(1,))
    simulation.decided[1] = first
    for host, own in simulation.live.items():
        rules = replace(simulation.rules, is_diskless=host == 1)
        own.state = first_state(host, rules, first, 0)
        own.stages = {stage: [] for stage in serves(placement, host)}
        simulation.tell(host, Presence(1 - host, is_there=False))
    for _ in range(3):
        tick(simulation)
        simulation.messages.clear()
    assert simulation.live[0].state.members == (0,)
    assert simulation.live[1].state.members == (0, 1), "it waits"
    assert simulation.store == {}
