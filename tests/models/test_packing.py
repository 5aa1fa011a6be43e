"""Documents that share a sequence do not see each other, whichever stages they pass through."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.problem.plan import Plan

from skippipe_jax.config import (
    Config,
    DataConfig,
    NetworkConfig,
    TrainConfig,
)
from skippipe_jax.config.model import RECOMPUTE
from skippipe_jax.data.batches import Batch
from skippipe_jax.inference.staged_model import StagedModel
from skippipe_jax.models.document_mask import (
    mark,
    marked_tokens,
    positions_in_documents,
    unmark,
    within_documents,
)
from skippipe_jax.models.llama import DataStage, Stage, create_stage
from skippipe_jax.profiling.stages import BACKWARD, LOSS, measure_stage
from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.runtime.stage_functions import stage_functions
from tests.harness import oracle
from tests.models.test_llama import random_module
from tests.runtime.test_oracle import (
    BATCH,
    ITERATIONS,
    OPTIMIZER,
    TIME,
    TOLERANCE,
    Way,
    random_batches,
    run,
)
from tests.runtime.test_oracle import SMALL as MODEL
from tests.sched.examples import plan_of

# The second path swaps, the third skips. On two devices, only the last stage is on both.
PLAN = plan_of([[0, 2], [1, 3], [4, 5]], [[0, 1, 4], [0, 5, 3], [2, 3], [2, 4, 1]])
STAGE_PATHS = [[PLAN.stage_of[node] for node in path] for path in PLAN.microbatches]
WAYS = {
    "strict": Way(live=False, execution="strict", network=NetworkConfig()),
    "strict, ring": Way(live=True, execution="strict", network=NetworkConfig(averaging="ring")),
    "ready-first": Way(
        live=True, execution="ready-first", network=NetworkConfig(mode="emulate", jitter=20.0)
    ),
}

ROW = 10
# Angles so large that positions which do not start anew would be rounded otherwise.
TURNING = dataclasses.replace(MODEL, width=16, context=ROW, rope_theta=1e-6)
SWAPPED = (0, 2, 1)

Marks = st.lists(st.booleans(), min_size=ROW, max_size=ROW)
Seeds = st.integers(0, 999)


def packed_batches(plan: Plan, seed: int) -> list[list[Batch]]:
    """A batch for every microbatch of every iteration, with documents of random lengths."""
    random = np.random.default_rng(seed)
    return [
        [{**batch, "begins": random.random(batch["tokens"].shape) < 0.4} for batch in of_iteration]
        for of_iteration in random_batches(plan, seed)
    ]


# Training.


@functools.cache
def documents_one_by_one() -> tuple[list[Any], list[float]]:
    """What the oracle says of the model that recomputes nothing: the others are to equal it."""
    return oracle.train(
        MODEL, OPTIMIZER, STAGE_PATHS, len(PLAN.stages), packed_batches(PLAN, seed=0), seed=0
    )


@pytest.mark.parametrize(
    ("recompute", "devices", "way"),
    [
        ("none", 2, "strict, ring"),
        ("stage", 1, "ready-first"),
        pytest.param("block", 1, "strict", marks=pytest.mark.nightly),
    ],
)
def test_training_equals_that_on_documents_one_by_one(recompute: str, devices: int, way: str):
    model = dataclasses.replace(MODEL, recompute=recompute)
    batches = packed_batches(PLAN, seed=0)
    runtime, outcomes = run(PLAN, model, OPTIMIZER, batches, devices, WAYS[way])
    expected, losses = documents_one_by_one()
    for node, state in runtime.states.items():
        error = oracle.relative_error(state.parameters, expected[runtime.topology.stage_of[node]])
        assert error < TOLERANCE, f"node {node}: {error}"
    found = [float(outcome.totals[0] / outcome.totals[1]) for outcome in outcomes]
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-5)


# Documents in one row.


@functools.cache
def random_stages() -> list[Stage]:
    return [
        random_module(lambda s=s: create_stage(TURNING, s, (1, 1, 1), jax.random.key(0)))
        for s in range(3)
    ]


@jax.jit
def nats_of_tokens(parameters: list[Any], inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss of every token on a path that swaps."""
    stages = [
        nnx.merge(nnx.graphdef(stage), own)
        for stage, own in zip(random_stages(), parameters, strict=True)
    ]
    x = inputs
    for stage in SWAPPED:
        x = stages[stage](x)
    data_stage: DataStage = stages[0]
    return optax.softmax_cross_entropy_with_integer_labels(data_stage.logits(x), targets)


def nats(batch: Batch) -> np.ndarray:
    parameters = [nnx.state(stage) for stage in random_stages()]
    targets = np.maximum(batch["targets"], 0)
    return np.asarray(nats_of_tokens(parameters, marked_tokens(batch), targets))


