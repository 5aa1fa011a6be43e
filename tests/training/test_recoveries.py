"""What is written down of how a run comes over the loss of a stage."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from skippipe_jax.consensus.generations import Generation, RebuiltStage
from skippipe_jax.storage.run_dir import RECOVERIES, RunDir
from skippipe_jax.training.callbacks.recovery_log import RecoveryLog
from tests.harness.step_metrics import metrics_of

LEADS: Any = SimpleNamespace(group=SimpleNamespace(index=0))
FOLLOWS: Any = SimpleNamespace(group=SimpleNamespace(index=1))


def generation(number: int, step: int, **more: Any) -> Generation:
    given = {"cause": "host 2 was lost", "lost": (1,)}
    return Generation(number, (0, 1), (7, 7), 0, step, **given, **more)


def test_a_recovery_is_written_once_its_first_step_is_known_and_by_the_leader_alone(tmp_path: Path):
    made = (RebuiltStage(1, "buddy", 14, (3,)),)
    for place, trainer in enumerate((LEADS, FOLLOWS)):
        folder = tmp_path / f"{place}"
        folder.mkdir()
        recoveries = RecoveryLog(folder)
        recoveries.begin_recovery(generation(2, 19, remade=made), "buddy", 19, 2.5)
        recoveries.on_step_end(trainer, metrics_of(19, 2.5))
        assert not (folder / RECOVERIES).exists()
        recoveries.on_step_end(trainer, metrics_of(20, 3.0))
        recoveries.on_step_end(trainer, metrics_of(21, 2.9))
    assert RunDir(tmp_path / "1").recoveries() == []
    [told] = RunDir(tmp_path / "0").recoveries()
    assert (told.by, told.steps_old, told.step_before) == ("buddy", 5, 19)
    assert (told.loss_before, told.loss_after) == (2.5, 3.0)


def test_a_leader_without_lines_of_its_own_writes_what_others_know(tmp_path: Path):
    """It is a fresh process, or has joined and made no step yet."""
    knows, knows_the_step, is_fresh = (RecoveryLog(tmp_path) for _ in range(3))
    lost = generation(3, 10, is_rewound=True)
    knows.begin_recovery(lost, "rewind", 19, 2.5)
    knows_the_step.begin_recovery(lost, "rewind", 19, None)
    is_fresh.begin_recovery(generation(2, 30), "rewind", 40, 1.5)
    is_fresh.forget()  # It was left out since.
    told = [is_fresh.pending(), knows_the_step.pending(), knows.pending()]
    is_fresh.adopt(told)
    is_fresh.on_step_end(LEADS, metrics_of(11, 2.75))
    [written] = RunDir(tmp_path).recoveries()
    assert (written.generation, written.step_before, written.loss_before) == (3, 19, 2.5)
    is_fresh.adopt([None, is_fresh.pending()])
    assert is_fresh.pending() is None


def test_all_that_go_back_are_as_old_as_what_they_lose(tmp_path: Path):
    recoveries = RecoveryLog(tmp_path)
    recoveries.begin_recovery(generation(2, 10, is_rewound=True), "average", 19, 2.5)
    recoveries.on_step_end(LEADS, metrics_of(11, 2.75))
    [told] = RunDir(tmp_path).recoveries()
    assert (told.by, told.asked, told.steps_old) == ("rewind", "average", 9)


def test_a_recovery_that_comes_to_no_step_is_one_with_the_next(tmp_path: Path):
    """Of the losses the one counts with which the run could still go on."""
    recoveries = RecoveryLog(tmp_path)
    recoveries.begin_recovery(generation(2, 10, is_rewound=True), "rewind", 19, 2.5)
    recoveries.begin_recovery(generation(3, 10, is_rewound=True), "rewind", 10, None)
    recoveries.on_step_end(LEADS, metrics_of(11, 2.75))
    [told] = RunDir(tmp_path).recoveries()
    assert (told.generation, told.steps_old, told.loss_before) == (3, 9, 2.5)


def test_a_stage_that_is_left_out_or_comes_back_is_as_old_as_what_is_saved_of_it(tmp_path: Path):
    recoveries = RecoveryLog(tmp_path)
    recoveries.begin_recovery(generation(2, 19, left_out=(1,)), "skip", 19, 2.5, {1: 10})
    recoveries.on_step_end(LEADS, metrics_of(20, 2.75))
    made = (RebuiltStage(1, "skip", 20, (2,)),)
    recoveries.begin_recovery(generation(3, 24, remade=made), "skip", 24, 2.25, {1: 10})
    recoveries.on_step_end(LEADS, metrics_of(25, 2.5))
    left, back = RunDir(tmp_path).recoveries()
    assert (left.by, left.steps_old, left.step) == ("skip", 9, 19)
    assert (back.by, back.steps_old, back.loss_after) == ("skip", 14, 2.5)
