"""A host's search process: what becomes of those who wait for it, and when it is prepared."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from skippipe_jax.training.replan import planner_process
from skippipe_jax.training.replan.planner_process import PlannerProcess, PlannerWarmup, WarmPlanner
from tests.harness.step_metrics import metrics_of

PATIENCE_S = 60.0


@pytest.fixture
def as_a_shell_does(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has a line of a shell stand for the planner."""

    def stands(line: str) -> None:
        monkeypatch.setattr(planner_process, "LOW_PRIORITY", ("sh", "-c", line))

    return stands


def test_commands_are_answered_one_after_another(as_a_shell_does: Any):
    as_a_shell_does('while read line; do echo "what $line" >&2; echo 3; done')
    process = PlannerProcess()
    assert [process.run(["a"]), process.run(["b"])] == [3, 3]
    assert process.last_error_line() == 'what ["b"]'
    assert not process.has_ended
    process.close()
    assert process.has_ended


def test_who_waits_for_a_process_that_is_closed_or_has_ended_is_told_how_it_ended(
    as_a_shell_does: Any,
):
    as_a_shell_does("read line; exec sleep 600")
    process, codes = PlannerProcess(), []
    waiting = [
        threading.Thread(target=lambda: codes.append(process.run(["plan"]))) for _ in range(2)
    ]
    for thread in waiting:
        thread.start()
    process.close()
    process.close()
    for thread in waiting:
        thread.join(PATIENCE_S)
    assert codes == [-9, -9]
    as_a_shell_does("exit 4")
    ended = PlannerProcess()
    assert [ended.run(["a"]), ended.run(["b"])] == [4, 4]
    ended.close()


def test_a_process_that_has_ended_is_started_again(as_a_shell_does: Any):
    as_a_shell_does("read line; echo 0")
    planner = WarmPlanner()
    first = planner.process()
    assert planner.process() is first
    assert first.run(["a"]) == 0
    assert first._process.wait(PATIENCE_S) == 0
    assert planner.process() is not first
    planner.close()


def test_hosts_prepare_one_after_another_and_only_the_first_stay_ready():
    clock: Any = SimpleNamespace(now=lambda: 0.0)
    prepared = []

    class Watched(WarmPlanner):
        def warm_up(self, plan: Any, *, stays: bool) -> None:
            prepared.append((clock.now(), plan, stays))

    plans: list[Any] = [*range(4)]
    view: Any = None
    hosts = [PlannerWarmup(Watched(), plans[place], place, clock) for place in range(4)]
    for now_s in range(0, 200, 5):
        clock.now = partial(float, now_s)
        for host in hosts:
            host.on_step_end(view, metrics_of(1))
    apart_s = planner_process.PREPARES_AFTER_S
    assert [plan for _, plan, _ in prepared] == [0, 1, 2, 3]
    assert [stays for *_, stays in prepared] == [True, True, False, False]
    for place, (at_s, *_) in enumerate(prepared):
        assert apart_s * (1 + place) < at_s <= apart_s * (1 + place) + 5
