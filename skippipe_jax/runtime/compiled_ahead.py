"""Has nodes of some stages run all that they will before their states are there, on zeros.

So a host is ready when others take it in, who all wait for its first iteration: nothing is traced
or compiled then. What is compiled is kept, too, where JAX keeps programs (see `compilation`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from skippipe_sched.problem.case import Case

from skippipe_jax.config import Config
from skippipe_jax.models.node_memory import gathers_once
from skippipe_jax.optim.outer import begin
from skippipe_jax.runtime.outer_steps import functions_of_fragments, inner_steps
from skippipe_jax.runtime.spread import Spread
from skippipe_jax.runtime.stage_functions import (
    TOTALS,
    StageFunctions,
    activation,
    functions_of_run,
    where_state_waits,
    wire_of_run,
)


def compile_ahead(
    config: Config,
    stages: Collection[int],
    of_stages: int,
    nodes: Collection[Spread],
    case: Case | None = None,
) -> int:
    """Run the functions of these stages, of so many, once on some nodes; returns how many.

    `case` is that of the plan, by which weights come together on meshes.
    A node holds the state of a stage and a microbatch in flight meanwhile, and nothing of that
    afterwards.
    """
    functions = functions_of_run(config, of_stages)
    distinct = {functions[stage]: stage for stage in sorted(stages)}
    count = 0
    for here in nodes:
        for own, stage in distinct.items():
            gathers = case is not None and gathers_once(config, case, stage, here.shape)
            count += _run_once(config, own.on(here.mesh), here, stage == 0, gathers)
            if config.averaging.is_outer:
                count += _go_apart_once(config, stage, of_stages, here.devices[0])
    return count


def _go_apart_once(config: Config, stage: int, of_stages: int, device: jax.Device) -> int:
    """Call what replicas that go apart call at the end of iterations, but for applying.

    That depends on how many they are.
    """
    layers = config.model.layers_of_stages(of_stages)
    functions, own = functions_of_run(config, of_stages)[stage], inner_steps(config, of_stages)
    with jax.default_device(device):
        created = functions.create(jax.random.key(0), 0), jnp.int32(1)
    given, targets = jax.device_put(created, device)
    stepped, *_ = own[stage](*given, targets)
    outer = begin(stepped)
    for fragment in functions_of_fragments(config, layers[stage]):
        *_, outer = fragment.send(stepped, outer)
    jax.block_until_ready(outer)
    return 2 + config.averaging.fragments


def _run_once(
    config: Config, functions: StageFunctions, here: Spread, is_data_stage: bool, gathers: bool
) -> int:
    """Call what training calls, with arrays that are on the devices."""

    def zeros_at(shapes: Any, there: Any) -> Any:
        return jax.tree.map(
            lambda own, lies: jnp.zeros(own.shape, own.dtype, device=lies), shapes, there
        )

    def zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return zeros_at(shape, here.whole)

    def come(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return zeros_at(shape, here.of_hop(shape.shape))

    wire, computed = wire_of_run(config), activation(config.model, config.data)
    shapes = jax.eval_shape(functions.create, jax.random.key(0), 0)
    parameters, state, gradients = (zeros_at(tree, here.of_tree(tree)) for tree in shapes)
    state = jax.device_put(state, where_state_waits(functions, state, here))
    gauge = zeros(jax.ShapeDtypeStruct((2,), jnp.int32))
    totals = zeros(jax.ShapeDtypeStruct((TOTALS,), jnp.float32))
    tokens = zeros(jax.ShapeDtypeStruct(computed.shape[:2], jnp.int32))
    draw = np.zeros(4, np.uint32) if wire.gradients.is_drawn else None
    inputs = come(wire.activations.travelling)
    if is_data_stage:
        marked = (*tokens.shape, 2) if config.data.packing == "documents" else tokens.shape
        inputs = zeros(jax.ShapeDtypeStruct(marked, jnp.int32))
    in_use = parameters
    if gathers:
        in_use = {**parameters, "blocks": functions.gather(parameters["blocks"])}
    _, saved, gauge = functions.forward(in_use, gauge, inputs, leaves=True)
    if is_data_stage:
        outputs = come(wire.activations.travelling)
        given = gradients, totals, gauge, outputs, tokens, draw
        _, gradients, totals, gauge = functions.loss(in_use, *given, leaves=True)
    # Nothing leaves a data stage backward, so nothing is rounded.
    given = (
        gradients,
        gauge,
        saved,
        come(wire.gradients.travelling),
        None if is_data_stage else draw,
    )
    _, gradients, _ = functions.backward(in_use, *given, leaves=not is_data_stage)
    functions.squared_norm(gradients)
    functions.no_gradients(parameters)
    drawn_by = np.zeros(2, np.uint32)
    jax.block_until_ready(functions.update(parameters, state, gradients, totals, drawn_by))
    return (6 if is_data_stage else 5) + gathers