def row_of_documents(begins: list[bool], seed: int) -> Batch:
    ids = np.random.default_rng(seed).integers(0, 11, (1, ROW + 1), dtype=np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "begins": np.array([begins])}


def number_of_document(batch: Batch) -> np.ndarray:
    """Of each place in the row; places before the first mark are of document 0."""
    assert "begins" in batch
    return np.cumsum([0, *batch["begins"][0, 1:]])


@settings(max_examples=30)
@given(Marks, Seeds)
def test_every_document_has_the_losses_that_it_has_alone(begins: list[bool], seed: int):
    batch = row_of_documents(begins, seed)
    [packed], alone = nats(batch), nats(oracle.one_by_one(batch))
    document = number_of_document(batch)
    for number in range(document[-1] + 1):
        together = packed[document == number]
        np.testing.assert_allclose(together, alone[number, : len(together)], rtol=0, atol=1e-5)


def test_evaluation_keeps_documents_apart():
    random = np.random.default_rng(5)
    tokens, targets = random.integers(0, 11, (2, 3, ROW), dtype=np.int32)
    batch: Batch = {"tokens": tokens, "targets": targets, "begins": random.random((3, ROW)) < 0.3}
    parameters = [nnx.to_pure_dict(nnx.state(stage)) for stage in random_stages()]
    model = StagedModel(TURNING, parameters)
    together, apart = (
        model.sum_of_losses(model.run((0, 1, 2), own), jnp.asarray(own["targets"]))
        for own in (batch, oracle.one_by_one(batch))
    )
    assert together[1] == tokens.size
    np.testing.assert_allclose(together, apart, rtol=1e-6)


# What marks mean, and how they travel.


@given(st.lists(Marks, min_size=2, max_size=2))
@settings(max_examples=20)
def test_positions_and_documents_are_those_counted_by_hand(marks: list[list[bool]]):
    positions = positions_in_documents(jnp.array(marks))
    together = within_documents(jnp.arange(ROW) - positions)
    for row, begins in enumerate(marks):
        begin_of = [max([s for s in range(t + 1) if begins[s]], default=0) for t in range(ROW)]
        assert positions[row].tolist() == [t - begin for t, begin in enumerate(begin_of)]
        expected = [[own == other for other in begin_of] for own in begin_of]
        assert together[row, 0].tolist() == expected


def test_marks_come_through_a_stage_in_any_precision_and_have_no_gradient():
    config = dataclasses.replace(MODEL, compute_dtype="bfloat16")
    stage = random_module(lambda: create_stage(config, 1, (1, 2), jax.random.key(0)))
    random = np.random.default_rng(0)
    begins = jnp.asarray(random.random((2, TIME)) < 0.4)
    inputs = mark(jnp.asarray(random.normal(size=(2, TIME, MODEL.width)), jnp.bfloat16), begins)
    structure, parameters = nnx.split(stage)

    @jax.jit
    def outputs_and_gradient(parameters: Any, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        outputs, vjp = jax.vjp(lambda x: nnx.merge(structure, parameters)(x), inputs)
        return outputs, vjp(jnp.ones_like(outputs))[0]

    outputs, gradient = outputs_and_gradient(parameters, inputs)
    assert outputs.shape == inputs.shape
    np.testing.assert_array_equal(unmark(outputs, MODEL.width)[1], begins)
    assert gradient.shape == inputs.shape
    assert not np.any(gradient[..., MODEL.width])
    assert np.all(np.any(gradient != 0, axis=-1))


@pytest.mark.parametrize("recompute", RECOMPUTE[1:])
def test_nothing_is_kept_that_grows_with_the_square_of_time(recompute: str):
    model = dataclasses.replace(MODEL, recompute=recompute)
    functions = stage_functions(model, OPTIMIZER, 1, False, 3, 1)

    def kept_bytes(time: int) -> int:
        parameters, _, _ = jax.eval_shape(functions.create, jax.random.key(0), 0)
        inputs = jax.ShapeDtypeStruct((1, time, MODEL.width + 1), jnp.float32)
        gauge = jax.ShapeDtypeStruct((2,), jnp.int32)
        _, saved, _ = jax.eval_shape(functions.forward, parameters, gauge, inputs)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved))

    assert kept_bytes(64) == 2 * kept_bytes(32) > 0


# The configuration.


def config_with(packing: str) -> Config:
    data = DataConfig(packing=packing, sequence_length=TIME, microbatch_size=BATCH)
    # The optimizer and the steps of `run`, whose functions are compiled already.
    return Config(model=MODEL, data=data, optimizer=OPTIMIZER, train=TrainConfig(ITERATIONS))


def test_stages_are_measured_with_packing():
    config = config_with("documents")
    timings = measure_stage(config, (True, 1), NodeSharding((jax.devices()[0],)), budget_s=0.0)
    assert min(timings[operation].median_s for operation in (LOSS, BACKWARD)) > 0
