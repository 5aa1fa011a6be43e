"""The jitted functions of a stage: what they keep, count, compile and compute."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from skippipe_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from skippipe_jax.models.llama import DataStage
from skippipe_jax.runtime.stage_functions import (
    LOSS,
    SQUARED_NORM,
    TOKENS,
    TOTALS,
    Z_LOSS,
    StageFunctions,
    functions_of_run,
    functions_of_stage,
    skips_update,
    stage_functions,
)
from skippipe_jax.runtime.wire_format import Wire, WireFormat
from tests.harness.oracle import relative_error
from tests.runtime.test_oracle import BATCH, STEPS, TIME
from tests.runtime.test_oracle import SMALL as MODEL

# As in other tests of the runtime, so that what they share is compiled once.
LAYERS = 1
# With a large epsilon the update depends on the scale of the gradients, as Adam's else does not.
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2, warmup_steps=0, epsilon=0.1, weight_decay=0.1, clip_norm=0.3
)
RANDOM = np.random.default_rng(0)


def functions_of(
    model: ModelConfig,
    is_data_stage: bool,
    optimizer: OptimizerConfig = OPTIMIZER,
    wire: Wire | None = None,
) -> StageFunctions:
    if wire is not None:
        return stage_functions(model, optimizer, STEPS, is_data_stage, LAYERS, BATCH * TIME, wire)
    data = DataConfig(microbatch_size=BATCH, sequence_length=TIME)
    config = Config(model=model, optimizer=optimizer, data=data, train=TrainConfig(STEPS))
    return functions_of_stage(config, is_data_stage, LAYERS)


def new_gauge() -> jax.Array:
    return jax.device_put(np.zeros(2, np.int32))


def new_totals() -> jax.Array:
    return jax.device_put(np.zeros(TOTALS, np.float32))


def random_tokens() -> np.ndarray:
    return RANDOM.integers(0, MODEL.vocabulary_size, (BATCH, TIME), dtype=np.int32)


def random_activations() -> jax.Array:
    return jax.device_put(RANDOM.normal(size=(BATCH, TIME, MODEL.width)).astype(np.float32))


def test_gauge_counts_microbatches_in_flight_and_their_peak():
    functions = functions_of(MODEL, is_data_stage=False)
    parameters, _, gradients = functions.create(jax.random.key(0), LAYERS)
    gauge, saved, seen = new_gauge(), [], []
    for step in "FFBFFBBB":
        if step == "F":
            _, kept, gauge = functions.forward(parameters, gauge, random_activations())
            saved.append(kept)
        else:
            _, gradients, gauge = functions.backward(
                parameters, gradients, gauge, saved.pop(0), random_activations()
            )
        seen.append(tuple(np.asarray(gauge).tolist()))
    assert seen == [(1, 1), (2, 2), (1, 2), (2, 2), (3, 3), (2, 3), (1, 3), (0, 3)]


def here(arrays: Any) -> Any:
    """Arrays that have been put on a device, as all are in a run."""
    return jax.device_put(arrays, SingleDeviceSharding(jax.local_devices()[0]))


class OneNode:
    """A data stage that serves every microbatch from its tokens to its gradient."""

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig = OPTIMIZER):
        self.functions = functions_of(model, True, optimizer)
        # Of MODEL, whose parameters are those of its variants too: it is compiled already.
        created = functions_of(MODEL, is_data_stage=True).create(jax.random.key(0), 0)
        self.parameters, self.state, self.gradients = here(created)
        self.gauge, self.totals = here((new_gauge(), new_totals()))

    def run(self, tokens: np.ndarray, targets: np.ndarray) -> None:
        x, saved, self.gauge = self.functions.forward(self.parameters, self.gauge, here(tokens))
        cotangent, self.gradients, self.totals, self.gauge = self.functions.loss(
            self.parameters, self.gradients, self.totals, self.gauge, x, here(targets)
        )
        none, self.gradients, self.gauge = self.functions.backward(
            self.parameters, self.gradients, self.gauge, saved, cotangent
        )
        assert none is None  # tokens have no gradient

    def update(self) -> None:
        self.totals += self.functions.squared_norm(self.gradients)
        self.parameters, self.state, self.gradients = self.functions.update(
            self.parameters, self.state, self.gradients, self.totals
        )


def test_z_loss_is_part_of_the_gradient_but_not_of_the_loss():
    node = OneNode(MODEL, dataclasses.replace(OPTIMIZER, z_loss=0.5))
    structure = nnx.graphdef(nnx.eval_shape(lambda: DataStage(MODEL, LAYERS, 0, jax.random.key(0))))
    tokens, targets = random_tokens(), random_tokens()
    targets.flat[5:] = -1

    @jax.jit
    def terms(parameters: Any) -> tuple[jax.Array, jax.Array]:
        model: DataStage = nnx.merge(structure, parameters)
        logits = model.logits(model(jnp.asarray(tokens))).reshape(-1, MODEL.vocabulary_size)[:5]
        log_z = jnp.log(jnp.exp(logits).sum(axis=-1))
        of_targets = logits[jnp.arange(5), targets.flat[:5]]
        return jnp.sum(log_z - of_targets), 0.5 * jnp.sum(log_z**2)

    parameters = jax.device_get(node.parameters)
    nats, z_loss = terms(parameters)
    expected = jax.grad(lambda parameters: sum(terms(parameters)))(parameters)
    node.run(tokens, targets)
    assert z_loss > 1.0
    np.testing.assert_allclose(node.totals[LOSS], nats, rtol=1e-5)
    np.testing.assert_allclose(node.totals[Z_LOSS], z_loss, rtol=1e-5)
    found = jax.tree.map(lambda leaf: leaf * BATCH * TIME, jax.device_get(node.gradients))
    assert relative_error(found, expected) < 1e-5


GUARD = dataclasses.replace(OPTIMIZER, skip_above_norm=2.0)


@pytest.mark.parametrize("tokens", [12.0, 7.0])
@pytest.mark.parametrize(
    ("norm", "is_skipped"),
    [(1.99, False), (2.01, True), (math.nan, True), (math.inf, True)],
)
def test_an_update_is_skipped_bit_for_bit(norm: float, is_skipped: bool, tokens: float):
    functions = functions_of(MODEL, is_data_stage=False, optimizer=GUARD)
    created = functions.create(jax.random.key(0), 0)
    gradients = jax.tree.map(lambda leaf: here(np.full(leaf.shape, norm, np.float32)), created[2])
    before = jax.tree.map(np.asarray, created[:2])
    totals = np.zeros(TOTALS, np.float32)
    totals[TOKENS] = tokens
    totals[SQUARED_NORM] = np.float32(norm * tokens / (BATCH * TIME)) ** 2
    assert bool(skips_update(GUARD, totals, BATCH * TIME)) == is_skipped
    *after, zeros = functions.update(*created[:2], gradients, jax.device_put(totals))
    same = [
        np.asarray(new).tobytes() == old.tobytes()
        for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
    ]
    assert all(same) if is_skipped else not any(same)
    assert not any(leaf.any() for leaf in jax.tree.leaves(jax.device_get(zeros)))


def test_without_a_guard_no_update_with_a_target_is_skipped():
    totals = np.full(TOTALS, np.nan, np.float32)
    for tokens in (0.0, 1.0):
        totals[TOKENS] = tokens
        assert bool(skips_update(OPTIMIZER, totals, BATCH * TIME)) == (tokens == 0)


def test_a_bound_beyond_float32_still_tells_what_is_infinite():
    guard = dataclasses.replace(OPTIMIZER, skip_above_norm=1e50)
    for squared_norm, is_skipped in ((1e38, False), (math.inf, True), (math.nan, True)):
        totals = np.array([0.0, BATCH * TIME, squared_norm, 0.0, 0.0], np.float32)
        assert bool(skips_update(guard, totals, BATCH * TIME)) == is_skipped


COMPUTED = jax.ShapeDtypeStruct((BATCH, TIME, MODEL.width), jnp.float32)


@pytest.mark.parametrize(
    ("recompute", "back"),
    [
        ("stage", WireFormat(COMPUTED, "int8", MODEL.width)),
        ("none", WireFormat(COMPUTED, "bfloat16", MODEL.width)),
    ],
)
def test_what_travels_is_packed_and_unpacked_within(recompute: str, back: WireFormat):
    """The same bits as with packing and unpacking around functions that know nothing of it."""
    model = dataclasses.replace(MODEL, recompute=recompute)
    wire = Wire(WireFormat(COMPUTED, "int8", MODEL.width), back)
    data, inner = (functions_of(model, is_data, wire=wire) for is_data in (True, False))
    plain_data, plain_inner = (functions_of(model, is_data) for is_data in (True, False))
    of_data = data.create(jax.random.key(0), 0)[0]
    of_inner = inner.create(jax.random.key(0), LAYERS)[0]
    tokens, targets = random_tokens(), random_tokens()
    pack, unpack = jax.jit(wire.activations.pack), jax.jit(wire.activations.unpack)
    pack_back, unpack_back = jax.jit(back.pack), jax.jit(back.unpack)

    def zeros(parameters: Any) -> Any:
        return data.no_gradients(parameters)

    with warnings.catch_warnings():
        # JAX warns of what was donated and cannot be used.
        warnings.simplefilter("error")
        first, _, gauge = data.forward(of_data, new_gauge(), tokens, leaves=True)
        second, kept, gauge = inner.forward(of_inner, gauge, first, leaves=True)
        sent = np.array(second)
        gradient, _, _, gauge = data.loss(
            of_data, zeros(of_data), new_totals(), gauge, second, targets, leaves=True
        )
        came = np.array(gradient)
        went_on, gradients, gauge = inner.backward(
            of_inner, zeros(of_inner), gauge, kept, gradient, leaves=True
        )
    assert gradient.is_deleted()

    x, _, _ = plain_data.forward(of_data, new_gauge(), tokens)
    expected_first = pack(x)
    assert_same(first, expected_first)
    y, saved, _ = plain_inner.forward(of_inner, new_gauge(), unpack(expected_first))
    assert_same(sent, pack(y))
    expected, _, _, _ = plain_data.loss(
        of_data, zeros(of_data), new_totals(), new_gauge(), unpack(sent), targets
    )
    assert_same(came, pack_back(expected))
    expected, expected_gradients, _ = plain_inner.backward(
        of_inner, zeros(of_inner), new_gauge(), saved, unpack_back(came)
    )
    assert_same(went_on, pack_back(expected))
    assert relative_error(gradients, expected_gradients) < 1e-6
    # With all of a stage computed again, its input is kept as it came.
    if recompute == "stage":
        assert [leaf.nbytes for leaf in jax.tree.leaves(kept)] == [BATCH * TIME * (MODEL.width + 2)]


def assert_same(found: Any, expected: Any) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()


def test_donated_values_are_given_up():
    node = OneNode(MODEL)
    before = jax.tree.leaves((node.parameters, node.state, node.gradients))
    node.run(random_tokens(), random_tokens())
    node.update()
    assert all(leaf.is_deleted() for leaf in before)


@pytest.mark.parametrize("parameter_dtype", ["float32", "bfloat16"])
def test_dtypes_stay_as_they_were_created(parameter_dtype: str):
    """What is saved must fit what is created to restore it."""
    functions = functions_of(
        dataclasses.replace(MODEL, parameter_dtype=parameter_dtype, compute_dtype="bfloat16"), True
    )
    created = jax.eval_shape(functions.create, jax.random.key(0), 0)
    parameters, _, gradients = (jax.tree.leaves(part) for part in created)
    assert {leaf.dtype for leaf in parameters} == {np.dtype(parameter_dtype)}
    assert {leaf.dtype for leaf in gradients} == {np.dtype("float32")}
    drawn_by = np.zeros(2, np.uint32)
    assert jax.eval_shape(functions.update, *created, new_totals(), drawn_by) == created


def test_runs_of_any_length_share_functions_where_it_does_not_set_the_schedule():
    def are_shared(decay_steps: int | None) -> bool:
        optimizer = OptimizerConfig(decay_steps=decay_steps)
        short, long = (
            Config(train=TrainConfig(steps=steps), optimizer=optimizer) for steps in (20, 30)
        )
        return functions_of_run(short, 2) == functions_of_run(long, 2)

    assert are_shared(20)
    assert not are_shared(None)
