"""Every policy at every rate of faults: the same faults, the means, the verdict, the picture."""

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean
from xml.etree import ElementTree

import pytest
from skippipe_sched.churn.iteration_times import IterationTimes
from skippipe_sched.churn.picture import picture
from skippipe_sched.churn.policies import POLICIES
from skippipe_sched.churn.simulation import ChurnCosts
from skippipe_sched.churn.sweep import Churn, Point, causes, doublings, goodputs, sweep, verdict
from skippipe_sched.errors import InputError
from skippipe_sched.fields import duration

from tests.sched.examples import in_order, planned, same_place

COSTS = ChurnCosts(
    heartbeat_s=30,
    regroup_s=1,
    restore_s=10,
    restart_s=120,
    save_every=50,
    save_s=1,
    copy_every=10,
    state_factor=3,
)
HOUR_S = 3600.0
SVG = "{http://www.w3.org/2000/svg}"


class Uncached(IterationTimes):
    """Plans a placement whenever it is asked for."""

    def __call__(self, placement):
        return self.planned_s(placement)


@pytest.fixture(scope="module")
def plan():
    """Six microbatches over three stages of two nodes, half a minute an iteration."""
    case = same_place([2, 2, 2], microbatches_per_data_node=3, forward_s=2, memory=6)
    paths = [(m % 2, 2 + m % 2, 4 + m % 2) for m in range(6)]
    return planned(case, in_order([2, 2, 2]), paths)[0]


@pytest.fixture(scope="module")
def points(plan):
    """Two days at three rates."""
    churn = Churn(repair_s=600, end_s=48 * HOUR_S, seeds=(0, 1))
    return sweep(plan, doublings(4 * HOUR_S, 1), churn, COSTS, IterationTimes(plan, 10_000))


def test_cached_is_uncached(plan):
    churn = Churn(repair_s=600, end_s=8 * HOUR_S, seeds=(0,))
    cached, uncached = IterationTimes(plan, 10_000), Uncached(plan, 1)
    assert sweep(plan, [HOUR_S], churn, COSTS, cached) == sweep(
        plan, [HOUR_S], churn, COSTS, uncached
    )
    assert 2 < cached.planned < 64


def test_goodput_falls_with_the_rate_of_faults_which_are_the_same_for_all_policies(points):
    assert len({(point.mtbf_s, point.faults) for point in points}) == 3
    for policy in POLICIES:
        own = [point for point in points if point.policy == policy]
        assert [point.mtbf_s for point in own] == [8 * HOUR_S, 4 * HOUR_S, 2 * HOUR_S]
        assert all(0 < point.least <= point.goodput <= point.most < 1 for point in own)
        assert own[0].goodput > own[1].goodput > own[2].goodput
        assert own[0].faults < own[1].faults < own[2].faults


def test_a_point_is_the_mean_over_the_seeds(plan):
    churn = Churn(repair_s=600, end_s=12 * HOUR_S, seeds=(3, 4))
    times = IterationTimes(plan, 10_000)
    both = sweep(plan, [2 * HOUR_S], churn, COSTS, times)
    alone = [sweep(plan, [2 * HOUR_S], replace(churn, seeds=(s,)), COSTS, times) for s in (3, 4)]
    for point, first, second in zip(both, *alone, strict=True):
        ends = sorted([first.goodput, second.goodput])
        assert (point.least, point.most) == tuple(ends)
        assert point.goodput == pytest.approx(mean(ends))
        assert point.losses == mean([first.losses, second.losses])
        for kind in point.spent_s:
            assert point.spent_s[kind] == pytest.approx(
                mean([first.spent_s[kind], second.spent_s[kind]])
            )


def test_a_run_that_is_too_short_for_a_step_is_refused(plan):
    churn = Churn(repair_s=600, end_s=20, seeds=(0,))
    with pytest.raises(
        InputError, match=r"--days = .*: is too short for a step, .* takes \d\d.* s"
    ):
        sweep(plan, [HOUR_S], churn, COSTS, IterationTimes(plan, 9))


def test_each_rate_may_plan_its_part(plan):
    churn = Churn(repair_s=600, end_s=24 * HOUR_S, seeds=(0,))
    times, planned = IterationTimes(plan, 8), []
    rates = [4 * HOUR_S, 2 * HOUR_S]
    sweep(plan, rates, churn, COSTS, times, lambda: planned.append(times.planned))
    assert planned[len(POLICIES) - 1 :: len(POLICIES)] == [4, 8]
    assert times.estimated_placements > 0


# What is said of it.


