"""The leader searches for a better plan while others train: which, when, and in which process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from skippipe_sched.methods.repair import repair_plan
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.simulate import simulate_plan

from skippipe_jax.cluster.membership import Group, Membership
from skippipe_jax.config import ClusterConfig, Config, ModelConfig, TrainConfig
from skippipe_jax.config.cluster import ReplanConfig
from skippipe_jax.consensus.generations import Generation, PlanRequest
from skippipe_jax.training.replan import planner_process
from skippipe_jax.training.replan.candidates import (
    busy_seconds,
    cases_to_search,
    has_drifted,
    migration_seconds,
    pays_off,
    placement_of,
    recalibrated,
)
from skippipe_jax.training.replan.planner_process import PlannerProcess, PlannerWarmup, WarmPlanner
from skippipe_jax.training.replan.replanner import SEVERAL, Replanner, SharedPlans
from skippipe_jax.training.report import GenerationReport, plan_session
from tests.harness.step_metrics import metrics_of
from tests.sched.examples import plan_of

MODEL = ModelConfig(width=16, layers=4, heads=2, kv_heads=1, ffn_width=24, context=256)
REPLAN = ReplanConfig(budget_s=1.0)
CONFIG = Config(model=MODEL, replan=REPLAN, train=TrainConfig(steps=100))
PATIENCE_S = 120.0


def predicting(plan: Plan) -> Plan:
    timeline = simulate_plan(plan)
    return replace(plan, predicted=replace(plan.predicted, iteration_s=timeline.iteration_s))


# The run's own plan. Node 1 is lost, and the plan that stands sends all over one of the others.
OWN = predicting(plan_of([[0, 1], [2, 3]], [[0, 2], [0, 3], [1, 2], [1, 3]], path_length=2))
STANDING = predicting(plan_of([[0], [1, 2]], [[0, 1]] * 4, path_length=2))


def group_of(generation: Generation) -> Group:
    """That of host 0, which is in this generation."""
    membership = Membership(ClusterConfig(), 0, 1)
    membership.inbox.begin(generation.number)
    return membership.group_of(generation)


SECOND = Generation(2, (0, 2, 3), (7, 7, 7), 0, 10, placement=OWN.stages)


class Leader:
    """The leader of a run of four hosts, and what it has proposed."""

    def __init__(
        self,
        config: Config,
        standing: Plan,
        generation: Generation = SECOND,
        planner: WarmPlanner | None = None,
    ):
        self.wished: list[PlanRequest] = []
        self.plans, self.planner = SharedPlans(), planner or WarmPlanner()
        self.view: Any = SimpleNamespace(step=20)
        given = standing, OWN, [0, 1, 2, 3], self.planner, self.wished.append
        self.replanning = Replanner(config, group_of(generation), self.plans, *given)
        self.replanning.on_train_begin(self.view)

    def makes_a_step(self, **line: Any) -> None:
        noted = {"idle_share": [0.0] * 4, "predicted_seconds": 1.0} | line
        self.replanning.on_step_end(self.view, metrics_of(20, **noted))

    @property
    def is_searching(self) -> bool:
        search = self.replanning._search
        return search is not None and not search.is_over()

    def trains_until_the_search_is_over(self) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while self.is_searching:
            assert time.monotonic() < until_s
            self.makes_a_step()
            time.sleep(0.02)


@pytest.fixture
def leaders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Leader]]:
    # It compiles nothing, and finds the same each time.
    monkeypatch.setattr(planner_process, "DEFAULT_METHOD", "balanced")
    leaders: list[Leader] = []
    yield leaders
    for leader in leaders:
        leader.replanning.close()
        leader.planner.close()


def test_a_better_plan_is_searched_for_and_proposed(
    leaders: list[Leader], monkeypatch: pytest.MonkeyPatch
):
    # Other tests leave nothing for the lowest.
    monkeypatch.setattr(planner_process, "LOW_PRIORITY", ("nice", "-n", "0"))
    leaders.append(leader := Leader(CONFIG, STANDING))
    leader.trains_until_the_search_is_over()
    [wish] = leader.wished
    assert wish.number == 2
    # As even as the run's own plan, with the quick one's nodes 0 and 1 for the data. Node 1 of the
    # run is not there, and stays where it was.
    assert wish.placement == ((0, 1, 2), (3,))
    of_it = replace(SECOND, members=(0,), processes=(7,), plan=wish.plan)
    knows = plan_session(of_it, [GenerationReport(known_plans=leader.plans.names)])
    found = leader.plans.fetch(group_of(of_it), knows)
    assert found is not None
    assert found.stages == ((0, 1), (2,))
    assert found.predicted.iteration_s < 0.9 * STANDING.predicted.iteration_s
    # Of which that nobody reads who may lack the text: here host 0 alone has data.
    leaders.append(
        leader := Leader(CONFIG, STANDING, replace(SECOND, diskless=(2, 3)), leader.planner)
    )
    leader.trains_until_the_search_is_over()
    [wish] = leader.wished
    assert wish.placement == OWN.stages


def test_a_search_that_fails_says_why_and_nothing_is_proposed(
    leaders: list[Leader], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(
        planner_process, "LOW_PRIORITY", ("sh", "-c", "echo no such case >&2; exit 3")
    )
    leaders.append(leader := Leader(CONFIG, STANDING))
    leader.trains_until_the_search_is_over()
    assert leader.wished == []
    said = capfd.readouterr().err
    assert "the search for a better plan failed with exit code 3: no such case" in said


def test_a_plan_that_nobody_knows_is_none():
    alone = replace(SECOND, members=(0,), processes=(7,))
    for generation in (alone, replace(alone, plan="another's")):
        agreed = plan_session(generation, [GenerationReport()])
        assert SharedPlans().fetch(group_of(generation), agreed) is None


def test_a_plan_is_told_to_those_alone_who_lack_it():
    knows, lacks = GenerationReport(known_plans=["found"]), GenerationReport()
    generation = replace(SECOND, plan="found")
    assert plan_session(generation, [knows, knows]).plan_source is None
    assert plan_session(generation, [lacks, knows, knows]).plan_source == 1


def test_no_search_begins_where_hosts_are_as_they_were(leaders: list[Leader]):
    first = replace(SECOND, number=1, members=(0, 1, 2, 3), processes=(7,) * 4)
    leaders += [Leader(CONFIG, OWN, first), Leader(CONFIG, STANDING, replace(SECOND, plan="found"))]
    for leader in leaders:
        leader.makes_a_step(seconds_per_iteration=9.0)
        assert not leader.is_searching


def test_iterations_that_take_longer_than_predicted_begin_a_search(leaders: list[Leader]):
    config = replace(CONFIG, replan=replace(REPLAN, drift=0.3))
    first = replace(SECOND, number=1, members=(0, 1, 2, 3), processes=(7,) * 4)
    leaders += [Leader(config, OWN, first) for _ in range(2)]
    drifting, steady = leaders
    for _ in range(2 * SEVERAL):
        steady.makes_a_step(seconds_per_iteration=1.2)
    assert not steady.is_searching
    drifting.makes_a_step(seconds_per_iteration=50.0, compilations=1)
    for _ in range(SEVERAL - 1):
        drifting.makes_a_step(seconds_per_iteration=2.0)
        assert not drifting.is_searching
    drifting.makes_a_step(seconds_per_iteration=2.0, idle_share=[0.0, 0.5, 0.5, 0.5])
    assert drifting.is_searching
    # As long as nodes were measured to compute: OWN has each of them do so for 0.5 or 0.25 s.
    assert drifting.replanning._current.case.nodes[0].forward_s > 0.1
    drifting.replanning.close()
    for _ in range(2 * SEVERAL):
        drifting.makes_a_step(seconds_per_iteration=2.0)
    assert not drifting.is_searching, "once in a generation"


# Which plans are searched for when hosts have changed, and which of them are worth taking.


# Two data nodes and three of the other stage; each sends three microbatches.
PLAN = plan_of([[0, 1], [2, 3, 4]], [[0, 2], [0, 3], [0, 4], [1, 2], [1, 3], [1, 4]], path_length=2)


def taking(plan: Plan, iteration_s: float) -> Plan:
    return replace(plan, predicted=replace(plan.predicted, iteration_s=iteration_s))


def test_a_case_keeps_its_microbatches_whatever_its_stages():
    standing = repair_plan(PLAN, [0, 2, 3, 4])
    as_it_is, even = cases_to_search(standing, PLAN)
    assert as_it_is is standing.case
    assert (as_it_is.stages, even.stages) == ((1, 3), (2, 2))
    assert (as_it_is.microbatches, even.microbatches) == ((6,), (3, 3))
    assert [node.forward_s for node in even.nodes] == [0.1] * 4
    assert cases_to_search(PLAN, PLAN) == [PLAN.case]


def test_nodes_of_a_placement_have_the_numbers_of_the_run():
    # Node 2 is lost, and the node of the plan that was 3 in the run goes to stage 0.
    found = plan_of([[0, 2], [1, 3]], [[0, 1], [2, 3]], path_length=2)
    assert placement_of(found, [0, 1, 3, 4], PLAN.stages) == ((0, 3), (1, 2, 4))


def test_a_plan_is_taken_if_it_saves_more_than_it_costs():
    standing, found = taking(PLAN, 1.0), taking(PLAN, 0.9)
    given: Any = {"host_of": [0, 0, 1, 1, 1], "state_bytes": [1e6, 1e6]}
    assert pays_off(found, standing, 0.03, iterations=1, **given), "nothing moves"
    assert not pays_off(found, standing, 0.2, iterations=1, **given)
    swapped = taking(
        plan_of([[2, 1], [0, 3, 4]], [[1, 0], [1, 3], [1, 4], [2, 0], [2, 3], [2, 4]]), 0.9
    )
    _, bandwidth = PLAN.case.link_matrices
    latency_s = PLAN.case.link_matrices[0][0, 2]
    taking_s = migration_seconds(swapped, standing, **given)
    assert taking_s == pytest.approx(latency_s + 1e6 / bandwidth[0, 2])
    slow = given | {"state_bytes": [1e12, 1e12]}
    cost_s = migration_seconds(swapped, standing, **slow)
    enough = int(cost_s / 0.1) + 2
    assert pays_off(swapped, standing, 0.03, iterations=enough, **slow)
    assert not pays_off(swapped, standing, 0.03, iterations=enough - 3, **slow)


def test_nodes_count_as_quick_as_they_were_measured_to_be():
    busy_s = simulate_plan(PLAN).busy_s
    slower = recalibrated(
        PLAN, [busy * (3 if node == 4 else 1) for node, busy in enumerate(busy_s)]
    )
    assert [node.forward_s for node in slower.case.nodes] == pytest.approx([0.1] * 4 + [0.3])
    iteration_s = simulate_plan(PLAN).iteration_s
    assert slower.predicted.iteration_s > iteration_s
    assert simulate_plan(slower).busy_s[4] == pytest.approx(3 * busy_s[4])
    assert recalibrated(PLAN, busy_s).predicted.iteration_s == pytest.approx(iteration_s)


def test_a_median_drifts_and_not_a_single_iteration():
    assert not has_drifted([1.0, 1.1, 9.0], 1.0, 0.2)
    assert has_drifted([1.0, 1.3, 1.3], 1.0, 0.2)
    assert has_drifted([0.5, 0.5, 9.0], 1.0, 0.2)


def test_a_node_computes_when_it_is_not_idle():
    lines = [
        metrics_of(1, seconds_per_iteration=2.0, idle_share=[0.5, 0.0]),
        metrics_of(2, seconds_per_iteration=4.0, idle_share=[0.5, 0.5]),
        metrics_of(3, seconds_per_iteration=4.0, idle_share=[0.75, 0.75]),
    ]
    assert busy_seconds(lines) == [1.0, 2.0]
    assert busy_seconds([*lines, metrics_of(4)]) is None


# A host's search process: what becomes of those who wait for it, and when it is prepared.


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
