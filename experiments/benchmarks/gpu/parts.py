"""What the benchmark of accelerators measures beside training: cross-entropy, and dispatch."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from skippipe_sched.problem.plan import Operation

from experiments.benchmarks.attention import compared
from experiments.benchmarks.one_process import SEED, Workload, runtime_of
from skippipe_jax.config import ModelConfig
from skippipe_jax.models.cross_entropy import Head, cross_entropy
from skippipe_jax.program.compiler import Compute
from skippipe_jax.program.schedule import OWN
from skippipe_jax.runtime.iteration import Iteration
from skippipe_jax.runtime.operations import Operations
from skippipe_jax.runtime.runtime import Runtime

OURS, PLAIN = "ours", "plain"
ALL = "all"
WARMUP = 3


def of_cross_entropy(model: ModelConfig, tokens: int, turns: int) -> dict[str, Any]:
    """That of training, a chunk of tokens at a time, beside one of the logits of all tokens.

    Both give the sum over tokens, and its gradient for what the head gets and for the head.
    """
    random = np.random.default_rng(SEED)
    hidden = jnp.asarray(random.normal(size=(tokens, model.width)), model.compute_dtype)
    # So that logits spread by about one, however wide the model is.
    matrix = jax.random.normal(jax.random.key(SEED), (model.width, model.vocabulary_size))
    matrix = (matrix / model.width**0.5).astype(model.parameter_dtype)
    targets = jnp.asarray(random.integers(0, model.vocabulary_size, tokens), jnp.int32)

    def ours(hidden: Array, matrix: Array, targets: Array) -> Array:
        return cross_entropy(hidden, Head(matrix, "wv"), targets)[0]

    def plain(hidden: Array, matrix: Array, targets: Array) -> Array:
        logarithms = jax.nn.log_softmax(Head(matrix, "wv").logits(hidden))
        return -jnp.sum(jnp.take_along_axis(logarithms, targets[:, None], axis=-1))

    arrays = [hidden, matrix, targets]
    programs = {
        name: jax.jit(jax.value_and_grad(own, argnums=(0, 1))).lower(*arrays).compile()
        for name, own in ((OURS, ours), (PLAIN, plain))
    }
    ways = compared(programs, arrays, turns, PLAIN)
    return {
        "tokens": tokens,
        "width": model.width,
        "vocabulary_size": model.vocabulary_size,
        "ways": ways,
    }


def timed(operations: Operations) -> dict[str, list[float]]:
    """Have operations note how long each call takes to return; returns seconds by their kind."""
    seconds: dict[str, list[float]] = defaultdict(list)
    inner = operations._dispatch

    def dispatch(operation: Operation, value: jax.Array, leaves: bool) -> tuple[Any, jax.Array]:
        start = time.perf_counter()
        result = inner(operation, value, leaves)
        seconds[operation.kind].append(time.perf_counter() - start)
        return result

    operations._dispatch = dispatch
    return seconds


def of_dispatch(workload: Workload, turns: int) -> dict[str, Any]:
    """Microseconds that a host takes to dispatch an operation, in the median over iterations.

    For each kind of operation that is the call alone; for "all", the time until the last operation
    of an iteration is dispatched, with the hops between stages, over the number of operations. The
    device is not waited for until then, if there are few enough operations for its queue. Where
    devices are CPUs, calls may compute before they return.
    """
    runtime = runtime_of(workload)
    program, seconds = runtime.programs[OWN], timed(runtime.operations)
    instructions = (own for own in program.instructions if isinstance(own, Compute))
    operations = Counter(own.operation.kind for own in instructions)
    random = np.random.default_rng(SEED)
    of_all = []
    for iteration in range(WARMUP + turns):
        if iteration == WARMUP:
            seconds.clear()
            of_all.clear()
        batches = dict(enumerate(workload.random_batches(random)))
        runtime.operations.begin(iteration)
        _wait_for(runtime)
        start = time.perf_counter()
        # Without averaging: where stages have one replica each, the sums are there.
        Iteration(
            exchange=runtime.exchange,
            operations=runtime.operations,
            program=program,
            iteration=iteration,
        ).execute(batches)
        of_all.append((time.perf_counter() - start) / operations.total())
        _wait_for(runtime)
    medians = {kind: statistics.median(own) for kind, own in seconds.items()}
    medians[ALL] = statistics.median(of_all)
    return {
        "operations": dict(operations),
        "microseconds": {kind: round(1e6 * own, 2) for kind, own in medians.items()},
    }


def _wait_for(runtime: Runtime) -> None:
    gauges = [node.gauge for node in runtime.operations.nodes.values()]
    gradients = [state.gradients for state in runtime.states.values()]
    jax.block_until_ready((gauges, gradients, runtime.operations.totals))
