"""Training equals the one-device oracle, on random plans and models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from skippipe_sched.methods.repair import repair_plan
from skippipe_sched.problem.case import parse_case
from skippipe_sched.problem.plan import Operation, Plan, Predicted
from skippipe_sched.timing.simulate import simulate

from skippipe_jax.config import (
    AveragingConfig,
    Config,
    DataConfig,
    ModelConfig,
    NetworkConfig,
    OptimizerConfig,
    RopeScaling,
    TrainConfig,
)
from skippipe_jax.config.model import RECOMPUTE
from skippipe_jax.connections.threads import DaemonThreads
from skippipe_jax.data.batches import Batch
from skippipe_jax.models.llama import create_stage
from skippipe_jax.optim import rounding
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.runtime.stage_functions import LOSS, SQUARED_NORM, TOKENS, Z_LOSS, skips_update
from skippipe_jax.runtime.totals import Outcome
from tests.harness import oracle
from tests.harness.one_host import open_alone
from tests.sched.examples import plan_of

ITERATIONS = 3
STEPS = 30
BATCH, TIME = 2, 6
TOLERANCE = 2e-5
# Large steps, so that a gradient which is slightly wrong moves the parameters visibly, and a large
# epsilon: otherwise Adam would forgive a gradient that is wrong by a factor, as clipping would.
OPTIMIZER = OptimizerConfig(
    learning_rate=3e-2, warmup_steps=1, decay_steps=10, weight_decay=0.1, epsilon=1e-2
)
CLIPPING, NOT_CLIPPING = 0.05, None


SMALL = ModelConfig(
    vocabulary_size=11, width=8, layers=3, heads=2, kv_heads=1, ffn_width=12, context=TIME
)


@st.composite
def plans(draw: st.DrawFn, most_stages: int = 5) -> Plan:
    """Random placements and paths, balanced or not, in the order that the simulator gives them."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=most_stages))
    stages = []
    for size in sizes:
        first = sum(len(nodes) for nodes in stages)
        stages.append(tuple(range(first, first + size)))
    sent = draw(st.lists(st.integers(1, 2), min_size=sizes[0], max_size=sizes[0]))
    paths = []
    for data_node, count in zip(stages[0], sent, strict=True):
        for _ in range(count):
            inner = draw(st.permutations(range(1, len(sizes))))
            visited = inner[: draw(st.integers(0, len(inner)))]
            paths.append((data_node, *(draw(st.sampled_from(stages[s])) for s in visited)))
    forward_s = draw(
        st.lists(st.sampled_from([0.1, 0.2, 0.5]), min_size=sum(sizes), max_size=sum(sizes))
    )
    case = parse_case(
        {
            "nodes": [
                {"forward_s": seconds, "memory": draw(st.integers(1, 3))} for seconds in forward_s
            ],
            "locations": ["here"],
            "links": [],
            "activation_bytes": draw(st.sampled_from([1e3, 1e7])),
            "stage_bytes": 1e6,
            "forward_s": 0.1,
            "stages": sizes,
            "path_length": 1,
            "microbatches_per_data_node": sent,
            "memory": 1,
        }
    )
    order = simulate(case, stages, paths).order
    return Plan("random", tuple(stages), tuple(paths), order, Predicted(0, 0, 0, 0), case)


@st.composite
def models(draw: st.DrawFn, stages: int) -> ModelConfig:
    layers = draw(st.lists(st.integers(1, 2), min_size=stages, max_size=stages))
    return ModelConfig(
        vocabulary_size=11,
        width=8,
        layers=sum(layers),
        stage_layers=tuple(layers),
        heads=2,
        kv_heads=draw(st.sampled_from([1, 2])),
        ffn_width=12,
        context=TIME,
        tied_head=draw(st.booleans()),
        rope_scaling=draw(st.sampled_from([None, RopeScaling(original_context=4)])),
        recompute=draw(st.sampled_from(RECOMPUTE)),
    )


