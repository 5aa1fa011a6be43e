"""A stage that nobody holds any more, made from those beside it or from a copy."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from skippipe_jax.config import Config, DataConfig, OptimizerConfig
from skippipe_jax.models.footprint import buddy_checkpoint_bytes
from skippipe_jax.optim.update_rule import updates_made
from skippipe_jax.runtime.replicas import Replicas
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.runtime.stage_functions import TOKENS
from skippipe_jax.runtime.stage_rebuild import averaged_stage, with_count
from skippipe_jax.runtime.state_copy import packed, pieces, unpacked
from skippipe_jax.runtime.totals import add_up, split_sums
from tests.harness.one_host import open_alone
from tests.harness.training_runs import assert_same_bits, by_name
from tests.runtime.test_oracle import BATCH, SMALL, TIME
from tests.sched.examples import plan_of

PLAN = plan_of([[0], [1], [2, 3]], [[0, 1, 2], [0, 1, 3]])
CONFIG = Config(
    model=SMALL,
    data=DataConfig(sequence_length=TIME, microbatch_size=BATCH),
    optimizer=OptimizerConfig(learning_rate=1e-2),
)
UPDATES = 7


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    """Three stages with numbers that no new run begins with."""
    opened, rng = open_alone(CONFIG, PLAN, devices=4), np.random.default_rng(0)

    def drawn(leaf: jax.Array) -> jax.Array:
        numbers = rng.normal(1.0, 0.5, leaf.shape) * (9 if leaf.dtype == np.int32 else 1)
        return jax.device_put(numbers.astype(leaf.dtype), leaf.sharding)

    for state in opened.states.values():
        other = jax.tree.map(drawn, state.to_save())
        state.parameters, state.optimizer_state = other["parameters"], other["optimizer_state"]
        state.gradients = jax.tree.map(drawn, state.gradients)
    return opened


def shapes_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def blocks_of(runtime: Runtime, stage: int) -> list[np.ndarray]:
    replica = PLAN.stages[stage][0]
    return [np.asarray(a) for a in jax.tree.leaves(runtime.states[replica].parameters["blocks"])]


def test_the_mean_is_that_of_the_formula(runtime: Runtime):
    shapes = shapes_of(runtime.states[1].to_save())
    before, after = blocks_of(runtime, 0), blocks_of(runtime, 2)
    # Of the stage after it the norm is 3, of the one before it 1.5.
    made = averaged_stage(shapes, [before, after], (2.25, 9.0), UPDATES)
    assert shapes_of(made) == shapes
    for found, one, two in zip(jax.tree.leaves(made["parameters"]), before, after, strict=True):
        expected = (3.0 * two.astype(np.float64) + 1.5 * one.astype(np.float64)) / 4.5
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    moments = [m for m in jax.tree.leaves(made["optimizer_state"]) if m.dtype == np.float32]
    assert len(moments) == 2 * len(before)
    assert not any(m.any() for m in moments)
    assert updates_made(made["optimizer_state"]) == UPDATES


@pytest.mark.parametrize("norms", [(0.0, 0.0), (np.inf, 1.0), (np.nan, 1.0)])
def test_without_norms_that_tell_anything_both_count_alike(
    runtime: Runtime, norms: tuple[float, float]
):
    shapes = shapes_of(runtime.states[1].to_save())
    before, after = blocks_of(runtime, 0), blocks_of(runtime, 2)
    made = averaged_stage(shapes, [before, after], norms, UPDATES)
    for found, one, two in zip(jax.tree.leaves(made["parameters"]), before, after, strict=True):
        np.testing.assert_allclose(found, (one + two) / 2, rtol=1e-6, atol=1e-9)


def test_a_copy_is_the_state_bit_by_bit(runtime: Runtime):
    for node, size in zip((0, 1, 2), buddy_checkpoint_bytes(CONFIG, 3), strict=True):
        state = runtime.states[node].to_save()
        given = packed(state)
        assert len(given) == size
        cut = [given[piece] for piece in pieces(size, 1000)]
        assert max(map(len, cut)) == 1000
        again = unpacked(np.concatenate(cut), shapes_of(state))
        assert_same_bits(by_name(again), by_name(state))
        later = with_count(again["optimizer_state"], UPDATES)
        assert updates_made(later) == UPDATES
        found, own = by_name(later), by_name(state["optimizer_state"])
        assert_same_bits(
            {name: array for name, array in found.items() if array.dtype == np.float32},
            {name: array for name, array in own.items() if array.dtype == np.float32},
        )


def test_norms_are_those_of_the_blocks_of_each_stage(runtime: Runtime):
    """They go with the totals; embedding and head are no part of them, nor are other replicas."""
    assert runtime.replicas.squared_norms_of_blocks() == {}, "nobody has asked for them"
    noting = Replicas(runtime.topology, runtime.states, notes_norms=True)
    noted = noting.squared_norms_of_blocks()
    topology = runtime.topology
    parts = [n for stage in range(3) for n in runtime.replicas.squared_norms(stage)]
    summed = add_up(topology, parts, False, {2: 0.5}, noted)
    sums = split_sums(summed, len(topology.devices))
    totals, busy_s, norms = sums.totals, sums.busy_s, sums.squared_norms
    assert norms is not None
    assert np.asarray(busy_s).tolist() == [0, 0, 0.5, 0]
    assert totals[TOKENS] == 0
    for stage, replica in enumerate((0, 1, 2)):
        blocks = jax.tree.leaves(runtime.states[replica].gradients["blocks"])
        expected = sum(float(np.vdot(leaf, leaf)) for leaf in map(np.asarray, blocks))
        assert norms[stage] == pytest.approx(expected, rel=1e-5)
