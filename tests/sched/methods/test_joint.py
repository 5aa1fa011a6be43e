"""The joint search: near the optimum where that is known, and what it promises besides."""

import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from skippipe_sched.methods import joint, make_plan, path_length_of, plan_best
from skippipe_sched.methods.repair import repair_plan
from skippipe_sched.problem.case import load_case
from skippipe_sched.problem.open_case import candidates
from skippipe_sched.problem.rules import violations
from skippipe_sched.search import annealer
from skippipe_sched.search.budget import Search
from skippipe_sched.timing.bound import lower_bound_s
from skippipe_sched.timing.simulate import simulate_plan

from tests.sched.examples import PAPER, PUBLISHED, outer, same_place
from tests.sched.optima import SEEDS, kept_optimum
from tests.sched.optimum import random_small_case

# On the best placement of this case a node must idle while a microbatch waits for it. Nodes are
# placed by dispatch, which never does that and is quicker on another placement.
IDLES_ON_PURPOSE = {40: 1.07}


def paper_case():
    return load_case(Path(PAPER))


@pytest.mark.parametrize(
    "seed",
    # The order decides the last two.
    [s if s in {*range(6), 44, 47} else pytest.param(s, marks=pytest.mark.nightly) for s in SEEDS],
)
def test_joint_is_within_two_percent_of_the_optimum(seed):
    case = random_small_case(seed)
    optimum = kept_optimum(seed).iteration_s
    plan = make_plan(case, "joint", Search(budget_s=0.3, timed=False))
    most = IDLES_ON_PURPOSE.get(seed, 1.02)
    assert 1 - 1e-9 <= plan.predicted.iteration_s / optimum <= most
    assert plan.predicted.lower_bound_s is not None
    assert plan.predicted.lower_bound_s <= optimum * (1 + 1e-9)


def test_the_papers_case_is_planned_far_better_than_published():
    """A short search; the benchmark has the figures that matter."""
    case, search = paper_case(), Search(budget_s=1.0)
    plan = make_plan(case, "joint", search)
    published = simulate_plan(PUBLISHED)
    assert plan.predicted.iteration_s < 0.8 * published.iteration_s
    assert search.best_s == pytest.approx(plan.predicted.iteration_s)
    assert violations(case, plan.stages, plan.microbatches) == []


def test_a_search_that_begins_at_a_good_plan_needs_less_to_find_one():
    case = paper_case()
    known = make_plan(case, "joint", Search(budget_s=0.5))
    plain, begun = (make_plan(case, "joint", Search(1, 0.02, begin=b)) for b in (None, known))
    assert begun.predicted.iteration_s < plain.predicted.iteration_s


def test_a_search_improves_a_plan_that_has_lost_nodes_and_does_so_again():
    whole = make_plan(paper_case(), "balanced")
    repaired = repair_plan(whole, set(range(20)) - {3, 15})
    found, again = (
        make_plan(
            repaired.case, "joint", Search(1, 0.1, begin=repaired, improves=True, timed=False)
        )
        for _ in range(2)
    )
    assert found.predicted.iteration_s < 0.9 * repaired.predicted.iteration_s
    assert found.to_json() == again.to_json()


def test_a_search_for_full_paths_begins_at_a_plan_of_them_for_a_case_of_shorter_ones():
    case = paper_case()
    known = make_plan(case, "full", Search(budget_s=0.3))
    assert known.fits(case, path_length_of("full-joint", case))
    assert not known.fits(case, path_length_of("joint", case))
    begun = make_plan(case, "full-joint", Search(1, 0.02, begin=known))
    # It begins at the paths, and not at the order on each node.
    assert begun.predicted.iteration_s <= 1.01 * known.predicted.iteration_s


@pytest.mark.nightly
def test_partial_paths_beat_full_ones_under_the_same_search():
    case = paper_case()
    partial, full = (make_plan(case, m, Search(budget_s=1.0)) for m in ("joint", "full-joint"))
    assert {len(path) for path in full.microbatches} == {len(case.stages)}
    assert partial.predicted.iteration_s < full.predicted.iteration_s


@pytest.mark.nightly
def test_one_cluster_is_planned_to_the_bound():
    case = load_case(Path("experiments/paper/cluster1.yaml"))
    plan = make_plan(case, "joint", Search(budget_s=30.0, timed=False))
    assert plan.predicted.iteration_s <= 1.02 * lower_bound_s(case, case.path_length)


def test_the_same_seed_gives_the_same_plan_and_another_seed_another():
    case = paper_case()
    first, again, other = (
        make_plan(case, "joint", Search(seed, 0.2, timed=False)).to_json() for seed in (3, 3, 4)
    )
    assert first == again
    assert first["microbatches"] != other["microbatches"]


def test_a_given_placement_is_kept():
    search = Search(budget_s=0.1, placement=PUBLISHED.stages)
    assert make_plan(paper_case(), "joint", search).stages == PUBLISHED.stages