def random_batches(plan: Plan, seed: int) -> list[list[Batch]]:
    """A batch for every microbatch of every iteration, some targets left out."""
    random = np.random.default_rng(seed)

    def batch() -> Batch:
        ids = random.integers(0, 11, (BATCH, TIME + 1), dtype=np.int32)
        counted = random.random((BATCH, TIME)) < 0.8
        return {"tokens": ids[:, :-1], "targets": np.where(counted, ids[:, 1:], -1)}

    return [[batch() for _ in plan.microbatches] for _ in range(ITERATIONS)]


@dataclasses.dataclass(frozen=True)
class Way:
    """How iterations are run."""

    live: bool
    execution: str
    network: NetworkConfig


WAYS = [
    Way(live=False, execution="strict", network=NetworkConfig()),
    Way(live=True, execution="strict", network=NetworkConfig()),
    Way(live=True, execution="ready-first", network=NetworkConfig(averaging="ring")),
    Way(live=True, execution="strict", network=NetworkConfig(averaging="ring", mode="emulate")),
    # So much luck that little happens in the plan's order.
    Way(live=True, execution="ready-first", network=NetworkConfig(mode="emulate", jitter=20.0)),
]


def run(
    plan: Plan,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    batches: list[list[Batch]],
    devices: int,
    way: Way,
    *,
    averaging: AveragingConfig | None = None,
    watched_by: Callable[[Runtime], None] = lambda _: None,
) -> tuple[Runtime, list[Outcome]]:
    """Train in this process, with the nodes spread over some of its devices."""
    config = Config(
        model=model,
        optimizer=optimizer,
        averaging=averaging or AveragingConfig(),
        data=DataConfig(
            microbatch_size=BATCH,
            sequence_length=TIME,
            packing="documents" if "begins" in batches[0][0] else "windows",
        ),
        network=way.network,
        execution=way.execution,
        train=TrainConfig(STEPS),
    )
    runtime = open_alone(config, plan, devices)
    watched_by(runtime)
    outcomes = [
        runtime.run(iteration, dict(enumerate(own)), record=way.live)
        for iteration, own in enumerate(batches)
    ]
    for step, outcome in enumerate(outcomes, 1):
        runtime.wait_for(DaemonThreads().submit(outcome.sums), step)
    runtime.close()
    return runtime, outcomes


def assert_any_training_equals_the_oracle(
    data: st.DataObject, plan: Plan, model: ModelConfig
) -> None:
    """Train a model by a plan, with everything else drawn."""
    batches = random_batches(plan, seed=data.draw(st.integers(0, 99)))

    clip_norm = data.draw(st.sampled_from([CLIPPING, NOT_CLIPPING]))
    optimizer = dataclasses.replace(OPTIMIZER, clip_norm=clip_norm)

    devices = data.draw(st.sampled_from([1, 2]))
    way = data.draw(st.sampled_from(WAYS))
    assert_training_equals_the_oracle(plan, model, optimizer, batches, devices, way)


@settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_training_by_any_plan_equals_the_oracle(data: st.DataObject):
    plan = data.draw(plans())
    model = dataclasses.replace(SMALL, layers=len(plan.stages))
    assert_any_training_equals_the_oracle(data, plan, model)


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # Most of it is compiling: every example is another model.
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_training_of_any_model_equals_the_oracle(data: st.DataObject):
    plan = data.draw(plans(most_stages=3))
    assert_any_training_equals_the_oracle(data, plan, data.draw(models(len(plan.stages))))


def assert_training_equals_the_oracle(
    plan: Plan,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    batches: list[list[Batch]],
    devices: int,
    way: Way,
    *,
    watched_by: Callable[[Runtime], None] = lambda _: None,
) -> list[Outcome]:
    runtime, outcomes = run(plan, model, optimizer, batches, devices, way, watched_by=watched_by)

    stage_paths = [[plan.stage_of[node] for node in path] for path in plan.microbatches]
    expected, losses = oracle.train(
        model, optimizer, stage_paths, len(plan.stages), batches, seed=0
    )
    for node, state in runtime.states.items():
        error = oracle.relative_error(state.parameters, expected[plan.stage_of[node]])
        assert error < TOLERANCE, f"node {node}: {error}"
    for outcome, loss in zip(outcomes, losses, strict=True):
        # Both are NaN where there is no target.
        found = float(outcome.totals[LOSS] / outcome.totals[TOKENS])
        np.testing.assert_allclose(found, loss, rtol=0, atol=1e-5)
    for node, gauge in outcomes[-1].gauges.items():
        now, peak = gauge.tolist()
        assert now == 0
        assert peak <= plan.case.nodes[node].memory
    return outcomes


