"""Callbacks of a run: progress, status, and the log of recoveries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import parse_case

from skippipe_jax.config import Config, parse_config
from skippipe_jax.connections.status import Progress, TrainingStatus
from skippipe_jax.consensus.generations import Generation, RebuiltStage
from skippipe_jax.storage.run_dir import RECOVERIES, RunDir
from skippipe_jax.training.callbacks import progress
from skippipe_jax.training.callbacks.base import RunView
from skippipe_jax.training.callbacks.progress import HostStatus, ProgressBar, StatusUpdates
from skippipe_jax.training.callbacks.recovery_log import RecoveryLog
from tests.commands.examples import CASE
from tests.harness.step_metrics import metrics_of


@pytest.mark.parametrize(
    ("generation", "hosts", "told"),
    [(None, 4, ""), (1, 4, ""), (3, 2, ", 2 of 4 hosts, generation 3")],
)
def test_hosts_that_are_left_are_told_once_some_were_lost(
    generation: int | None, hosts: int, told: str, capsys: pytest.CaptureFixture[str]
):
    bar, view = ProgressBar(Config(), 4, 4, 0), cast(RunView, None)
    bar.on_step_end(view, metrics_of(5, generation=generation, hosts=hosts))
    bar.on_validation_end(view, 5, None)
    bar.close()
    shown = capsys.readouterr().err
    assert f"100 tokens/s{told}  " in shown
    assert "held-out" not in shown


def test_a_host_that_does_not_lead_says_what_it_serves_and_how_far_the_run_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    topology = SimpleNamespace(stage_of={0: 0, 1: 1, 2: 3, 3: 2}, nodes=(1, 2))
    view: Any = SimpleNamespace(
        group=SimpleNamespace(
            hosts=(2, 5, 7), index=1, count=3, generation=Generation(1, (2, 5, 7), (0, 0, 0), 2, 0)
        ),
        runtime=SimpleNamespace(topology=topology),
    )
    status = HostStatus(100)
    status.on_train_begin(view)
    status.on_step_end(view, metrics_of(5))
    assert capsys.readouterr().err == "host 5 serves stages 1, 3; 3 hosts train, host 2 leads\n"
    view.group.generation = replace(view.group.generation, cause="host 6 was lost")
    status.on_train_begin(view)
    assert capsys.readouterr().err.startswith("host 6 was lost; host 5 serves stages 1, 3; ")
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_STATUS", 0.0)
    status.on_step_end(view, metrics_of(6, 2.5))
    assert capsys.readouterr().err.startswith("host 5: step 6/100  loss 2.500  ")


# What a session tells observers of its training.


# Nodes 0 and 2 are near each other, node 1 is far from both.
PLACES = {"locations": ["a", "b", "a"], "links": [["a", "b", 50, 0.5], ["b", "a", 100, 0.25]]}


def test_a_session_tells_who_serves_what_the_slowest_links_and_how_far_it_is():
    plan = make_plan(parse_case(CASE | PLACES), "balanced")
    view: Any = SimpleNamespace(
        config=parse_config({"train": {"steps": 20}}, []),
        step=4,
        group=SimpleNamespace(hosts=(5, 2, 7), generation=SimpleNamespace(number=3)),
        runtime=SimpleNamespace(
            topology=SimpleNamespace(plan=plan, host_of=(0, 1, 2), first_nodes=(0, 1, 2))
        ),
    )
    told: list[TrainingStatus] = []
    updates = StatusUpdates(told.append)
    updates.on_train_begin(view)
    assert (told[0].generation, told[0].progress) == (3, Progress(4, 20))
    assert told[0].serving == [sorted((5, 2, 7)[node] for node in own) for own in plan.stages]
    assert told[0].locations == {5: "a", 2: "b", 7: "a"}
    links = [(link.source, link.target, link.latency_s) for link in told[0].links]
    assert {(source, target) for source, target, _ in links} == {(5, 2), (2, 5), (2, 7), (7, 2)}
    assert [latency_s for *_, latency_s in links] == [0.1, 0.1, 0.05, 0.05]
    assert told[0].links[0].bytes_per_s == 0.25 * 2**30
    updates.on_step_end(view, metrics_of(5, 3.0, compilations=2, seconds_per_iteration=60.0))
    assert told[-1].progress == Progress(5, 20, 3.0)
    for step, seconds in ((6, 2.0), (7, 9.0), (8, 1.0)):
        updates.on_step_end(view, metrics_of(step, seconds_per_iteration=seconds))
    assert told[-1].progress == Progress(8, 20, 2.5, 2.0, 24.0)


# What is written down of how a run comes over the loss of a stage.


LEADS: Any = SimpleNamespace(group=SimpleNamespace(index=0))
FOLLOWS: Any = SimpleNamespace(group=SimpleNamespace(index=1))


def generation(number: int, step: int, **more: Any) -> Generation:
    given = {"cause": "host 2 was lost", "lost": (1,)}
    return Generation(number, (0, 1), (7, 7), 0, step, **given, **more)


def test_a_recovery_is_written_once_its_first_step_is_known_and_by_the_leader_alone(tmp_path: Path):
    made = (RebuiltStage(1, "buddy", 14, (0,)),)
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
    """A recovery that comes to no step is one with the next, with the loss from before both."""
    recoveries = RecoveryLog(tmp_path)
    recoveries.begin_recovery(generation(2, 10, is_rewound=True), "average", 19, 2.5)
    recoveries.begin_recovery(generation(3, 10, is_rewound=True), "average", 10, None)
    recoveries.on_step_end(LEADS, metrics_of(11, 2.75))
    [told] = RunDir(tmp_path).recoveries()
    assert (told.by, told.asked, told.steps_old) == ("rewind", "average", 9)
    assert (told.generation, told.loss_before) == (3, 2.5)


def test_a_stage_that_is_left_out_or_comes_back_is_as_old_as_what_is_saved_of_it(tmp_path: Path):
    recoveries = RecoveryLog(tmp_path)
    recoveries.begin_recovery(generation(2, 19, left_out=(1,)), "skip", 19, 2.5, {1: 10})
    recoveries.on_step_end(LEADS, metrics_of(20, 2.75))
    made = (RebuiltStage(1, "skip", 20, (1,)),)
    recoveries.begin_recovery(generation(3, 24, remade=made), "skip", 24, 2.25, {1: 10})
    recoveries.on_step_end(LEADS, metrics_of(25, 2.5))
    left, back = RunDir(tmp_path).recoveries()
    assert (left.by, left.steps_old, left.step) == ("skip", 9, 19)
    assert (back.by, back.steps_old, back.loss_after) == ("skip", 14, 2.5)
