"""What a session tells observers of its training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import parse_case

from skippipe_jax.config import parse_config
from skippipe_jax.connections.status import Progress, TrainingStatus
from skippipe_jax.training.callbacks.status import StatusUpdates
from tests.commands.examples import CASE
from tests.harness.step_metrics import metrics_of

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