@pytest.mark.nightly
def test_with_all_that_an_optimizer_may_do():
    """z-loss, what does not decay, another schedule, and a guard against the greatest gradient."""
    plan = plan_of([[0, 1], [2], [3, 4]], [[0, 2, 4], [1, 3, 2], [0, 3]])
    optimizer = dataclasses.replace(
        OPTIMIZER,
        clip_norm=NOT_CLIPPING,
        schedule="warmup-stable-decay",
        decay_steps=4,
        decay_fraction=0.5,
        decay_shape="1-sqrt",
        decay_embeddings=False,
        decay_head=False,
        z_loss=0.1,
        skip_above_norm=100.0,
    )
    first, second, third = random_batches(plan, seed=1)
    batches = [second, first, third]
    outcomes = assert_training_equals_the_oracle(plan, SMALL, optimizer, batches, 2, WAYS[1])
    assert all(float(outcome.totals[Z_LOSS]) > 1.0 for outcome in outcomes)

    totals = [np.asarray(outcome.totals) for outcome in outcomes]
    norms = [float(np.sqrt(each[SQUARED_NORM]) * BATCH * TIME / each[TOKENS]) for each in totals]
    # The first gradient is too great, and that of the other batch with these parameters is not.
    guarded = dataclasses.replace(optimizer, skip_above_norm=0.999 * norms[0])
    outcomes = assert_training_equals_the_oracle(plan, SMALL, guarded, batches, 2, WAYS[0])
    skipped = [bool(skips_update(guarded, outcome.totals, BATCH * TIME)) for outcome in outcomes]
    assert skipped[:2] == [True, False]


REPLICATED = plan_of([[0, 1], [2], [3, 4]], [[0, 2, 4], [1, 3, 2], [0, 3]])


def test_a_microbatch_is_on_a_device_only_once_its_forward_begins():
    happened: list[tuple[str, int]] = []

    def note(runtime: Runtime) -> None:
        operations = runtime.operations
        keep, dispatch = operations._keep_targets, operations._dispatch

        def keeping(operation: Operation, batch: Batch) -> None:
            happened.append(("put", operation.microbatch))
            keep(operation, batch)

        def dispatching(operation: Operation, value: Any, leaves: bool) -> Any:
            happened.append((operation.kind, operation.microbatch))
            return dispatch(operation, value, leaves)

        operations._keep_targets, operations._dispatch = keeping, dispatching

    plan = plan_of([[0]], [[0]] * 3)
    batches = random_batches(plan, seed=7)
    run(plan, dataclasses.replace(SMALL, layers=1), OPTIMIZER, batches, 1, WAYS[0], watched_by=note)
    puts = [place for place, (what, _) in enumerate(happened) if what == "put"]
    assert len(puts) == len(batches) * len(plan.microbatches)
    assert [happened[place + 1] for place in puts] == [("F", happened[place][1]) for place in puts]


@pytest.mark.parametrize("skip_above_norm", [None, pytest.param(100.0, marks=pytest.mark.nightly)])
def test_an_iteration_without_a_target_changes_nothing(skip_above_norm: float | None):
    batches = random_batches(REPLICATED, seed=7)
    for batch in batches[1]:
        batch["targets"] = np.full_like(batch["targets"], -1)
    optimizer = dataclasses.replace(OPTIMIZER, clip_norm=CLIPPING, skip_above_norm=skip_above_norm)
    outcomes = assert_training_equals_the_oracle(
        REPLICATED, SMALL, optimizer, batches, 2, WAYS[skip_above_norm is None]
    )
    skipped = [bool(skips_update(optimizer, outcome.totals, BATCH * TIME)) for outcome in outcomes]
    assert skipped == [False, True, False]


