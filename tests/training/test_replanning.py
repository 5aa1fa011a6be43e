"""The leader searches while others train, and what it finds is proposed if it is worth it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from skippipe_sched.problem.plan import Plan
from skippipe_sched.timing.simulate import simulate_plan

from skippipe_jax.cluster.membership import Membership, Team
from skippipe_jax.config import ClusterConfig, Config, ModelConfig, TrainConfig
from skippipe_jax.config.cluster import ReplanConfig
from skippipe_jax.consensus.generations import Generation, PlanRequest
from skippipe_jax.training.replan import planner_process
from skippipe_jax.training.replan.planner_process import WarmPlanner
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
EVEN = predicting(plan_of([[0], [1, 2]], [[0, 1], [0, 2], [0, 1], [0, 2]], path_length=2))


def team_of(generation: Generation) -> Team:
    """That of host 0, which is in this generation."""
    membership = Membership(ClusterConfig(), 0, 1)
    membership.inbox.begin(generation.number)
    return Team(membership, generation)


SECOND = Generation(2, (0, 2, 3), (7, 7, 7), 0, 10, placement=OWN.stages)


class Leader:
    """The leader of a run of four hosts, and what it has proposed."""

    def __init__(self, config: Config, standing: Plan, generation: Generation = SECOND):
        self.wished: list[PlanRequest] = []
        self.plans, self.planner = SharedPlans(), WarmPlanner()
        self.view: Any = SimpleNamespace(step=20)
        given = standing, OWN, [0, 1, 2, 3], self.planner, self.wished.append
        self.replanning = Replanner(config, team_of(generation), self.plans, *given)
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
    of_it = replace(SECOND, members=(0,), plan=wish.plan)
    knows = plan_session(of_it, [GenerationReport(known_plans=leader.plans.names)])
    found = leader.plans.fetch(team_of(of_it), knows)
    assert found is not None
    assert found.stages == ((0, 1), (2,))
    assert found.predicted.iteration_s < 0.9 * STANDING.predicted.iteration_s


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


def test_the_best_plan_is_proposed_by_which_nobody_reads_that_may_lack_the_text(
    leaders: list[Leader], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(planner_process, "LOW_PRIORITY", ("nice", "-n", "0"))
    leaders.append(leader := Leader(CONFIG, STANDING, replace(SECOND, apart=(2, 3))))
    leader.trains_until_the_search_is_over()
    [wish] = leader.wished
    assert wish.placement == OWN.stages, "host 0 alone has data"


def test_a_plan_that_nobody_knows_is_none():
    alone = replace(SECOND, members=(0,))
    for generation in (alone, replace(alone, plan="another's")):
        agreed = plan_session(generation, [GenerationReport()])
        assert SharedPlans().fetch(team_of(generation), agreed) is None


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


def test_a_search_begins_at_a_plan_that_is_like_the_case():
    assert EVEN.fits(STANDING.case, STANDING.case.path_length)
    assert not EVEN.fits(OWN.case, OWN.case.path_length)
