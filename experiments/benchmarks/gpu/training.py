"""Training on one device, through the pipeline and in a plain jitted step that trains the same."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.benchmarks import one_process
from experiments.benchmarks.harness.reporting import peak_memory_bytes
from experiments.benchmarks.harness.turns import (
    Iteration,
    OutOfMemory,
    Taken,
    in_turns_or_apart,
    ratio,
    require_alike,
    within_memory,
)
from experiments.benchmarks.one_process import OPTIMIZER, SEED, STEPS
from skippipe_jax.config import ModelConfig
from skippipe_jax.models.flops import flops_per_token
from skippipe_jax.models.llama import Stage, parameter_count, stage_shapes
from skippipe_jax.runtime.stage_functions import TOKENS, TOTALS, StageFunctions, stage_functions

PRODUCTS_AT_ONCE, PRODUCT_TIMINGS = 10, 20
WARMUP = 1
PIPELINE, PLAIN_STEP = "pipeline", "plain step"


@dataclass(frozen=True)
class StageWorkload:
    """An iteration of one stage; `model.layers` are those of the stage."""

    model: ModelConfig
    microbatches: int
    in_flight: int
    microbatch_size: int
    sequence_length: int

    @property
    def microbatch_tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.microbatch_size * self.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens of an iteration."""
        return self.microbatches * self.microbatch_tokens

    @property
    def functions(self) -> StageFunctions:
        """Those of a run."""
        return stage_functions(
            self.model, OPTIMIZER, STEPS, False, self.model.layers, self.microbatch_tokens
        )

    @property
    def shapes(self) -> Any:
        """Of the parameters."""
        return jax.eval_shape(self.functions.initialize, jax.random.key(SEED), 0)

    def inputs(self) -> jax.Array:
        """Random activations of all microbatches."""
        shape = (
            self.microbatches,
            self.microbatch_size,
            self.sequence_length,
            self.model.width,
        )
        return jax.random.normal(jax.random.key(1), shape, self.model.compute_dtype)


def half_squares(outputs: jax.Array) -> jax.Array:
    """The loss of a microbatch through a stage that has no head."""
    return 0.5 * jnp.sum(jnp.square(outputs.astype(jnp.float32)))


def stage_pipeline(workload: StageWorkload) -> Iteration:
    """Train a stage through the functions of a run; its loss is the mean over microbatches."""
    functions = workload.functions
    parameters, optimizer_state, gradients = functions.create(jax.random.key(SEED), 0)
    gauge = jnp.zeros(2, jnp.int32)
    counted = jnp.zeros(TOTALS).at[TOKENS].set(workload.tokens)
    inputs = list(workload.inputs())
    loss_of = jax.jit(half_squares)

    def run(_: Any) -> float:
        nonlocal parameters, optimizer_state, gradients, gauge
        forwards, losses = deque(inputs), []
        held: deque[tuple[Any, jax.Array]] = deque()
        while forwards or held:
            if forwards and len(held) < workload.in_flight:
                outputs, saved, gauge = functions.forward(parameters, gauge, forwards.popleft())
                # The plain step gives it too.
                losses.append(loss_of(outputs))
                held.append((saved, outputs))
            else:
                _, gradients, gauge = functions.backward(
                    parameters, gradients, gauge, *held.popleft()
                )
        totals = functions.squared_norm(gradients) + counted
        parameters, optimizer_state, gradients = functions.update(
            parameters, optimizer_state, gradients, totals
        )
        jax.block_until_ready((parameters, optimizer_state, gradients))
        return statistics.mean(map(float, jax.device_get(losses)))

    return run


def stage_plain_step(workload: StageWorkload) -> Iteration:
    """Train the same in one jitted step, which computes the gradients of the inputs as well."""
    model = workload.model
    structure = nnx.graphdef(
        nnx.eval_shape(lambda: Stage(model, model.layers, 0, jax.random.key(SEED)))
    )
    apply = one_process.applied(structure, model)

    def of_microbatch(parameters: Any, inputs: jax.Array):
        loss, (own, of_inputs) = jax.value_and_grad(
            lambda parameters, inputs: half_squares(apply(parameters, inputs)), argnums=(0, 1)
        )(parameters, inputs)
        return own, (loss, 1.0), of_inputs

    step = one_process.plain_step(
        functools.partial(one_process.accumulated, of_microbatch),
        workload.functions.initialize(jax.random.key(SEED), 0),
    )
    inputs = workload.inputs()
    return lambda _: step(inputs)


