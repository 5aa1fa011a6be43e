"""A model trained in one process on one device: through the pipeline, and in one plain step.

The pipeline is what training runs: a `Runtime`, all nodes on one device, and full paths, so that
both do the same work. A plain step is one jitted function with donated state for forward, backward,
clipping and AdamW, as one would write it without a pipeline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from skippipe_sched.methods import make_plan
from skippipe_sched.problem.case import parse_case
from skippipe_sched.search.budget import Search

from experiments.benchmarks.harness.launching import alike_nodes
from experiments.benchmarks.harness.turns import Iteration
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from skippipe_jax.data.batches import Batch
from skippipe_jax.models.llama import Stage, create_stage
from skippipe_jax.optim.update_rule import update_rule
from skippipe_jax.program.compiler import compile_plan
from skippipe_jax.program.schedule import OWN, Schedule
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.runtime.stage_functions import LOSS, TOKENS
from skippipe_jax.runtime.topology import Topology

CLIP_NORM = 1.0
OPTIMIZER = OptimizerConfig(beta2=0.999, weight_decay=0.0, clip_norm=CLIP_NORM)
STEPS = 1000
SEED = 0

Sums = tuple[Any, Any]
"""Of a loss, and of what it is to be divided by."""

GradientsOf = Callable[[Any, Any], tuple[Any, Sums, Any]]
"""(parameters, what one microbatch brings) -> gradients of the sum, sums, anything besides"""


@dataclass(frozen=True)
class Workload:
    """What both sides train: a model over stages, and the batches of an iteration."""

    model: ModelConfig
    stages: int
    replicas: int
    microbatches_per_data_node: int
    microbatch_size: int
    sequence_length: int

    @property
    def microbatches(self) -> int:
        """Microbatches of an iteration."""
        return self.replicas * self.microbatches_per_data_node

    @property
    def tokens(self) -> int:
        """Tokens of an iteration."""
        return self.microbatches * self.microbatch_size * self.sequence_length

    def random_batches(self, random: np.random.Generator) -> list[Batch]:
        """Random tokens for one iteration."""
        shape = (self.microbatches, self.microbatch_size, self.sequence_length + 1)
        ids = random.integers(0, self.model.vocabulary_size, shape, dtype=np.int32)
        return [{"tokens": own[:, :-1], "targets": own[:, 1:]} for own in ids]


def runtime_of(workload: Workload) -> Runtime:
    """The runtime of a host that serves all nodes on one device."""
    nodes = workload.stages * workload.replicas
    alike = alike_nodes(
        [workload.replicas] * workload.stages,
        activation_bytes=0,
        stage_bytes=0,
        microbatches_per_data_node=workload.microbatches_per_data_node,
        memory=workload.stages,
    )
    case = parse_case(alike)
    plan = make_plan(case, "full", Search(SEED))
    host_of = (0,) * nodes
    [program] = compile_plan(plan, host_of)
    config = Config(
        seed=SEED,
        model=workload.model,
        optimizer=OPTIMIZER,
        data=DataConfig(
            microbatch_size=workload.microbatch_size, sequence_length=workload.sequence_length
        ),
        train=TrainConfig(STEPS),
    )
    kinds = [[jax.devices()[0].device_kind]]
    topology = Topology.of(config, plan, program.host, host_of, kinds)
    schedule, alone = Schedule(config.recipe, {OWN: plan}), Membership(config.cluster, 0, 1)
    return Runtime(config, schedule, {OWN: program}, topology, {}, alone)


def pipeline(workload: Workload) -> Iteration:
    """Train through the runtime."""
    runtime = runtime_of(workload)
    iteration = 0

    def run(batches: Sequence[Batch]) -> float:
        nonlocal iteration
        outcome = runtime.run(iteration, dict(enumerate(batches)))
        iteration += 1
        jax.block_until_ready([state.to_save() for state in runtime.states.values()])
        return float(outcome.totals[LOSS] / outcome.totals[TOKENS])

    return run


def one_device(workload: Workload, *, scanned: bool, accumulating: bool) -> Iteration:
    """Train in one jitted step, without nodes, programs or transfers."""
    model = workload.model
    layers = (model.layers,) if scanned else model.stage_partition(workload.stages)
    modules = [create_stage(model, s, layers, jax.random.key(SEED)) for s in range(len(layers))]
    parameters = [nnx.to_pure_dict(nnx.state(module)) for module in modules]
    structures = [nnx.graphdef(module) for module in modules]
    scans_stages = scanned and model.recompute == "stage"

    def nats_and_tokens(parameters: list[Any], batch: Batch) -> tuple[Any, Any]:
        if scans_stages:
            x = scan_stages(model, workload.stages, parameters[0], jnp.asarray(batch["tokens"]))
        else:
            x = jnp.asarray(batch["tokens"])
            for structure, own in zip(structures, parameters, strict=True):
                x = applied(structure, model)(own, x)
        return nnx.merge(structures[0], parameters[0]).loss(x, batch["targets"])

    def of_whole_batch(parameters: list[Any], batches: Batch):
        def mean(parameters: list[Any]):
            merged = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), batches)
            nats, tokens = nats_and_tokens(parameters, merged)
            return nats / tokens

        return jax.value_and_grad(mean)(parameters)

    def of_microbatch(parameters: list[Any], batch: Batch):
        sums, own = jax.value_and_grad(nats_and_tokens, has_aux=True)(parameters, batch)
        return own, sums, None

    def of_each_microbatch(parameters: list[Any], batches: Batch):
        loss, gradients, _ = accumulated(of_microbatch, parameters, batches)
        return loss, gradients

    step = plain_step(of_each_microbatch if accumulating else of_whole_batch, parameters)

    def run(batches: Sequence[Batch]) -> float:
        return step(jax.tree.map(lambda *leaves: np.stack(leaves), *batches))

    return run


def plain_step(
    loss_and_gradients: Callable[[Any, Any], tuple[Any, ...]], parameters: Any
) -> Iteration:
    """Train in one jitted step with donated state, from these parameters on, which it takes over.

    What `loss_and_gradients` gives besides these two is computed, and dropped.
    """
    transformation = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM), update_rule(OPTIMIZER, STEPS)
    )
    state = transformation.init(parameters)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(parameters: Any, state: Any, batches: Any):
        loss, gradients, *besides = loss_and_gradients(parameters, batches)
        updates, state = transformation.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss, besides

    def run(batches: Any) -> float:
        nonlocal parameters, state
        parameters, state, loss, _ = jax.block_until_ready(step(parameters, state, batches))
        return float(loss)

    return run


def accumulated(gradients_of: GradientsOf, parameters: Any, batches: Any) -> tuple[Any, Any, Any]:
    """Loss and gradients, added up in float32 over one microbatch after another, in a scan.

    The first axis of `batches` is that of microbatches, and of what is there besides, which comes
    third.
    """

    def add(total: Any, batch: Any):
        own, sums, besides = gradients_of(parameters, batch)
        return jax.tree.map(jnp.add, total, (own, *sums)), besides

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), parameters)
    (gradients, loss, over), besides = jax.lax.scan(add, (zeros, 0.0, 0.0), batches)
    return loss / over, jax.tree.map(lambda leaf: leaf / over, gradients), besides


def applied(structure: Any, model: ModelConfig) -> Callable[[Any, jax.Array], jax.Array]:
    """(parameters, inputs) -> outputs of a stage, with the recomputation that the model has."""

    def apply(parameters: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(structure, parameters)(x)

    return jax.checkpoint(apply) if model.recompute == "stage" else apply


def scan_stages(model: ModelConfig, stages: int, parameters: Any, tokens: jax.Array) -> jax.Array:
    """All layers of a one-stage model, recomputed stage by stage in a scan over the stages."""
    [layers] = set(model.stage_partition(stages))
    structure = nnx.graphdef(nnx.eval_shape(lambda: Stage(model, layers, 0, jax.random.key(SEED))))
    blocks = jax.tree.map(
        lambda leaf: leaf.reshape(stages, layers, *leaf.shape[1:]), parameters["blocks"]
    )

    def apply(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        return nnx.merge(structure, {"blocks": own})(x), None

    x = parameters["embedding"][tokens].astype(model.compute_dtype)
    return jax.lax.scan(jax.checkpoint(apply, prevent_cse=False), x, blocks)[0]
