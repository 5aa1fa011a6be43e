"""Prints, for stages on meshes, what XLA says that a device holds, and what the formulas say.

    python -m tests.models.compiled_for_meshes EXAMPLES [PRESET]

As a program, since it needs XLA's optimizations, which tests go without. The examples are lists in
JSON: recompute, fsdp, tensor, and whether it is a data stage. With a preset, stages of it are
compiled, of 4 sequences of 4,096 tokens, in minutes; for the devices of a mesh, set
XLA_FLAGS=--xla_force_host_platform_device_count=4.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp

from skippipe_jax.config import (
    PRESETS,
    Config,
    DataConfig,
    ModelConfig,
    NodeConfig,
    NodeMesh,
)
from skippipe_jax.models.node_memory import kept_bytes, memory_of_node
from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.runtime.stage_functions import activation, stage_functions, wire_of_run

LAYERS, BATCH, TIME = 3, 4, 512


SMALL: dict[str, Any] = {
    "vocabulary_size": 4096,
    "width": 512,
    "heads": 8,
    "kv_heads": 4,
    "ffn_width": 1792,
}
TIME_OF_PRESETS = 4096


def sizes(
    recompute: str, fsdp: int, tensor: int, is_data_stage: bool, preset: str | None = None
) -> dict[str, list[int]]:
    """Bytes of a device by XLA, and by formula."""
    time = TIME_OF_PRESETS if preset else TIME
    shape = PRESETS[preset] if preset else SMALL
    more = {"layers": 2 * LAYERS, "context": time, "recompute": recompute}
    model = ModelConfig(**shape | more)
    data = DataConfig(microbatch_size=BATCH, sequence_length=time)
    config = Config(model=model, data=data, node=NodeConfig(fsdp, tensor))
    mesh = NodeMesh(fsdp, tensor)
    here = NodeSharding.over(jax.devices()[: mesh.devices], mesh)
    wire, tokens = wire_of_run(config), BATCH * time
    given = config.optimizer, 10, is_data_stage, LAYERS, tokens, wire
    functions: Any = stage_functions(model, *given, here.mesh)

    def lying(shapes: Any, lie: Any) -> Any:
        return jax.tree.map(
            lambda own, at: jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=at), shapes, lie
        )

    shapes = jax.eval_shape(functions.create, jax.random.key(0), 0)
    parameters, state, gradients = (lying(tree, here.of_tree(tree)) for tree in shapes)
    handed_on = activation(model, data)
    x = cotangent = lying(handed_on, here.of_hop(handed_on.shape))
    if is_data_stage:
        x = jax.ShapeDtypeStruct((BATCH, time), jnp.int32, sharding=here.whole)
    gauge = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=here.whole)
    run = functools.partial(functions.forward, leaves=True)
    forward = functions.forward.lower(parameters, gauge, x, leaves=True).compile()
    _, kept, _ = jax.eval_shape(run, parameters, gauge, x)
    kept = lying(kept, forward.output_shardings[1])
    arguments = parameters, gradients, gauge, kept, cotangent
    lowered = functions.backward.lower(*arguments, leaves=not is_data_stage)
    planned = lowered.compile().memory_analysis()

    how = {"replicas": 1, "in_flight": 1, "under_way": 1, "mesh": mesh}
    each = memory_of_node(config, LAYERS, is_data_stage=is_data_stage, **how)
    left = kept_bytes(config, LAYERS, mesh, is_data_stage=is_data_stage)
    hop = bytes_of(cotangent)
    given = each.parameters + each.gradients + left + hop + bytes_of(gauge)
    made = each.gradients + bytes_of(gauge) + hop * (not is_data_stage)
    return {
        "state": [bytes_of((parameters, gradients, state)), each.state],
        "kept": [bytes_of(kept), left],
        "arguments": [planned.argument_size_in_bytes, given],
        "outputs": [planned.output_size_in_bytes, made],
        "temporaries": [planned.temp_size_in_bytes, each.working],
    }


def bytes_of(tree: Any) -> int:
    """On each device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


if __name__ == "__main__":
    for example in json.loads(sys.argv[1]):
        print(json.dumps(sizes(*example, *sys.argv[2:])), flush=True)