def test_more_microbatches_than_the_budget_pays_for_still_have_a_plan():
    case = same_place([3, 2, 2], path_length=2, microbatches_per_data_node=200)
    plan = make_plan(case, "joint", Search(budget_s=0.01))
    assert violations(case, plan.stages, plan.microbatches) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_search_in_many_pieces_keeps_every_nodes_share(seed, monkeypatch):
    """Nobody wants the one far node, and a piece must begin with what the last one counted."""
    far = {"locations": ["here"] * 5 + ["there"], "links": [["here", "there", 10_000, 1]]}
    case = same_place([2, 2, 2], path_length=2, microbatches_per_data_node=3, memory=3, **far)
    # As many pieces as 4 s of search have, in so little work that no clock cuts it short.
    monkeypatch.setattr(annealer, "OPERATIONS_PER_S", 5e5)
    plan = make_plan(case, "joint", Search(seed, 4.0))  # Refuses what breaks a rule.
    assert {node for path in plan.microbatches for node in path} == set(range(6))


class SlowMachine(Search):
    """A clock that every check of it advances."""

    checks = 0
    was_stopped = False

    @property
    def elapsed_s(self) -> float:
        return 0.016 * self.checks

    def start_clock(self) -> None:
        self.checks = 0

    def stopped(self) -> bool:
        self.checks += 1
        self.was_stopped |= super().stopped()
        return self.was_stopped


def test_a_machine_too_slow_for_all_steps_makes_fewer_in_each_later_round(monkeypatch):
    monkeypatch.setattr(annealer, "OPERATIONS_PER_S", 5e5)
    monkeypatch.setattr(annealer, "LOOK_S", 0.02)
    monkeypatch.setattr(joint, "HURRIED_STEPS", 0)
    search = SlowMachine(0, 4.0)
    make_plan(paper_case(), "joint", search)
    assert search.end.cut_short
    assert not search.was_stopped
    assert search.elapsed_s > 0.8 * search.budget_s


def test_swaps_and_little_memory_never_leave_a_plan_that_locks():
    rules = {"max_swaps": 3, "max_swap_distance": 3}
    case = same_place([3, 1, 1, 1], path_length=4, microbatches_per_data_node=4, memory=1)
    case = replace(case, rules=replace(case.rules, **rules))
    for seed in (0, 1, 2**70):
        plan = make_plan(case, "joint", Search(seed, 0.02))
        assert simulate_plan(plan).iteration_s == plan.predicted.iteration_s < np.inf


def test_an_interrupt_ends_the_search_with_the_best_so_far():
    search = Search(budget_s=120.0)
    timer = threading.Timer(0.3, lambda: signal.raise_signal(signal.SIGINT))
    make_plan(paper_case(), "joint", Search(budget_s=0.01))  # Compiles what is not yet compiled.
    with search.interruptible():
        timer.start()
        plan = make_plan(paper_case(), "joint", search)
    assert search.end.interrupted
    assert search.elapsed_s < 30
    assert violations(plan.case, plan.stages, plan.microbatches) == []


def test_an_open_case_is_planned_with_sizes_that_fit():
    source = dict(same_place([2, 2, 2], microbatches_per_data_node=2).source)
    del source["microbatches_per_data_node"]
    source |= {"stages": "auto", "stage_count": 3, "path_length": "auto", "microbatches": 6}
    plan = plan_best(candidates(source), "joint", Search(budget_s=0.3))
    assert sum(len(nodes) for nodes in plan.stages) == 6
    assert sum(plan.case.microbatches) == 6
    assert plan.case.path_length == len(plan.microbatches[0])


# Averaging behind the iterations.


def test_of_what_it_has_found_the_best_in_the_steady_state_is_taken(monkeypatch):
    judged = []

    def forecast(*routes):
        judged.append(routes)
        return SimpleNamespace(iteration_s=-len(judged))

    monkeypatch.setattr(joint, "forecast", forecast)
    case = same_place([2, 2], microbatches_per_data_node=2)
    make_plan(case, "joint", Search(budget_s=0.05))
    assert judged == []
    plan = make_plan(outer(case), "joint", Search(budget_s=0.05))
    assert len(judged) > 1
    assert (plan.stages, plan.microbatches) == judged[-1][1:3]


@pytest.mark.nightly
def test_with_averaging_behind_it_the_papers_case_takes_as_long_as_without_any():
    """A second of search: rings hide behind iterations, where the search lets them be short."""
    case = paper_case()
    plan = make_plan(outer(case), "joint", Search(budget_s=1.0))
    free = make_plan(replace(case, stage_bytes=(0.0,) * 6), "joint", Search(budget_s=1.0))
    assert violations(plan.case, plan.stages, plan.microbatches) == []
    assert plan.predicted.lower_bound_s is not None
    assert plan.predicted.lower_bound_s <= plan.predicted.iteration_s
    assert plan.predicted.iteration_s < 1.05 * free.predicted.iteration_s
    assert plan.predicted.late_s < 0.1 * plan.predicted.iteration_s
    assert simulate_plan(plan).iteration_s == plan.predicted.iteration_s
