"""A live iteration follows the timing model, the plan's order and the nodes' memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from skippipe_sched.problem.plan import Operation, Plan
from skippipe_sched.timing.simulate import simulate_plan
from skippipe_sched.timing.timeline import Timeline

from skippipe_jax.cluster.membership import Group, Membership
from skippipe_jax.config import Config, DataConfig, NetworkConfig, TrainConfig
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.data.batches import Batch
from skippipe_jax.errors import PeerTimeout
from skippipe_jax.runtime.stage_functions import LOSS, TOKENS
from skippipe_jax.storage.recording import Recording, measured_timeline
from tests.harness.one_host import open_alone
from tests.runtime.test_oracle import BATCH, OPTIMIZER, SMALL, STEPS, TIME, random_batches
from tests.sched.examples import plan_of

SEED = 5
# So many iterations are tried where seconds count.
ATTEMPTS = 4


class Trained:
    """Iterations of a plan in this process, its nodes over two devices, and what was recorded."""

    def __init__(self, plan: Plan, *, ready_first: bool, **network: Any):
        self.plan = plan
        self.model = dataclasses.replace(SMALL, layers=len(plan.stages))
        config = Config(
            seed=SEED,
            model=self.model,
            optimizer=OPTIMIZER,
            data=DataConfig(microbatch_size=BATCH, sequence_length=TIME),
            network=NetworkConfig(**network),
            execution="ready-first" if ready_first else "strict",
            train=TrainConfig(STEPS),
        )
        self.runtime = open_alone(config, plan, devices=2)

    def run(self, iteration: int, batches: Sequence[Batch]) -> tuple[float, Recording]:
        """The loss of one iteration, and what happened in it."""
        outcome = self.runtime.run(iteration, dict(enumerate(batches)), record=True)
        assert outcome.recording is not None
        return float(outcome.totals[LOSS] / outcome.totals[TOKENS]), outcome.recording

    def timelines(self, folder: Path) -> Iterator[Timeline]:
        """Iteration 1 and the next ones, after one in which everything was compiled."""
        batches = random_batches(self.plan, seed=0)
        for iteration in range(1 + ATTEMPTS):
            _, recording = self.run(iteration, batches[iteration % len(batches)])
            recording.save(folder, iteration, 0)
            if iteration > 0:
                yield measured_timeline(folder, self.plan, iteration)


# Node 0's stage has no replicas; the others average. A path skips, one swaps.
STAGES = [[0], [1, 2], [3, 4]]
PATHS = [[0, 1, 3], [0, 2], [0, 4, 2], [0, 1, 4]]
# Long against what the computation of a small stage really takes on a busy machine.
SECONDS: dict[str, Any] = {
    "forward_s": 0.05,
    "hop_overhead_s": 0.025,
    "stage_bytes": 1.5e8,
    "activation_bytes": 5e7,
}


def assert_close(measured: Iterable[Timeline], expected: Iterable[Timeline]) -> Timeline:
    """All ends when it should, within a tenth of the iteration; returns an iteration that did.

    One is enough: a busy machine makes some iterations late, and a wrong clock all of them.
    """
    differences = []
    for own, truth in zip(measured, expected, strict=False):
        found, wanted = ends(own), ends(truth)
        assert found.keys() == wanted.keys()
        late_s = max(abs(found[what] - wanted[what]) for what in wanted)
        differences.append(late_s / truth.iteration_s)
        if differences[-1] < 0.1:
            return own
    raise AssertionError(f"late by these shares of an iteration: {differences}")


def ends(timeline: Timeline) -> dict[Operation | int, float]:
    """When each operation, and the averaging of each stage, has ended [s]."""
    runs = {run.operation: run.end_s for run in timeline.runs}
    return runs | {averaging.stage: averaging.end_s for averaging in timeline.averagings}


@pytest.mark.parametrize("contention", ["link", pytest.param("none", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "averaging", [pytest.param("collective", marks=pytest.mark.nightly), "ring"]
)
def test_an_iteration_takes_what_was_predicted(tmp_path: Path, contention: str, averaging: str):
    plan = plan_of(STAGES, PATHS, contention=contention, **SECONDS)
    trained = Trained(
        plan, ready_first=False, mode="emulate", emulate_compute=True, averaging=averaging
    )
    assert_close(trained.timelines(tmp_path), repeat(simulate_plan(plan)))


@pytest.mark.nightly
@pytest.mark.alone
def test_what_comes_late_does_not_hold_up_ready_first(tmp_path: Path):
    # From node 1 to node 3, and only there, a hop takes long; node 3 should start with it.
    order = [
        [(kind, m) for kind in "FLB" for m in range(4)],
        [("F", 0), ("B", 0)],
        [(kind, m) for kind in "FB" for m in (1, 2, 3)],
        [("F", 0), ("F", 1), ("F", 2), ("F", 3), ("B", 0), ("B", 1), ("B", 2), ("B", 3)],
    ]
    places = ("near", "far", "near", "end")
    plan = plan_of(
        [[0], [1, 2], [3]],
        [[0, 1, 3], [0, 2, 3], [0, 2, 3], [0, 2, 3]],
        order,
        nodes=[{"forward_s": 0.05, "memory": 4, "location": place} for place in places],
        locations=["near", "far", "end"],
        links=[
            ["far", "end", 1, 1 / 1024],
            ["end", "far", 1, 1],
            ["far", "near", 1, 1],
            ["near", "end", 1, 1],
        ],
        activation_bytes=2**19,
        stage_bytes=1e3,
    )
    strict, ready_first = (
        Trained(plan, ready_first=way, mode="emulate", emulate_compute=True).timelines(
            tmp_path / f"{way}"
        )
        for way in (False, True)
    )
    strict_s = assert_close(strict, repeat(simulate_plan(plan))).iteration_s
    quick = next((own for own in ready_first if own.iteration_s < 0.85 * strict_s), None)
    assert quick is not None
    assert quick.order[3][0] == Operation("F", 1, 3)


class Alone(Group):
    """Host 0 of a generation of three, whose others say nothing."""

    def contribute(self, *_: Any, **__: Any) -> None:
        """Nobody hears it."""


def test_who_waits_in_vain_for_totals_names_the_other_hosts():
    plan = plan_of([[0], [1, 2]], [[0]])
    config = Config(
        model=dataclasses.replace(SMALL, layers=2),
        data=DataConfig(microbatch_size=BATCH, sequence_length=TIME),
        network=NetworkConfig(deadline_s=0.5),
        train=TrainConfig(10),
    )
    own = Membership(config.cluster, 0, 3)
    own.inbox.begin(1)
    group = Alone(own, 0, range(3), Generation(1, (0, 1, 2), (0, 0, 0), 0, 0))
    runtime = open_alone(config, plan, devices=1, host_of=(0, 1, 2), group=group)
    with pytest.raises(PeerTimeout, match=r"waiting for the global sums from host 1, 2 \("):
        runtime.run(0, dict(enumerate(random_batches(plan, seed=0)[0])))
