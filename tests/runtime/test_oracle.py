"""Training equals the one-device oracle, on random plans and models."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from skippipe_sched.problem.case import parse_case
from skippipe_sched.problem.plan import Plan, Predicted
from skippipe_sched.timing.simulate import simulate

from skippipe_jax.config import ModelConfig, NetworkConfig, OptimizerConfig, RopeScaling
from skippipe_jax.config.model import RECOMPUTE
from skippipe_jax.data.batches import Batch
from skippipe_jax.program.compiler import compile_plan
from skippipe_jax.runtime.emulation import Emulation
from skippipe_jax.runtime.executor import Executor, Outcome, functions_of_stages
from skippipe_jax.runtime.live import LiveIteration
from skippipe_jax.runtime.stage_functions import LOSS, SQUARED_NORM, TOKENS, Z_LOSS, skips_update
from skippipe_jax.runtime.transport import WithinProcess
from tests import oracle
from tests.program.test_compiler import plan_of

ITERATIONS = 3
BATCH, TIME = 2, 6
TOLERANCE = 2e-5
# Large steps, so that a gradient which is slightly wrong moves the parameters visibly, and a large
# epsilon: otherwise Adam would forgive a gradient that is wrong by a factor, as clipping would.
OPTIMIZER = OptimizerConfig(
    learning_rate=3e-2, warmup_steps=1, decay_steps=10, weight_decay=0.1, epsilon=1e-2
)
CLIPPING, NOT_CLIPPING = 0.05, 100.0


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Random placements and paths, balanced or not, in the order that the simulator gives them."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=5))
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
    ready_first: bool
    network: NetworkConfig


WAYS = [
    Way(live=False, ready_first=False, network=NetworkConfig()),
    Way(live=True, ready_first=False, network=NetworkConfig()),
    Way(live=True, ready_first=True, network=NetworkConfig(averaging="ring")),
    Way(live=True, ready_first=False, network=NetworkConfig(averaging="ring", mode="emulate")),
    # So much luck that little happens in the plan's order.
    Way(live=True, ready_first=True, network=NetworkConfig(mode="emulate", jitter=20.0)),
]


def run(
    plan: Plan,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    batches: list[list[Batch]],
    devices: int,
    way: Way,
    *,
    average_parameters_every: int | None = None,
) -> tuple[Executor, list[Outcome]]:
    """Train in this process, with the nodes spread over some of its devices."""
    nodes = len(plan.case.nodes)
    host_of = (0,) * nodes
    [program] = compile_plan(plan, host_of)
    device_of = [jax.devices()[node % devices] for node in range(nodes)]
    functions = functions_of_stages(plan, model, optimizer, ITERATIONS, BATCH * TIME)
    channels = model.width + ("begins" in batches[0][0])
    executor = Executor(
        plan,
        program,
        device_of,
        functions,
        {0: WithinProcess(dict(enumerate(device_of)))},
        host_of,
        model,
        seed=0,
        activation=jax.ShapeDtypeStruct((BATCH, TIME, channels), model.compute_dtype),
        network=way.network,
        average_parameters_every=average_parameters_every,
    )
    emulation = Emulation(plan, way.network, 0) if way.network.mode == "emulate" else None
    outcomes = []
    for iteration, of_microbatch in enumerate(batches):
        of_node: dict[int, list[Any]] = {node: [] for node in plan.stages[0]}
        for path, batch in zip(plan.microbatches, of_microbatch, strict=True):
            of_node[path[0]].append(batch)
        if way.live:
            live = LiveIteration(
                executor, iteration, ready_first=way.ready_first, emulation=emulation
            )
            outcomes.append(live.run(of_node))
        else:
            outcomes.append(executor.run(iteration, of_node))
    return executor, outcomes


@pytest.mark.timeout(1800)  # Most of it is compiling: every example is another model.
@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_training_equals_the_oracle(data: st.DataObject):
    plan = data.draw(plans())
    model = data.draw(models(len(plan.stages)))
    batches = random_batches(plan, seed=data.draw(st.integers(0, 99)))

    clip_norm = data.draw(st.sampled_from([CLIPPING, NOT_CLIPPING]))
    optimizer = dataclasses.replace(OPTIMIZER, clip_norm=clip_norm)

    devices = data.draw(st.sampled_from([1, 3]))
    way = data.draw(st.sampled_from(WAYS))
    assert_training_equals_the_oracle(plan, model, optimizer, batches, devices, way)


def assert_training_equals_the_oracle(
    plan: Plan,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    batches: list[list[Batch]],
    devices: int,
    way: Way,
) -> list[Outcome]:
    executor, outcomes = run(plan, model, optimizer, batches, devices, way)

    stage_paths = [[plan.stage_of[node] for node in path] for path in plan.microbatches]
    expected, losses = oracle.train(
        model, optimizer, stage_paths, len(plan.stages), batches, seed=0
    )
    for node, state in executor.states.items():
        error = oracle.relative_error(state.parameters, expected[executor.stage_of[node]])
        assert error < TOLERANCE, f"node {node}: {error}"
    for outcome, loss in zip(outcomes, losses, strict=True):
        assert abs(float(outcome.totals[LOSS] / outcome.totals[TOKENS]) - loss) < 1e-5
    for node, gauge in outcomes[-1].gauges.items():
        now, peak = gauge.tolist()
        assert now == 0
        assert peak <= plan.case.nodes[node].memory
    return outcomes


def test_with_all_that_an_optimizer_may_do():
    """z-loss, what does not decay, another schedule, and a guard against the greatest gradient."""
    plan = plan_of([[0, 1], [2], [3, 4]], [[0, 2, 4], [1, 3, 2], [0, 3]])
    model = ModelConfig(
        vocabulary_size=11, width=8, layers=3, heads=2, kv_heads=1, ffn_width=12, context=TIME
    )
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
    outcomes = assert_training_equals_the_oracle(plan, model, optimizer, batches, 3, WAYS[1])
    assert all(float(outcome.totals[Z_LOSS]) > 1.0 for outcome in outcomes)

    totals = [np.asarray(outcome.totals) for outcome in outcomes]
    norms = [float(np.sqrt(each[SQUARED_NORM]) * BATCH * TIME / each[TOKENS]) for each in totals]
    # The first gradient is too great, and that of the other batch with these parameters is not.
    guarded = dataclasses.replace(optimizer, skip_above_norm=0.999 * norms[0])
    outcomes = assert_training_equals_the_oracle(plan, model, guarded, batches, 3, WAYS[0])
    skipped = [bool(skips_update(guarded, outcome.totals, BATCH * TIME)) for outcome in outcomes]
    assert skipped[:2] == [True, False]