@pytest.mark.parametrize(
    "way", [WAYS[0], *(pytest.param(way, marks=pytest.mark.nightly) for way in WAYS[2:4])]
)
def test_matrices_that_muon_updates(way: Way):
    optimizer = dataclasses.replace(
        OPTIMIZER, name="muon", clip_norm=CLIPPING, skip_above_norm=100.0
    )
    batches = random_batches(REPLICATED, seed=8)
    assert_training_equals_the_oracle(REPLICATED, SMALL, optimizer, batches, 2, way)


@pytest.mark.nightly
@pytest.mark.parametrize(("way", "name"), [*((way, "adamw") for way in WAYS), (WAYS[1], "muon")])
def test_moments_that_wait_in_the_memory_of_the_host(way: Way, name: str):
    optimizer = dataclasses.replace(OPTIMIZER, name=name, clip_norm=CLIPPING, state_memory="host")
    batches, seen = random_batches(REPLICATED, seed=4), list[Runtime]()

    def see(runtime: Runtime) -> None:
        seen.append(runtime)
        for state in runtime.states.values():
            leaves = jax.tree.leaves(state.optimizer_state)
            assert {leaf.sharding.memory_kind for leaf in leaves} == {"pinned_host"}

    assert_training_equals_the_oracle(REPLICATED, SMALL, optimizer, batches, 2, way, watched_by=see)
    see(seen[0])


@pytest.mark.nightly
@pytest.mark.parametrize(("way", "name"), [(WAYS[1], "muon"), (WAYS[2], "adamw")])
def test_what_is_rounded_by_chance_is_rounded_alike_on_all_replicas(way: Way, name: str):
    optimizer = dataclasses.replace(
        OPTIMIZER, name=name, clip_norm=CLIPPING, moment_dtype="bfloat16"
    )
    # First weights are others in bfloat16: with small ones the losses are alike all the same.
    small = dataclasses.replace(SMALL, initial_deviation=0.02)
    model = dataclasses.replace(small, parameter_dtype="bfloat16")
    batches = random_batches(REPLICATED, seed=5)
    runtime, outcomes = run(REPLICATED, model, optimizer, batches, 2, way)
    for nodes in REPLICATED.stages:
        first, *others = (runtime.states[node] for node in nodes)
        for other in others:
            for name in ("parameters", "optimizer_state"):
                pairs = zip(
                    *(jax.tree.leaves(getattr(s, name)) for s in (first, other)), strict=True
                )
                for one, two in pairs:
                    np.testing.assert_array_equal(one.astype(jnp.float32), two.astype(jnp.float32))
    in_full = dataclasses.replace(optimizer, moment_dtype=OPTIMIZER.moment_dtype)
    _, exact = run(REPLICATED, small, in_full, batches, 2, way)
    for own, best in zip(outcomes, exact, strict=True):
        assert float(own.totals[LOSS]) == pytest.approx(float(best.totals[LOSS]), rel=0.02)


