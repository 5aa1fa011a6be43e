"""Training with rounded hops equals the one-device oracle, given what travelled.

A rounding turns the last bit of a number into a whole step, so what two programs round is compared
where it is rounded: the oracle takes what the run has sent, and looks whether it is what its own
would have become.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from skippipe_sched.problem.plan import Operation

from skippipe_jax.config import ModelConfig, NetworkConfig
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.runtime.stage_functions import LOSS, TOKENS
from skippipe_jax.runtime.wire_format import Wire, WireFormat
from tests.harness import oracle
from tests.runtime.test_oracle import BATCH, OPTIMIZER, TIME, Way, random_batches, run
from tests.sched.examples import plan_of

# Two data nodes; a swap, a skip, and a microbatch that stays where it began.
PLAN = plan_of([[0, 1], [2], [3, 4]], [[0, 2, 4], [0], [1, 3, 2], [0, 3]])
STAGE_PATHS = [[PLAN.stage_of[node] for node in path] for path in PLAN.microbatches]
TOLERANCE = 2e-5
# Of numbers that both round, so many become another neighbour: those that lie between two.
ROUNDED_OTHERWISE = 0.02


class Travelled:
    """What left nodes in a run, as it arrives: for each operation of each iteration."""

    def __init__(self):
        self.arrays: dict[tuple[int, Operation], np.ndarray] = {}
        self.draws: dict[tuple[int, Operation], np.ndarray | None] = {}

    def watch(self, runtime: Runtime) -> None:
        """From now on, keep what leaves."""
        operations, wire = runtime.operations, runtime.operations.wire
        dispatch = operations._dispatch
        self.wire: Wire = wire

        def watched(operation: Operation, value: jax.Array, leaves: bool) -> Any:
            result, at_the_end = dispatch(operation, value, leaves)
            if leaves:
                how = wire.activations if operation.kind == "F" else wire.gradients
                assert (result.shape, result.dtype) == (how.travelling.shape, how.travelling.dtype)
                name = operations.iteration, operation
                self.arrays[name] = np.asarray(how.unpack(result))
                draw = self.draws[name] = operations._draw(operation, leaves)
                assert (draw is not None) == wire.gradients.is_drawn
                if draw is not None:
                    stage, seed = PLAN.stage_of[operation.node], runtime.config.seed
                    iteration, microbatch = operations.iteration, operation.microbatch
                    assert draw.tolist() == [seed, iteration, microbatch, stage]
            return result, at_the_end

        operations._dispatch = watched


def replayed(travelled: Travelled, tokens: list[int]) -> oracle.Hop:
    """Hops that bring what has travelled, if it is what the oracle's own would have become.

    The run's gradients are of a sum over a number of tokens that is the same in all iterations;
    `tokens[i]` are those that the mean of iteration i is over.
    """

    def hop(iteration: int, microbatch: int, position: int, x: jax.Array) -> jax.Array:
        path = PLAN.microbatches[microbatch]
        if len(path) == 1:
            return x
        forward = iteration, Operation("F", microbatch, path[position])
        is_last = position + 1 == len(path)
        after = ("L", path[0]) if is_last else ("B", path[position + 1])
        back = iteration, Operation(after[0], microbatch, after[1])
        to_mean = BATCH * TIME / tokens[iteration]

        @jax.custom_vjp
        def bring(x: jax.Array) -> jax.Array:
            return x

        def brought(x: jax.Array) -> tuple[jax.Array, None]:
            own, there = np.asarray(x), travelled.arrays[forward]
            assert_rounded(own, there, travelled.wire.activations, None)
            return jax.numpy.asarray(there), None

        def brought_back(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
            own, there = np.asarray(cotangent) / to_mean, travelled.arrays[back]
            assert_rounded(own, there, travelled.wire.gradients, travelled.draws[back])
            return (jax.numpy.asarray(there * np.float32(to_mean)),)

        bring.defvjp(brought, brought_back)
        return bring(x)

    return hop


@functools.partial(jax.jit, static_argnums=0)
def rounded(how: WireFormat, array: jax.Array, draw: Any) -> jax.Array:
    return how.unpack(how.pack(array, draw))


def assert_rounded(own: np.ndarray, there: np.ndarray, how: WireFormat, draw: Any) -> None:
    """What travelled is what `own` becomes, and a step beside it where that lies between two."""
    expected = np.asarray(rounded(how, own, draw))
    largest = np.abs(own).max(axis=-1, keepdims=True)
    step = {"float32": 0.0, "bfloat16": 2.0**-8, "int8": (1 + 2.0**-6) / 127}[how.dtype]
    assert np.all(np.abs(there - expected) <= (step + 1e-5) * largest)
    differing = np.abs(there - expected) > 1e-4 * largest
    assert differing.mean() < ROUNDED_OTHERWISE


@pytest.mark.parametrize(
    ("network", "recompute", "way"),
    [
        pytest.param(
            {"activation_dtype": "int8", "gradient_rounding": "stochastic"},
            "stage",
            True,
            marks=pytest.mark.nightly,
        ),
        ({"activation_dtype": "bfloat16", "gradient_dtype": "int8"}, "none", False),
    ],
    ids=["int8, stochastic", "bfloat16 and int8"],
)
def test_training_equals_the_oracle_given_what_travelled(
    network: dict[str, Any], recompute: str, way: bool
):
    model = ModelConfig(
        vocabulary_size=11,
        width=8,
        layers=3,
        heads=2,
        kv_heads=1,
        ffn_width=12,
        context=TIME,
        recompute=recompute,
    )
    batches, travelled = random_batches(PLAN, seed=3), Travelled()
    how = Way(live=way, execution="strict", network=NetworkConfig(**network))
    runtime, outcomes = run(PLAN, model, OPTIMIZER, batches, 3, how, watched_by=travelled.watch)
    # Hops there and back, of all microbatches but the one that stays.
    hops = sum(2 * len(path) for path in PLAN.microbatches if len(path) > 1)
    assert len(travelled.arrays) == len(batches) * hops

    tokens = [sum(int((batch["targets"] >= 0).sum()) for batch in own) for own in batches]
    expected, losses = oracle.train(
        model,
        OPTIMIZER,
        STAGE_PATHS,
        len(PLAN.stages),
        batches,
        seed=0,
        hop=replayed(travelled, tokens),
    )
    for node, state in runtime.states.items():
        error = oracle.relative_error(state.parameters, expected[PLAN.stage_of[node]])
        assert error < TOLERANCE, f"node {node}: {error}"
    for outcome, loss in zip(outcomes, losses, strict=True):
        assert abs(float(outcome.totals[LOSS] / outcome.totals[TOKENS]) - loss) < 1e-5

    exact, _ = oracle.train(model, OPTIMIZER, STAGE_PATHS, len(PLAN.stages), batches, seed=0)
    differences = [oracle.relative_error(*both) for both in zip(expected, exact, strict=True)]
    # And rounding is something that this tells.
    assert max(differences) > 10 * TOLERANCE
