"""Stages of which no replica is left, made anew or left out while the others stay as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from skippipe_jax.config import Config, ModelConfig
from skippipe_jax.config.cluster import AVERAGE, BUDDY, SKIP, RecoveryConfig
from skippipe_jax.consensus.generations import Generation, Placement, RebuiltStage
from skippipe_jax.training.elastic.lost_stages import describe_rebuilds, rebuild_rule
from tests.consensus.simulation import (
    KINDS,
    Simulation,
    last_of,
    lose,
    lose_all,
    moved,
    require_goes_on,
    run,
    serves,
    step,
    tell_to_leave,
)

STAGES = 3


def placed(
    placement: Placement,
    hosts: frozenset[int],
    diskless: Collection[int],
    left_out: Collection[int],
) -> Placement | None:
    """Of the stage that most serve the last one goes to a stage that nobody serves."""
    stages = [stage for stage in range(STAGES) if stage not in left_out]
    if len(hosts) < len(stages) or hosts <= {*diskless}:
        return None
    for stage in stages:
        first = {host: min(serves(placement, host)) for host in hosts}
        serving = Counter(first.values())
        if not serving[stage]:
            free = hosts.difference(diskless if stage == 0 else ())
            most = max((first[host] for host in free), key=lambda own: (serving[own], own))
            placement = moved(placement, {max(h for h in free if first[h] == most): {stage}})
    return placement


def config_of(policy: str, *layers: int) -> Config:
    model = ModelConfig(width=8, heads=2, kv_heads=1, layers=sum(layers), stage_layers=layers)
    return Config(model=model, recovery=RecoveryConfig(lost_stage=policy))


def options_of(policy: str, layers: tuple[int, ...] = (2, 2, 2)) -> dict[str, Any]:
    """Those of hosts of three stages, which make lost ones anew by a policy."""
    remakes = rebuild_rule(config_of(policy, *layers), STAGES)
    return {"stages": STAGES, "placed": placed, "remakes": remakes, "leaves_out": policy == SKIP}


def simulated(hosts: int, policy: str, layers: tuple[int, ...] = (2, 2, 2)) -> Simulation:
    """Hosts of three stages, which make lost ones anew by a policy."""
    return Simulation(hosts, **options_of(policy, layers))


HOSTS = 7
HOST = st.integers(0, HOSTS - 1)
ACTION = st.tuples(st.sampled_from(KINDS), st.integers(0, 63), st.integers(0, 7))
# What happens at random, who is lost then, who comes back, and how many steps are made then.
LOST = st.sets(HOST, max_size=2) | st.sampled_from([{1, 4}, {2, 5}])
ROUND = st.tuples(
    st.lists(ACTION, max_size=8), LOST, st.none() | HOST, st.sampled_from([2, 3, 0, 1])
)


def survive(policy: str, rounds: list[tuple[Any, set[int], int | None, int]]) -> Simulation:
    """What becomes of hosts that are lost and come back, round by round, but never too many."""
    simulation = simulated(HOSTS, policy)
    simulation.calm(2)
    simulation.save(0)
    simulation.calm(1)
    for actions, lost, back, steps in rounds:
        for action in actions:
            simulation.act(*action)
        for host in sorted(lost):
            last = simulation.decided[max(simulation.decided)]
            left = [member for member in last.members if member in simulation.live]
            if 2 * (len(left) - 1) > len(last.members):
                lose(simulation, host)
        if back is not None:
            simulation.start(back)
        simulation.calm(steps)
        if simulation.has_ended:
            break
    return simulation


@pytest.mark.parametrize("policy", [BUDDY, AVERAGE, SKIP])
@settings(max_examples=25)
@given(rounds=st.lists(ROUND, max_size=8))
def test_hosts_agree_on_how_a_stage_is_made_anew(
    policy: str, rounds: list[tuple[Any, set[int], int | None, int]]
):
    simulation = survive(policy, rounds)
    if not simulation.has_ended:
        require_goes_on(simulation)


def after_steps(policy: str, steps: int, *layers: int, hosts: int = 7) -> Simulation:
    """Hosts that have made so many steps together."""
    simulation = simulated(hosts, policy, layers or (2, 2, 2))
    for _ in range(steps):
        step(simulation)
    return simulation


def test_a_stage_between_two_others_is_made_from_them_and_no_step_is_lost():
    simulation = after_steps(AVERAGE, 2)
    second = lose_all(simulation, 1, 4)
    assert (second.step, second.is_rewound, second.lost) == (2, False, (1,))
    assert second.remade == (RebuiltStage(1, AVERAGE, 2, (0, 2)),)
    # Three serve stage 0, so one of them goes.
    assert second.placement == ((0, 3), (1, 4, 6), (2, 5))
    assert describe_rebuilds(second) == "; stage 1 rebuilt as the mean of stages 0 and 2"
    simulation.calm(2)
    assert {len(own.applied) for own in simulation.live.values()} == {3}, "they go on from there"


@pytest.mark.parametrize(
    ("lost", "layers", "why"),
    [
        ((2, 5), (2, 2, 2), "stage 2 cannot be averaged: no stage follows it"),
        ((0, 3, 6), (2, 2, 2), "stage 0 cannot be averaged: only it has embedding and head"),
        ((1, 4), (1, 2, 2), "it has 2 blocks, and stage 0 has 1"),
    ],
)
def test_a_stage_without_its_like_on_both_sides_takes_all_back(
    lost: tuple[int, ...], layers: tuple[int, ...], why: str
):
    simulation = after_steps(AVERAGE, 2, *layers)
    second = lose_all(simulation, *lost)
    assert (second.step, second.is_rewound, second.remade) == (0, True, ())
    assert second.cause.startswith(f"host {lost[0]} failed, ")
    assert second.cause.endswith(why)


def test_a_lost_stage_goes_on_from_the_newest_copy_that_is_left():
    simulation = after_steps(BUDDY, 3)
    # Hosts 1 and 4 keep copies of stage 0, those of stage 1 are on hosts 2 and 5.
    second = lose_all(simulation, 1, 4)
    assert second.remade == (RebuiltStage(1, BUDDY, 2, (2,)),)
    assert second.step == 3
    assert describe_rebuilds(second) == "; stage 1 restored from its buddy checkpoint of step 2"


def test_where_no_copy_is_left_all_go_back():
    simulation = after_steps(BUDDY, 3)
    for own in simulation.live.values():
        standing = replace(own.state.standing, copies=())
        own.state = replace(own.state, standing=standing)
    second = lose_all(simulation, 1, 4)
    assert (second.step, second.is_rewound, second.remade) == (0, True, ())
    assert second.cause == "host 1 failed, host 4 failed; no copy of stage 1 is left"


def test_to_go_back_to_the_last_step_itself_costs_nothing():
    simulation = after_steps(BUDDY, 3)
    simulation.save(0)
    second = lose_all(simulation, 1, 4)
    assert (second.step, second.is_rewound, second.lost) == (3, True, (1,))
    assert second.cause.endswith("; step 3 has a checkpoint, so a rollback loses no step")


def test_a_stage_is_made_again_if_hosts_are_lost_while_it_is_made():
    simulation = after_steps(AVERAGE, 2)
    second = lose_all(simulation, 1, 4)
    assert second.remade
    # Host 6 serves stage 1 now, by the placement, and has nothing of it.
    third = lose_all(simulation, 0)
    assert (third.lost, third.remade) == ((1,), (RebuiltStage(1, AVERAGE, 2, (3, 2)),))
    simulation.calm(2)
    fourth = lose_all(simulation, 5)
    assert (fourth.lost, fourth.remade) == ((), ()), "by now it is there"


def test_a_copy_of_a_step_that_does_not_count_is_none():
    remakes = rebuild_rule(config_of(BUDDY, 2, 2, 2), STAGES)
    assert remakes is not None
    held = [frozenset({0}), frozenset[int](), frozenset({2})]
    copies = {0: ((1, 9), (1, 4)), 2: ((1, 6), (0, 8))}
    assert remakes(held, copies, 8) == (RebuiltStage(1, BUDDY, 6, (2,)),)
    assert rebuild_rule(config_of("rewind", 2, 2, 2), STAGES) is None


def left_out_after_a_save(hosts: int = 7) -> Simulation:
    """Step 2 is saved, and after step 3 the hosts of stage 1 are lost."""
    simulation = after_steps(SKIP, 2, hosts=hosts)
    simulation.save(0)
    step(simulation)
    second = lose_all(simulation, *range(1, hosts, 3))
    assert (second.step, second.is_rewound, second.remade) == (3, False, ())
    assert (second.lost, second.left_out) == ((1,), (1,))
    return simulation


def come_back(simulation: Simulation, *hosts: int, is_diskless: bool = False) -> Generation:
    """The generation that follows when hosts are taken in again."""
    number = last_of(simulation).number
    for host in hosts:
        simulation.start(host, is_diskless=is_diskless)
    while last_of(simulation).number == number:
        simulation.calm(1)
    run(simulation)
    return last_of(simulation)


def test_a_lost_stage_is_left_out_and_nobody_moves_or_goes_back():
    simulation = left_out_after_a_save()
    second = last_of(simulation)
    assert second.placement == simulation.decided[1].placement
    assert describe_rebuilds(second) == "; stage 1 bypassed until a host serves it"
    simulation.calm(2)
    assert {len(own.applied) for own in simulation.live.values()} == {4}, "they go on from there"
    # Another host of them changes nothing about that.
    third = lose_all(simulation, 3)
    assert (third.left_out, third.lost, describe_rebuilds(third)) == ((1,), (), "")


def test_a_stage_that_was_left_out_comes_back_from_the_last_checkpoint():
    simulation = left_out_after_a_save()
    step(simulation)
    simulation.save(0)
    third = come_back(simulation, 4, 1)
    assert (third.left_out, third.lost, third.fresh) == ((), (1,), (1, 4))
    assert third.remade == (RebuiltStage(1, SKIP, 4, (1,)),)
    assert describe_rebuilds(third) == "; stage 1 restored from the checkpoint of step 4"
    assert third.step >= 4
    step(simulation)
    # By now others can take it from them.
    fourth = lose_all(simulation, 4)
    assert (fourth.left_out, fourth.lost, fourth.holders[1]) == ((), (), (1,))


def test_what_a_host_serves_that_does_not_reach_the_checkpoints_the_leader_reads():
    simulation = left_out_after_a_save()
    third = come_back(simulation, 1, is_diskless=True)
    assert (third.diskless, third.leader) == ((1,), 0)
    assert third.remade == (RebuiltStage(1, SKIP, 2, (0,)),)


def test_without_the_first_stage_all_go_back():
    simulation = after_steps(SKIP, 2)
    simulation.save(1)
    step(simulation)
    second = lose_all(simulation, 0, 3, 6)
    assert (second.step, second.is_rewound, second.left_out) == (2, True, ())
    assert second.cause.endswith("; stage 0 cannot be bypassed: only it has embedding and head")


def test_before_the_first_checkpoint_all_go_back():
    second = lose_all(after_steps(SKIP, 2), 1, 4)
    assert (second.step, second.is_rewound) == (0, True)
    assert second.cause.endswith("; no checkpoint exists to restore stage 1 from later")


def test_who_alone_holds_a_stage_hands_it_on_while_another_is_left_out():
    simulation = left_out_after_a_save(hosts=9)
    lose_all(simulation, 2, 5)
    step(simulation)
    tell_to_leave(simulation, 8)
    step(simulation)
    step(simulation)
    last = last_of(simulation)
    assert last.members == (0, 3, 6)
    assert (last.left_out, last.is_rewound, last.is_last) == ((1,), False, False)
    assert {stage for host in last.members for stage in serves(last.placement, host)} == {0, 2}