@pytest.mark.parametrize(
    ("network", "recompute"),
    [
        pytest.param(
            {"activation_dtype": "int8", "gradient_rounding": "stochastic"},
            "stage",
            marks=pytest.mark.nightly,
        ),
        ({"activation_dtype": "bfloat16", "gradient_dtype": "int8"}, "none"),
    ],
    ids=["int8, stochastic", "bfloat16 and int8"],
)
def test_what_leaves_a_node_is_rounded_as_is_configured(network: dict[str, Any], recompute: str):
    """By little, and by a draw that belongs to the microbatch, whichever node draws it."""
    plan = plan_of([[0, 1], [2], [3, 4]], [[0, 2, 4], [0], [1, 3, 2], [0, 3]])
    model = dataclasses.replace(SMALL, recompute=recompute)
    batches, left = random_batches(plan, seed=3), list[Operation]()

    def watch(runtime: Runtime) -> None:
        operations, dispatch = runtime.operations, runtime.operations._dispatch
        wire = operations.wire

        def watched(operation: Operation, value: Any, leaves: bool) -> Any:
            result, at_the_end = dispatch(operation, value, leaves)
            if leaves:
                left.append(operation)
                how = wire.activations if operation.kind == "F" else wire.gradients
                assert (result.shape, result.dtype) == (how.travelling.shape, how.travelling.dtype)
                draw = operations._draw(operation, leaves)
                assert (draw is not None) == wire.gradients.is_drawn
                if draw is not None:
                    of_run = runtime.config.seed, operations.iteration
                    stage = plan.stage_of[operation.node]
                    assert draw.tolist() == [*of_run, operation.microbatch, stage]
            return result, at_the_end

        operations._dispatch = watched

    way = Way(live=False, execution="strict", network=NetworkConfig(**network))
    runtime, _ = run(plan, model, OPTIMIZER, batches, 2, way, watched_by=watch)
    # Hops there and back, of all microbatches but the one that stays.
    hops = sum(2 * len(path) for path in plan.microbatches if len(path) > 1)
    assert len(left) == len(batches) * hops
    paths = [[plan.stage_of[node] for node in path] for path in plan.microbatches]
    exact, _ = oracle.train(model, OPTIMIZER, paths, len(plan.stages), batches, seed=0)
    errors = [
        oracle.relative_error(state.parameters, exact[plan.stage_of[node]])
        for node, state in runtime.states.items()
    ]
    assert 10 * TOLERANCE < max(errors) < 0.05


def test_a_token_that_comes_often_has_its_whole_gradient_though_parameters_are_in_bfloat16():
    """By the first moments after an iteration, which are in float32: rounded by nothing."""
    time, plan = 512, plan_of([[0]], [[0]])
    exact = dataclasses.replace(SMALL, layers=1, context=time, tied_head=True)
    held = dataclasses.replace(exact, parameter_dtype="bfloat16")
    ids = np.random.default_rng(6).integers(0, 11, (BATCH, time + 1), dtype=np.int32)
    ids[:, np.arange(time + 1) % 4 > 0] = 7
    batch: Batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:]}
    data = DataConfig(microbatch_size=BATCH, sequence_length=time)
    optimizer = dataclasses.replace(OPTIMIZER, clip_norm=NOT_CLIPPING)
    runtime = open_alone(Config(model=held, data=data, optimizer=optimizer), plan, 1)
    runtime.run(0, {0: batch})

    [first, second] = (create_stage(own, 0, [1], jax.random.key(0)) for own in (held, exact))
    parameters = rounding.widened(nnx.to_pure_dict(nnx.state(first)))
    loss = oracle._loss([nnx.graphdef(second)], [0], OPTIMIZER)
    [gradient], _ = jax.grad(loss, has_aux=True)([parameters], [batch], [[0]])
    moments = optax.tree.get(runtime.states[0].optimizer_state, "mu")
    expected = jax.tree.map(lambda leaf: (1 - OPTIMIZER.beta1) * leaf, gradient)
    assert oracle.relative_error(moments, expected) < 0.01


def test_a_stage_that_is_left_out_takes_no_part():
    """Of four stages the third is lost, and a replica of the data stage."""
    model = dataclasses.replace(SMALL, layers=4)
    whole = plan_of([[0, 1], [2, 3], [4], [5]], [[0, 2, 4, 5], [1, 3, 4], [0, 4, 5], [1, 4]])
    plan = repair_plan(whole, {0, 2, 3, 5}, ((0,), (2, 3), (), (5,)), left_out=[2])
    batches = random_batches(plan, seed=3)
    optimizer = dataclasses.replace(OPTIMIZER, clip_norm=CLIPPING)
    assert_training_equals_the_oracle(plan, model, optimizer, batches, 2, WAYS[2])


@pytest.mark.nightly
def test_unvisited_nodes_that_share_a_replica_begin_its_ring_once():
    # On two devices nodes 1 and 3 hold one replica; neither has anything to compute.
    plan = plan_of([[0], [1, 2, 3]], [[0, 2], [0, 2]])
    model = dataclasses.replace(SMALL, layers=2)
    batches = random_batches(plan, seed=2)
    assert_training_equals_the_oracle(plan, model, OPTIMIZER, batches, 2, WAYS[2])
