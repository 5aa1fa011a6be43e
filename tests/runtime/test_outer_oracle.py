"""Training with `averaging.mode: outer` equals the one-device oracle, on random plans."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from skippipe_sched.problem.plan import Plan

from skippipe_jax.config import (
    AveragingConfig,
    Config,
    DataConfig,
    ModelConfig,
    NetworkConfig,
    OptimizerConfig,
    TrainConfig,
)
from skippipe_jax.data.batches import Batch
from skippipe_jax.runtime.emulation import Emulation
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.runtime.stage_functions import LOSS, TOKENS
from skippipe_jax.runtime.state import FragmentInTransit
from tests.harness import oracle, outer_oracle
from tests.harness.one_host import open_alone
from tests.runtime.test_oracle import (
    BATCH,
    OPTIMIZER,
    SMALL,
    TIME,
    TOLERANCE,
    Way,
    plans,
    run,
)
from tests.sched.examples import plan_of


@st.composite
def averagings(draw: st.DrawFn, most_fragments: int) -> AveragingConfig:
    """Cycles short enough for a few iterations to see all of one."""
    every = draw(st.integers(1, 3))
    return AveragingConfig(
        mode="outer",
        every=every,
        fragments=draw(st.integers(1, min(every, most_fragments))),
        delay=draw(st.integers(0, every - 1)),
        dtype=draw(st.sampled_from(["float32", "int8"])),
        rate=draw(st.sampled_from([0.7, 1.0])),
        momentum=draw(st.sampled_from([0.0, 0.9])),
        exact_steps=draw(st.sampled_from([0, 1])),
    )


def random_batches(plan: Plan, iterations: int, seed: int) -> list[list[Batch]]:
    """A batch for every microbatch of every iteration; any but the first may have no targets."""
    random = np.random.default_rng(seed)

    def batch(microbatch: int) -> Batch:
        ids = random.integers(0, SMALL.vocabulary_size, (BATCH, TIME + 1), dtype=np.int32)
        share = random.choice([0.0, 0.5, 0.9]) if microbatch else 0.7
        counted = random.random((BATCH, TIME)) < share
        return {"tokens": ids[:, :-1], "targets": np.where(counted, ids[:, 1:], -1)}

    return [[*map(batch, range(len(plan.microbatches)))] for _ in range(iterations)]


def model_of(stage_layers: tuple[int, ...]) -> ModelConfig:
    return dataclasses.replace(SMALL, layers=sum(stage_layers), stage_layers=stage_layers)


def messages_of(runtime: Runtime, sent: dict[tuple[int, int, int], np.ndarray]) -> None:
    """Have every message that a replica sends noted in `sent`, by step, stage and place."""
    behind = runtime._background
    assert behind is not None
    topology, send = runtime.topology, behind.send

    def noting(
        replica: int, step: int, own: FragmentInTransit, emulation: Emulation | None = None
    ) -> None:
        stage = topology.stage_of[replica]
        place = topology.replicas[stage].index(replica)
        sent[step, stage, place] = np.asarray(own.message)
        send(replica, step, own, emulation)

    behind.send = noting


def assert_equals_the_oracle(
    plan: Plan,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    averaging: AveragingConfig,
    batches: list[list[Batch]],
    devices: int,
    execution: str = "strict",
) -> None:
    sent: dict[tuple[int, int, int], np.ndarray] = {}
    way = Way(live=True, execution=execution, network=NetworkConfig())
    runtime, outcomes = run(
        plan,
        model,
        optimizer,
        batches,
        devices,
        way,
        averaging=averaging,
        watched_by=lambda runtime: messages_of(runtime, sent),
    )
    given = model, optimizer, averaging, plan.stages, plan.microbatches, batches, 0, len(batches)
    expected = outer_oracle.train(
        *given, recorded=None if averaging.dtype == "float32" else lambda *of: sent[of]
    )
    for node, state in runtime.states.items():
        error = oracle.relative_error(state.parameters, expected.parameters[node])
        assert error < TOLERANCE, f"node {node}: {error}"
        error = oracle.relative_error(state.model, expected.outer[plan.stage_of[node]])
        assert error < TOLERANCE, f"outer parameters of node {node}: {error}"
    for outcome, loss in zip(outcomes, expected.losses, strict=True):
        assert abs(float(outcome.totals[LOSS] / outcome.totals[TOKENS]) - loss) < 1e-5
    if averaging.dtype != "float32":
        free = outer_oracle.train(*given)
        np.testing.assert_allclose(expected.losses, free.losses, atol=1e-3)
    for node, gauge in outcomes[-1].gauges.items():
        now, peak = gauge.tolist()
        assert now == 0
        assert peak <= plan.case.nodes[node].memory


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # Most of it is compiling: every example is another model.
@settings(
    max_examples=3,  # What fails is not made smaller: that would compile for minutes.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_replicas_that_go_apart_equal_the_oracle(data: st.DataObject):
    plan = data.draw(plans(most_stages=3))
    layers = tuple(data.draw(st.integers(1, 2)) for _ in plan.stages)
    averaging = data.draw(averagings(min(layers)))
    batches = random_batches(plan, averaging.min_steps + 2, data.draw(st.integers(0, 99)))
    clip_norm = data.draw(st.sampled_from([0.05, None]))
    assert_equals_the_oracle(
        plan,
        model_of(layers),
        dataclasses.replace(OPTIMIZER, clip_norm=clip_norm),
        averaging,
        batches,
        data.draw(st.sampled_from([1, 2])),
        data.draw(st.sampled_from(["strict", "ready-first"])),
    )


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "adamw"),
        pytest.param("int8", "adamw", marks=pytest.mark.nightly),
        pytest.param("float32", "muon", marks=pytest.mark.nightly),
    ],
)
def test_fragments_that_overlap_equal_the_oracle(dtype: str, name: str):
    """Two are under way at once, one of three replicas is visited by nothing."""
    plan = plan_of([[0, 1], [2, 3, 4]], [[0, 2], [1, 3], [0, 3], [1, 2]])
    averaging = AveragingConfig(
        mode="outer", every=4, fragments=2, delay=3, dtype=dtype, exact_steps=1
    )
    batches = random_batches(plan, averaging.min_steps + 5, seed=5)
    optimizer = dataclasses.replace(OPTIMIZER, name=name, clip_norm=0.05)
    assert_equals_the_oracle(plan, model_of((2, 3)), optimizer, averaging, batches, 2)


def test_an_emulated_averaging_takes_what_the_iteration_drew_that_sent_it():
    plan = plan_of([[0, 1]], [[0], [1]], stage_bytes=1e8)
    averaging = AveragingConfig(mode="outer", every=4, fragments=1, delay=3, dtype="float32")
    network = NetworkConfig(mode="emulate", jitter=1.0)
    config = Config(
        model=model_of((1,)),
        averaging=averaging,
        data=DataConfig(microbatch_size=BATCH, sequence_length=TIME),
        network=network,
        train=TrainConfig(8),
    )
    runtime = open_alone(config, plan, devices=2)
    behind, emulation = runtime._background, Emulation(plan, network, seed=0)
    assert behind is not None
    seconds = []
    for iteration in range(50):
        emulation.begin(iteration)
        seconds.append(emulation.averaging_end_s(0, 0.0))
    longest, shortest = (seconds.index(own) for own in (max(seconds), min(seconds)))
    assert seconds[longest] > 4 * seconds[shortest]
    emulation.begin(longest)
    assert runtime._outer_steps is not None
    for replica in runtime.states:
        own = runtime._outer_steps.send(replica, averaging.every)
        assert isinstance(own, FragmentInTransit)
        behind.send(replica, averaging.every, own, emulation)
    emulation.begin(shortest)
    done = []
    while len(done) < 2:
        runtime.exchange.loop.run_one(lambda: "the rings did not end")
        done += behind.take_averagings()
    runtime.close()
    # What has come before a replica began counts from then.
    assert [own.end_s - own.start_s > seconds[longest] / 2 for own in done] == [True, True]
