"""What is said of stages that have one host, and of how far all go back when it is lost."""

from __future__ import annotations

import pytest

from skippipe_jax.config.cluster import AVERAGE, BUDDY, REWIND, SKIP, STOP
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.training.elastic.lost_stages import describe_rollback, single_host_warning


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
    assert single_host_warning(((0, 1), (2, 3)), (0, 1, 0, 1), REWIND) == ""
