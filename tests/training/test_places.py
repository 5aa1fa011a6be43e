"""Places of hosts: those that a run begins with, those that are left, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skippipe_jax.config import ClusterConfig, Config
from skippipe_jax.config.cluster import AVERAGE, BUDDY, REWIND, SKIP, STOP, JoinConfig
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.consensus.next_generation import covers
from skippipe_jax.training.elastic.extra_hosts import (
    Placement,
    host_by_node,
    stages_for,
    with_second_hosts,
    with_stages,
)
from skippipe_jax.training.elastic.lost_stages import describe_rollback, single_host_warning
from skippipe_jax.training.elastic.membership_change import elastic_rules
from tests.sched.examples import plan_of

PATHS = [[0, 2], [0, 3], [1, 2], [1, 3]]
PLAN = plan_of([[0, 1], [2, 3]], PATHS, path_length=2)
LONGER = plan_of([[0], [1, 2], [3]], [[0, 1, 3], [0, 2, 3]], path_length=3)


def test_each_spare_place_has_a_node_of_its_own_and_as_many_as_have_ports():
    config = Config(join=JoinConfig(places=2))
    assert host_by_node(config, (0, 1, 1)) == (0, 1, 1, 2, 3)
    high = ClusterConfig(transfer_port=65536 - 9)
    assert host_by_node(Config(cluster=high), (0, 1)) == (0, 1, 2)
    assert host_by_node(Config(cluster=high), (0, 1, 2, 3)) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("plan", "nodes", "expected"),
    [
        # As many visits, fewer replicas; and all alike.
        (LONGER, (0, 1, 2, 3, 4), ((0,), (1, 2), (3, 4))),
        (LONGER, (0, 1, 2, 3, 4, 5), ((0,), (1, 2, 5), (3, 4))),
        (LONGER, (0, 1, 3, 4), ((0,), (1, 2, 4), (3,))),
        (LONGER, (0, 3, 4), ((0,), (1, 2, 4), (3,))),
        # Not to the data stage, which lacks both of its nodes.
        (PLAN, (2, 3, 4), ((0, 1), (2, 3, 4))),
        (PLAN, (0, 1, 2, 3), ((0, 1), (2, 3))),
        (plan_of([[0, 1]], [[0], [1]], path_length=1), (0, 1, 2), ((0, 1, 2),)),
    ],
    ids=range(7),
)
def test_who_comes_serves_where_a_replica_has_most_to_do(
    plan: Any, nodes: tuple[int, ...], expected: tuple[tuple[int, ...], ...]
):
    assert with_stages(plan, plan.stages, nodes) == expected


def test_who_comes_is_placed_when_a_generation_is_named_and_known_to_be_before(tmp_path: Path):
    settled: Any = SimpleNamespace(host_of=(0, 1, 2, 3), plan=PLAN)
    rules = elastic_rules(Config(run_dir=str(tmp_path), join=JoinConfig(places=2)), settled)
    assert [*rules.hosts] == [0, 1, 2, 3, 4, 5]
    everybody = frozenset({0, 1, 2, 3})
    assert covers(rules, PLAN.stages, everybody)
    assert not covers(rules, PLAN.stages, everybody | {5}), "it serves nothing"
    placed = rules.placed(PLAN.stages, everybody | {5}, {5}, ())
    assert placed is not None
    assert placed == ((0, 1), (2, 3, 5))
    assert covers(rules, placed, everybody | {5})
    assert all(map(rules.fits, (PLAN.stages, placed)))
    for unfit in (((0, 1), (2,)), ((0, 1), (2, 3, 6)), ((0, 1, 5), (2, 3, 5)), ((0, 1, 2, 3),)):
        assert not rules.fits(unfit)
    # It stays where it is when it is lost, and may save a stage without being moved there.
    assert rules.placed(placed, frozenset({0, 1, 4}), {4}, ()) == ((0, 1), (2, 3, 4, 5))
    assert covers(rules, placed, frozenset({0, 1, 5}))
    generation = Generation(1, (0, 1, 2, 3), (0,) * 4, 0, 0, placement=PLAN.stages)
    assert stages_for(rules, generation, 4) == (1,)
    assert stages_for(rules, generation, 0) == (0,)


def test_who_comes_is_told_of_the_stage_to_which_it_goes_back(tmp_path: Path):
    """Host 2 has stood in for stage 0 when it was lost, and host 3 is alone since."""
    settled: Any = SimpleNamespace(host_of=(0, 1, 2, 3), plan=PLAN)
    rules = elastic_rules(Config(run_dir=str(tmp_path)), settled)
    placement = ((0, 1, 2), (3,))
    generation = Generation(1, (0, 1, 3), (0,) * 3, 0, 0, placement=placement)
    assert stages_for(rules, generation, 2) == (1,)


def test_who_may_lack_the_text_does_not_move_to_the_data_stage(tmp_path: Path):
    settled: Any = SimpleNamespace(host_of=(0, 1, 2, 3), plan=PLAN)
    rules = elastic_rules(Config(run_dir=str(tmp_path)), settled)
    left = frozenset({2, 3})
    assert rules.placed(PLAN.stages, left, (), ()) == ((0, 1, 2), (3,))
    assert rules.placed(PLAN.stages, left, (2,), ()) == ((0, 1, 3), (2,))
    assert rules.placed(PLAN.stages, left, (2, 3), ()) is None
    # Who has served it has the text.
    moved = ((0, 1, 2), (3,))
    assert rules.placed(moved, frozenset({0, 1, 2}), (0, 1, 2), ()) is not None
    assert rules.placed(moved, left, (2, 3), ()) == moved


THREE = ((0, 1), (2, 3), (4, 5))
HERE = frozenset(range(6))


@pytest.mark.parametrize(
    ("placement", "hosts", "without_text", "expected"),
    [
        # Node 2 has stood in for stage 0, and goes back once both of its hosts are there.
        (((0, 1, 2), (3,), (4, 5)), HERE, (), THREE),
        # Who is lost is listed in its stage and serves nothing.
        (((0, 1, 2), (3,), (4, 5)), HERE - {0}, (), ((0, 1, 2), (3,), (4, 5))),
        (((0, 1), (2, 3), (4, 5)), HERE - {2}, (), THREE),
        # Another goes where none that was there before can.
        (((0, 1), (2,), (3, 4, 5)), HERE - {3}, (), ((0, 1), (2,), (3, 4, 5))),
        (((0, 2), (1, 3, 4), (5,)), HERE, (), ((0, 2), (1, 3), (4, 5))),
        # Not to the data stage without the text.
        (((0,), (1, 2, 3), (4, 5)), HERE, (1, 2, 3), ((0,), (1, 2, 3), (4, 5))),
        (((0,), (1, 2, 3), (4, 5)), HERE, (1,), ((0, 2), (1, 3), (4, 5))),
    ],
)
def test_no_stage_has_one_host_while_others_stand_in_elsewhere(
    placement: Placement, hosts: frozenset[int], without_text: tuple[int, ...], expected: Placement
):
    found = with_second_hosts(THREE, placement, range(6), hosts, without_text)
    assert found == expected
    if found == placement:
        assert found is placement


def test_a_stage_of_one_host_from_the_start_stays_one():
    own = ((0,), (1, 2, 3))
    assert with_second_hosts(own, own, range(4), range(4)) is own


# What is said of stages that have one host, and of how far all go back when it is lost.


@pytest.mark.parametrize(
    ("done", "step", "lost", "said"),
    [
        (148, 100, (0,), ". Stage 0 had no other replica: rolled back from step 148 to the "
         "checkpoint of step 100, 48 steps to repeat"),
        (7, 0, (1, 3), ". Stages 1 and 3 had no other replica: rolled back from step 7 to the "
         "start, 7 steps to repeat"),
        (101, 100, (0,), ". Stage 0 had no other replica: rolled back from step 101 to the "
         "checkpoint of step 100, 1 step to repeat"),
        (0, 100, (2,), ". Stage 2 had no other replica: rolled back to the checkpoint of step 100"),
        (148, 100, (), ". All hosts rolled back from step 148 to the checkpoint of step 100, 48 "
         "steps to repeat"),
    ],
)  # fmt: skip
def test_who_goes_back_is_told_how_far_and_why(
    done: int, step: int, lost: tuple[int, ...], said: str
):
    rewound = Generation(3, (0, 2), (7, 7), 0, step, is_rewound=True, lost=lost)
    assert describe_rollback(rewound, done) == said


def test_who_does_not_go_back_is_told_nothing():
    assert describe_rollback(Generation(3, (0, 2), (7, 7), 0, 148), 148) == ""


def test_of_stages_with_one_host_the_leader_warns_where_its_loss_costs_steps():
    """Stage 0 has two hosts; stage 1 has two nodes of one host, and stage 2 one node."""
    stages, host_of = ((0, 1), (2, 3), (4,)), (0, 1, 2, 2, 1)
    said = single_host_warning(stages, host_of, REWIND)
    assert said.startswith("Stages 1 and 2 have only one host each: if it fails, all hosts roll ")
    assert "the run ends (recovery.lost_stage = stop)" in single_host_warning(stages, host_of, STOP)
    for by in (BUDDY, AVERAGE, SKIP):
        assert single_host_warning(stages, host_of, by) == ""
    assert single_host_warning(((0,), (1,)), (0, 0), REWIND) != ""
    said = single_host_warning(((0,), (1,)), (0, 1), REWIND)
    assert "the run may end, as too few nodes are left for all stages" in said
    assert single_host_warning(((0, 1), (2, 3)), (0, 1, 0, 1), REWIND) == ""