def made_up(figures):
    """Points of these goodputs by policy, at 4, 2 and 1 hours between faults."""
    return [
        Point(policy, mtbf_s, goodput, goodput, goodput, 5, 4, 2.5, {}, {"noticing": 36.0,
              "regrouping": 72.0, "down": 0.0})
        for index, mtbf_s in enumerate([4 * HOUR_S, 2 * HOUR_S, HOUR_S])
        for policy in POLICIES
        for goodput in [figures.get(policy, [0.9, 0.8, 0.7])[index]]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("figures", "inexact", "restarting"),
    [
        ({"restart": [0.1, 0.1, 0.1]}, "never falls behind the inexact policies",
         "never falls behind restarting"),
        ({"skip": [0.9, 0.805, 0.77], "buddy": [0.9, 0.7, 0.75], "restart": [0.2, 0.1, 0.0]},
         "falls behind the inexact policies (skip) at 1h, with a goodput of 0.700 against 0.770",
         "never falls behind restarting"),
        ({"average": [0.95, 0.1, 0.1], "restart": [0.1, 0.9, 0.9]},
         "falls behind the inexact policies (average) at 4h, with a goodput of 0.900 against 0.950",
         "falls behind restarting at 2h, with a goodput of 0.800 against 0.900"),
    ],
)  # fmt: skip
def test_the_verdict_names_the_first_rate(figures, inexact, restarting):
    said = verdict(made_up(figures))
    assert said == (
        f"exact recovery (rewind) {inexact}, and {restarting} "
        "(mean time between faults of a node: 4h to 1h)"
    )
    one = [point for point in made_up({}) if point.mtbf_s == HOUR_S]
    assert verdict(one).endswith(" restarting (mean time between faults of a node: 1h)")
    drawn = ElementTree.fromstring(picture(one, "paper"))
    assert len({circle.get("cx") for circle in drawn.iter(f"{SVG}circle")}) == 1


def test_the_tables_are_aligned_and_hold_the_figures():
    points = made_up({"restart": [0.1, 0.25, 0.0]})
    head, *lines = goodputs(points).splitlines()
    assert head.split() == ["goodput", "4h", "2h", "1h"]
    assert [line.split()[0] for line in lines] == list(POLICIES)
    assert lines[0].split()[1:] == ["0.100", "0.250", "0.000"]
    assert len({len(line) for line in [head, *lines]}) == 1
    points[0] = replace(points[0], recoveries={"restart": 3.5, "rewind": 1.0})
    head, first, *lines = causes(points, 4 * HOUR_S, HOUR_S).splitlines()
    assert len(lines) == len(POLICIES) - 1
    assert first.split(maxsplit=6)[:6] == ["restart", "1.0%", "2.0%", "0.0%", "4.0", "2.5"]
    assert first.endswith("  3.5 restart, 1.0 rewind")
    assert all(line.endswith("  -") for line in lines)
    assert head.index("recoveries") == first.index("3.5 restart")


def test_the_picture_has_a_line_for_every_policy():
    drawn = ElementTree.fromstring(picture(made_up({"skip": [0.9, 0.4, 0.0]}), "<paper>"))
    lines = drawn.findall(f"{SVG}polyline")
    assert [line.get("class", "").split() for line in lines] == [
        [f"of-{name}", *([] if policy.is_exact else ["inexact"])]
        for name, policy in POLICIES.items()
    ]
    corners = [
        [tuple(map(float, corner.split(","))) for corner in line.get("points", "").split()]
        for line in lines
    ]
    # Higher rates stand further to the right, and halves lie as far apart.
    (a, top), (b, _), (c, _) = corners[0]
    assert a < b < c
    assert b - a == pytest.approx(c - b)
    (_, y), (_, middle), (_, bottom) = corners[list(POLICIES).index("skip")]
    assert y == top
    assert (bottom - middle) * 0.9 == pytest.approx((bottom - y) * 0.4, rel=1e-3)
    texts = ["".join(text.itertext()) for text in drawn.iter(f"{SVG}text")]
    assert texts[0].startswith("<paper>")
    assert {"4h", "2h", "1h"} <= set(texts)
    assert len(drawn.findall(f"{SVG}circle")) == len(POLICIES) * 3


def test_the_page_shows_what_the_command_has_said():
    told = json.loads(Path("experiments/results/churn_on_paper.json").read_text())
    page = Path("docs/churn.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `?(\w+)`? \| ((?:[\d.hmin]+ \| ?)+)$", page, re.M)
    (_, head), *rows = table
    mtbfs_s = [duration(text, "page") for text in head.strip(" |").split(" | ")]
    assert [policy for policy, _ in rows] == list(POLICIES)
    figures = {(one["policy"], one["mtbf_s"]): f"{one['goodput']:.3f}" for one in told["points"]}
    for policy, cells in rows:
        shown = re.findall(r"[\d.]+", cells)
        assert shown == [figures[policy, mtbf_s] for mtbf_s in mtbfs_s]
    assert told["verdict"] in " ".join(page.replace("\n> ", " ").split())