@functools.cache
def product_flops_per_second(sizes: tuple[int, ...]) -> dict[int, float]:
    """FLOPs per second of the product of two random square matrices in bfloat16, by their rows.

    What a device has no memory for is left out.
    """
    found = {size: within_memory(functools.partial(_product_of, size)) for size in sizes}
    return {size: own for size, own in found.items() if not isinstance(own, OutOfMemory)}


def _product_of(size: int) -> float:
    left, right = (
        jax.random.normal(key, (size, size), jnp.bfloat16)
        for key in jax.random.split(jax.random.key(2))
    )
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(left, right))
    seconds = []
    for _ in range(PRODUCT_TIMINGS):
        start = time.perf_counter()
        jax.block_until_ready([multiply(left, right) for _ in range(PRODUCTS_AT_ONCE)])
        seconds.append((time.perf_counter() - start) / PRODUCTS_AT_ONCE)
    return 2 * size**3 / statistics.median(seconds)


def alone(create: Callable[[], Iteration], batches: Any) -> tuple[float, int | None]:
    """Seconds of the first iteration, which compiles, and peak bytes after a second one.

    There is no peak to tell if there was as much before.
    """
    device = jax.devices()[0]
    before = peak_memory_bytes(device)
    iteration = create()
    start = time.perf_counter()
    iteration(batches)
    first = time.perf_counter() - start
    iteration(batches)
    peak = peak_memory_bytes(device)
    return first, peak if peak > before else None


def of_stage(workload: StageWorkload, iterations: int, products: tuple[int, ...]) -> dict[str, Any]:
    """A stage through the functions of a run, against the plain step."""
    creates = {
        PIPELINE: functools.partial(stage_pipeline, workload),
        PLAIN_STEP: functools.partial(stage_plain_step, workload),
    }
    batches = [None] * (WARMUP + iterations)
    return against_plain_step(workload, workload.shapes, creates, batches, products)


def of_model(
    workload: one_process.Workload, iterations: int, products: tuple[int, ...]
) -> dict[str, Any]:
    """A whole model through the runtime, against the plain step that scans over all layers."""
    creates = {
        PIPELINE: functools.partial(one_process.pipeline, workload),
        PLAIN_STEP: functools.partial(
            one_process.one_device, workload, scanned=True, accumulating=True
        ),
    }
    random = np.random.default_rng(SEED)
    batches = [workload.random_batches(random) for _ in range(WARMUP + iterations)]
    [shapes] = stage_shapes(workload.model, 1)
    return against_plain_step(workload, shapes, creates, batches, products)


def against_plain_step(
    workload: StageWorkload | one_process.Workload,
    parameters: Any,
    creates: Mapping[str, Callable[[], Iteration]],
    batches: Sequence[Any],
    products: tuple[int, ...],
) -> dict[str, Any]:
    """How the pipeline compares with the plain step in training these parameters, by their shapes.

    `batches` are those of one iteration after another. Products of matrices with so many rows tell
    how quick the device is.
    """
    model = workload.model
    first, peak = alone(creates[PIPELINE], batches[0])
    gc.collect()
    taken, is_paired = in_turns_or_apart(creates, batches, WARMUP)
    ran = {name: own for name, own in taken.items() if isinstance(own, Taken)}
    require_alike(ran, model.compute_dtype)
    times = None
    if len(ran) == len(taken):
        pipeline, plain = ran[PIPELINE], ran[PLAIN_STEP]
        of_medians = pipeline.median / plain.median
        times = round(ratio(pipeline.seconds, plain.seconds) if is_paired else of_medians, 4)
    gc.collect()
    reached = product_flops_per_second(products)
    possible = max(reached.values())
    is_data_stage = "embedding" in parameters
    flops = workload.tokens * flops_per_token(
        model, model.layers, workload.sequence_length, is_data_stage=is_data_stage
    )

    def told(own: Taken | OutOfMemory) -> dict[str, Any]:
        if isinstance(own, OutOfMemory):
            return {"out_of_memory": own.told}
        return {
            "seconds_per_iteration": round(own.median, 6),
            "tokens_per_second": round(workload.tokens / own.median, 1),
            "model_flops_per_second": round(flops / own.median),
            "utilisation": round(flops / own.median / possible, 4),
            "losses": own.losses,
            "seconds": [round(value, 6) for value in own.seconds],
        }

    return {
        "workload": asdict(workload),
        "parameters": parameter_count(parameters),
        "pipeline_takes_times": times,
        "is_paired": is_paired,
        "peak_memory_bytes": peak,
        "compile_seconds": round(first - ran[PIPELINE].median, 3) if PIPELINE in ran else None,
        "product_flops_per_second": {size: round(own) for size, own in reached.items()},
        "programs": {name: told(own) for name, own in taken.items()},
    }
