"""Runs of one process whose nodes are meshes, held against the oracle: arguments are its examples.

As a program, since it needs more devices than tests have, and a thread for each of them.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
from skippipe_sched.problem.plan import Plan

from skippipe_jax.config import Config, DataConfig, ModelConfig, NetworkConfig, NodeConfig
from skippipe_jax.data.batches import Batch
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.runtime.stage_functions import LOSS, TOKENS
from tests.harness import oracle
from tests.harness.one_host import open_alone
from tests.runtime.test_oracle import OPTIMIZER, TIME, TOLERANCE, random_batches
from tests.sched.examples import plan_of

DEVICES = 8
Meshes = tuple[tuple[int, int], ...]
PLAN = plan_of([[0, 1], [2], [3, 4]], [[0, 2, 4], [1, 3, 2], [0, 3]])


@dataclasses.dataclass(frozen=True)
class Example:
    """Nodes of these meshes, each fsdp and tensor, and what else is said of a run."""

    meshes: Meshes
    ring: bool = False
    recompute: str = "none"
    tied_head: bool = False
    gather: str = "auto"
    heads: int = 2
    microbatch_size: int = 2
    optimizer: str = "adamw"


# Replicas of the data stage have equal meshes, and those of the last stage unequal ones.
COLLECTIVES = Example(((2, 1), (2, 1), (2, 2), (1, 2), (1, 1)), tied_head=True)
EXAMPLES = {
    "collectives": COLLECTIVES,
    "matrices that Muon updates": dataclasses.replace(COLLECTIVES, optimizer="muon"),
    "rings, and tokens over both axes": Example(
        ((2, 2), (2, 2), (1, 1), (2, 1), (1, 2)),
        ring=True,
        recompute="block",
        gather="microbatch",
        heads=4,
        microbatch_size=1,
    ),
}


def with_meshes(plan: Plan, meshes: Meshes) -> Plan:
    nodes = (
        dataclasses.replace(node, mesh=mesh)
        for node, mesh in zip(plan.case.nodes, meshes, strict=True)
    )
    return dataclasses.replace(plan, case=dataclasses.replace(plan.case, nodes=tuple(nodes)))


def check(example: Example) -> None:
    plan = with_meshes(PLAN, example.meshes)
    model = ModelConfig(
        vocabulary_size=12,
        width=8,
        layers=4,
        stage_layers=(1, 2, 1),
        heads=example.heads,
        kv_heads=example.heads,
        ffn_width=12,
        context=2 * TIME,
        recompute=example.recompute,
        tied_head=example.tied_head,
    )
    batches = random_batches(plan, seed=1)
    if example.microbatch_size == 1:
        # Rows one after the other: a sequence that both axes divide.
        batches = [[in_one_row(batch) for batch in own] for own in batches]
    optimizer = dataclasses.replace(OPTIMIZER, name=example.optimizer, clip_norm=0.05)
    config = Config(
        model=model,
        optimizer=optimizer,
        data=DataConfig(
            microbatch_size=example.microbatch_size,
            sequence_length=2 * TIME // example.microbatch_size,
        ),
        node=NodeConfig(gather=example.gather),
        network=NetworkConfig(averaging="ring" if example.ring else "auto"),
    )
    runtime = open_alone(config, plan, DEVICES)
    outcomes, programs = [], []
    for iteration, own in enumerate(batches):
        outcomes.append(runtime.run(iteration, dict(enumerate(own))))
        programs.append(compiled(runtime))
    assert programs[0] == programs[-1], "nothing compiles after the first iteration"
    stage_paths = [[plan.stage_of[node] for node in path] for path in plan.microbatches]
    steps = config.train.steps
    expected, losses = oracle.train(model, optimizer, stage_paths, 3, batches, 0, steps)
    for node, state in runtime.states.items():
        error = oracle.relative_error(state.parameters, expected[plan.stage_of[node]])
        assert error < TOLERANCE, f"node {node}: {error}"
        fsdp, tensor = example.meshes[node]
        for tree in (state.parameters, state.gradients, state.optimizer_state):
            assert_is_cut(tree, fsdp, tensor)
    for outcome, loss in zip(outcomes, losses, strict=True):
        assert abs(float(outcome.totals[LOSS] / outcome.totals[TOKENS]) - loss) < 1e-5
    for node, gauge in outcomes[-1].gauges.items():
        now, peak = gauge.tolist()
        assert now == 0
        assert peak <= plan.case.nodes[node].memory


def compiled(runtime: Runtime) -> list[int]:
    """How many programs there are of each stage function."""
    functions: list[Any] = [
        getattr(state.functions, name)
        for state in runtime.states.values()
        for name in ("gather", "forward", "loss", "backward", "squared_norm", "update")
    ]
    return [function._cache_size() for function in functions]


def in_one_row(batch: Batch) -> Batch:
    return {
        "tokens": batch["tokens"].reshape(1, -1),
        "targets": batch["targets"].reshape(1, -1),
    }


def assert_is_cut(tree: object, fsdp: int, tensor: int) -> None:
    """No device has more of an array than its part: of scales, which have one axis, over fsdp."""
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        parts = 1 if array.ndim == 0 else fsdp if "scale" in name else fsdp * tensor
        shards = array.addressable_shards
        assert len({shard.device for shard in shards}) == fsdp * tensor, name
        assert {shard.data.size for shard in shards} == {array.size // parts}, name


if __name__ == "__main__":
    for name in sys.argv[1:] or EXAMPLES:
        check(EXAMPLES[name])
        print(f"{name}: equal", flush=True)
