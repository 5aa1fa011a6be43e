"""Jitted functions of one stage: forward, loss, backward and update.

Each is compiled once for all microbatches: neither the microbatch nor its path enters a trace. Two
values are passed through the calls on a node, so that its device runs them in order:

- `gradients`, to which every loss and every backward adds: the gradients of the sum of token losses
  over the number of tokens in a microbatch. `update` scales them to the gradient of the mean over
  all target tokens.
- `gauge`, the number of microbatches in flight on the node, now and at most so far. All calls
  return it and none donates it: a wait for the gauge is a wait for the end of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from skippipe_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig
from skippipe_jax.models.footprint import transfer_dtypes
from skippipe_jax.models.llama import DataStage, Stage
from skippipe_jax.models.sharding import in_use, specs, used
from skippipe_jax.optim import rounding
from skippipe_jax.optim.rounding import RoundingSeed
from skippipe_jax.optim.update_rule import update_count, update_rule
from skippipe_jax.runtime.node_sharding import activations, named
from skippipe_jax.runtime.wire_format import HopSeed, Wire, WireFormat

Parameters = dict[str, Any]
Gradients = dict[str, Any]
Gauge = Int[Array, "2"]

HOST_MEMORY = "pinned_host"
"""JAX's name for the memory of the host that devices can access."""

# Sums of an iteration over all nodes: token losses [nats], target tokens, squared norm of the
# gradients, number of hosts with a request to stop, and z-loss term of the token losses.
Totals = Float[Array, "5"]
LOSS, TOKENS, SQUARED_NORM, STOP, Z_LOSS = range(5)
TOTALS = 5


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Saved:
    """Residuals of a forward pass for its backward pass: the leaves of a function of `jax.vjp`.

    Leaves that are parameters are not stored, only their numbers; `vjp` inserts them again.
    """

    arrays: list[Array]
    parameter_of_leaf: tuple[int | None, ...] = field(metadata={"static": True})
    structure: Any = field(metadata={"static": True})

    @classmethod
    def of(cls, vjp: Callable, parameters: Parameters) -> Saved:
        """Split a function of `jax.vjp` into its leaves."""
        leaves, structure = jax.tree.flatten(vjp)
        numbers = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(parameters))}
        parameter_of_leaf = tuple(numbers.get(id(leaf)) for leaf in leaves)
        arrays = [leaf for leaf in leaves if id(leaf) not in numbers]
        return cls(arrays, parameter_of_leaf, structure)

    def vjp(self, parameters: Parameters) -> Callable:
        """Rebuild the function of `jax.vjp`."""
        own, shared = iter(self.arrays), jax.tree.leaves(parameters)
        leaves = [next(own) if n is None else shared[n] for n in self.parameter_of_leaf]
        return jax.tree.unflatten(self.structure, leaves)


@dataclass(frozen=True, kw_only=True)
class StageFunctions:
    """Jitted functions that stages of one shape share.

    `inputs` are tokens [batch, time] on a data stage and activations [batch, time, width] on the
    others, or with packed documents [batch, time, 2] and [batch, time, width + 1]; `saved` has the
    residuals, according to `model.recompute`.

    In training, activations and gradients from other nodes are passed in encoded, and with
    `leaves=True` results are returned encoded. `draw` is the seed of stochastic rounding, or None.
    """

    state_memory: str | None
    """kind of memory that holds the optimizer's state between updates; None: that of the device"""
    initialize: Callable[[PRNGKeyArray, int], Parameters]
    """(key, first layer) -> parameters"""
    begin: Callable[[Parameters], PyTree]
    """parameters -> optimizer state before the first update"""
    no_gradients: Callable[[Parameters], Gradients]
    """parameters -> zero gradients"""
    forward: Callable[..., tuple[Array, PyTree, Gauge]]
    """(parameters, gauge, inputs, leaves=) -> outputs, saved, gauge"""
    loss: Callable[..., tuple[Array, Gradients, Totals, Gauge]]
    """(parameters, gradients, totals, gauge, activations, targets, draw, leaves=) -> gradient of
    the activations, gradients, totals, gauge"""
    backward: Callable[..., tuple[Array | None, Gradients, Gauge]]
    """(parameters, gradients, gauge, saved, gradient of outputs, draw, leaves=) -> gradient of
    inputs, gradients, gauge"""
    squared_norm: Callable[[Gradients], Totals]
    """gradients -> totals with only their squared norm"""
    update: Callable[..., tuple[Parameters, PyTree, Gradients]]
    """(parameters, optimizer state, gradients, totals, draw) -> updated parameters and optimizer
    state, zero gradients; `draw` is the seed for rounding bfloat16 arrays"""
    predict: Callable[[Parameters, Array], Array]
    """(parameters, inputs) -> outputs, without residuals"""
    held_out: Callable[[Parameters, Array, Array], Float[Array, 2]]
    """(parameters, activations, targets) -> sum of token losses in nats, target tokens"""
    gather: Callable[[PyTree], PyTree]
    """parameters of blocks -> the same, gathered from the devices over which `fsdp` shards them;
    functions that compute with parameters also accept these"""
    on: Callable[[Mesh | None], StageFunctions]
    """mesh, or None for one device -> functions of the same stage on it"""

    def create(self, key: PRNGKeyArray, first_layer: int) -> tuple[Parameters, PyTree, Gradients]:
        """Return initial parameters, optimizer state and zero gradients."""
        parameters = self.initialize(key, first_layer)
        return parameters, self.begin(parameters), self.no_gradients(parameters)


def activation(model: ModelConfig, data: DataConfig) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a microbatch's activation between stages, and of its gradient."""
    channels = model.width + (data.packing == "documents")
    shape = (data.microbatch_size, data.sequence_length, channels)
    return jax.ShapeDtypeStruct(shape, model.compute_dtype)


@functools.cache
def stage_functions(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    steps: int,
    is_data_stage: bool,
    layers: int,
    microbatch_tokens: int,
    wire: Wire | None = None,
    mesh: Mesh | None = None,
) -> StageFunctions:
    """Make the functions of a stage of `layers` blocks; `steps` are those of the schedule.

    Without a `wire`, hops have the compute dtype. Without a `mesh`, the functions run on one
    device: that of their arguments.
    """
    of_stage = is_data_stage, layers, microbatch_tokens, wire
    operations = _operations(model, optimizer.z_loss, *of_stage, mesh)
    transformation = update_rule(optimizer, steps)

    def begin(parameters: Parameters) -> PyTree:
        return stored(transformation.init(parameters))

    def stored(optimizer_state: PyTree) -> PyTree:
        """Move the optimizer's state to its memory between updates."""
        if optimizer.state_memory == "device":
            return optimizer_state
        return jax.device_put(optimizer_state, jax.memory.Space.Host)

    def update(
        parameters: Parameters,
        optimizer_state: PyTree,
        gradients: Gradients,
        totals: Totals,
        draw: RoundingSeed | None = None,
    ):
        scale = _gradient_scale(optimizer, totals, microbatch_tokens)
        mean = jax.tree.map(lambda leaf: leaf * scale, gradients)
        if optimizer.state_memory == "host":
            optimizer_state = jax.device_put(optimizer_state, jax.memory.Space.Device)
        held = parameters, optimizer_state
        wide, wide_state = rounding.widened(held)
        is_skipped = skips_update(optimizer, totals, microbatch_tokens)
        updates, new_state = transformation.update(mean, wide_state, wide, is_skipped=is_skipped)
        added = optax.apply_updates(wide, updates)
        updated = optax.tree.where(is_skipped, wide, added), new_state
        if rounding.rounds_stochastically(held):
            assert draw is not None, "stochastic rounding without a seed"
            updated = rounding.rounded_like(updated, held, draw, update_count(optimizer_state))
        return updated[0], stored(updated[1]), zero_gradients(parameters)

    state_memory = HOST_MEMORY if optimizer.state_memory == "host" else None
    parameter_shardings = state_shardings = None
    if mesh is not None:
        assert wire is not None, "a mesh without a wire format"
        shapes = jax.eval_shape(operations["initialize"], jax.random.key(0), 0)
        parameter_shardings = named(mesh, specs(shapes))
        state_shardings = named(mesh, specs(jax.eval_shape(begin, shapes)), state_memory)
    state = parameter_shardings, state_shardings, parameter_shardings
    return StageFunctions(
        state_memory=state_memory,
        begin=jax.jit(begin, out_shardings=state_shardings),
        update=jax.jit(update, out_shardings=state, donate_argnums=(0, 1, 2)),
        on=functools.partial(stage_functions, model, optimizer, steps, *of_stage),
        **operations,
    )


@functools.cache
def _operations(
    model: ModelConfig,
    z_loss: float,
    is_data_stage: bool,
    layers: int,
    microbatch_tokens: int,
    wire: Wire | None,
    mesh: Mesh | None,
) -> dict[str, Callable]:
    """Make the functions of a stage that do not depend on the optimizer, by their names."""
    kind = DataStage if is_data_stage else Stage
    computed = jax.ShapeDtypeStruct((model.width,), model.compute_dtype)
    plain = WireFormat(computed, model.compute_dtype, model.width)
    activation_format = wire.activations if wire else plain
    gradient_format = wire.gradients if wire else plain
    module = nnx.eval_shape(lambda: kind(model, layers, 0, jax.random.key(0)))
    structure = nnx.graphdef(module)

    def initialize(key: PRNGKeyArray, first_layer: int) -> Parameters:
        return nnx.to_pure_dict(nnx.state(kind(model, layers, first_layer, key)))

    def apply(parameters: Parameters, inputs: Array) -> Array:
        return nnx.merge(structure, parameters)(inputs)

    def linearized(parameters: Parameters, inputs: Array) -> tuple[Array, Callable]:
        if is_data_stage:
            return jax.vjp(lambda parameters: apply(parameters, inputs), parameters)
        return jax.vjp(apply, parameters, activation_format.unpack(inputs))

    def forward(parameters: Parameters, gauge: Gauge, inputs: Array, *, leaves: bool = False):
        in_flight = gauge[0] + 1
        gauge = jnp.stack([in_flight, jnp.maximum(gauge[1], in_flight)])
        if model.recompute == "stage":
            # Saved encoded, which takes fewer bytes.
            unpacked = inputs if is_data_stage else activation_format.unpack(inputs)
            outputs, saved = apply(parameters, unpacked), inputs
        else:
            outputs, vjp = linearized(parameters, inputs)
            saved = Saved.of(vjp, parameters)
        return activation_format.pack(outputs) if leaves else outputs, saved, gauge

    def backward(
        parameters: Parameters,
        gradients: Gradients,
        gauge: Gauge,
        saved: PyTree,
        cotangent: Array,
        draw: HopSeed | None = None,
        *,
        leaves: bool = False,
    ):
        if model.recompute == "stage":
            _, vjp = linearized(parameters, saved)
        else:
            vjp = saved.vjp(parameters)
        of_parameters, *of_inputs = vjp(gradient_format.unpack(cotangent))
        gauge = gauge.at[0].add(-1)
        gradients = add(gradients, of_parameters)
        if not of_inputs:
            return None, gradients, gauge
        [sent] = of_inputs
        return gradient_format.pack(sent, draw) if leaves else sent, gradients, gauge

    def loss(
        parameters: Parameters,
        gradients: Gradients,
        totals: Totals,
        gauge: Gauge,
        outputs: Array,
        targets: Array,
        draw: HopSeed | None = None,
        *,
        leaves: bool = False,
    ):
        def scaled_loss(parameters: Parameters, activations: Array):
            minimised, *terms = nnx.merge(structure, parameters).loss_terms(
                activations, targets, z_loss
            )
            return minimised / microbatch_tokens, terms

        (of_parameters, of_outputs), (tokens, nats, of_z) = jax.grad(
            scaled_loss, argnums=(0, 1), has_aux=True
        )(parameters, activation_format.unpack(outputs))
        totals = totals.at[LOSS].add(nats).at[TOKENS].add(tokens).at[Z_LOSS].add(of_z)
        of_outputs = gradient_format.pack(of_outputs, draw) if leaves else of_outputs
        # Plus 0: an unchanged input would be ready before the other outputs.
        return of_outputs, add(gradients, of_parameters), totals, gauge + 0

    def squared_norm(gradients: Gradients) -> Totals:
        return jnp.zeros(TOTALS).at[SQUARED_NORM].set(sum_of_squares(gradients))

    def held_out(parameters: Parameters, activations: Array, targets: Array):
        return jnp.stack(nnx.merge(structure, parameters).loss(activations, targets))

    def precise(function: Callable) -> Callable:
        @functools.wraps(function)
        def own(*arguments: Any, **how: Any):
            with jax.default_matmul_precision(model.matmul_precision):
                if mesh is None:
                    return function(*arguments, **how)
                with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                    return function(*arguments, **how)

        return own

    def gather(blocks: PyTree) -> PyTree:
        return in_use(blocks, model.compute_dtype)

    # Shardings of results on a mesh; on one device JAX needs none.
    whole = activation_sharding = parameter_shardings = gathered_shardings = None
    if mesh is not None:
        shapes = nnx.to_pure_dict(nnx.state(module))
        whole = NamedSharding(mesh, PartitionSpec())
        activation_sharding = activations(mesh, activation_format.computed.shape[0])
        parameter_shardings = named(mesh, specs(shapes))
        gathered_shardings = named(mesh, specs(shapes["blocks"], used))
    of_operation = activation_sharding, parameter_shardings, whole

    # The gradient of the inputs can reuse the buffer of the cotangent, which has the same shape; on
    # a data stage, whose inputs are tokens, there is none. The gradient of activations can reuse
    # their buffer, if both have the same encoding.
    overwritten = (1,) if is_data_stage else (1, 4)
    is_alike = activation_format.travelling == gradient_format.travelling
    return {
        "initialize": jax.jit(initialize, out_shardings=parameter_shardings),
        "no_gradients": jax.jit(zero_gradients, out_shardings=parameter_shardings),
        "forward": jax.jit(
            precise(forward),
            out_shardings=(activation_sharding, None, whole),
            static_argnames="leaves",
        ),
        "loss": jax.jit(
            precise(loss),
            out_shardings=(*of_operation, whole),
            donate_argnums=(1, 2, 4) if is_alike else (1, 2),
            static_argnames="leaves",
        ),
        "backward": jax.jit(
            precise(backward),
            out_shardings=of_operation,
            donate_argnums=overwritten,
            static_argnames="leaves",
        ),
        "squared_norm": jax.jit(squared_norm, out_shardings=whole),
        "predict": jax.jit(precise(apply), out_shardings=activation_sharding),
        "held_out": jax.jit(precise(held_out), out_shardings=whole),
        "gather": jax.jit(precise(gather), out_shardings=gathered_shardings),
    }


def _gradient_scale(
    optimizer: OptimizerConfig, totals: Totals, microbatch_tokens: int
) -> Float[Array, ""]:
    """Return the factor from summed gradients to their clipped mean over all target tokens."""
    scale = microbatch_tokens / totals[TOKENS]
    if optimizer.clip_norm is None:
        return scale
    norm = jnp.sqrt(totals[SQUARED_NORM]) * scale
    return scale * jnp.minimum(1.0, optimizer.clip_norm / norm)


def skips_update(
    optimizer: OptimizerConfig, totals: Totals | np.ndarray, microbatch_tokens: int
) -> Any:
    """Return whether the update of an iteration is skipped: a bool.

    It is skipped if there is no target token, and so no loss, or by `optimizer.skip_above_norm`.

    The gradients' norm is root(squared_norm) * microbatch_tokens / tokens. The comparison avoids
    root and quotient: all devices round products equally, so all replicas agree.
    """
    squared_norm, tokens = totals[SQUARED_NORM], totals[TOKENS]
    if optimizer.skip_above_norm is None:
        return tokens == 0
    # A large bound may overflow to infinity; an infinite norm exceeds it, too.
    with np.errstate(over="ignore"):
        bound = tokens * tokens * np.float32(optimizer.skip_above_norm**2)
        is_within = squared_norm * np.float32(microbatch_tokens**2) <= bound
    return ~(is_within & (squared_norm < np.inf) & (tokens > 0))


def functions_of_run(config: Config, stages: int) -> list[StageFunctions]:
    """Jit the functions of each stage of a run with `stages` stages; alike ones share them."""
    return [
        functions_of_stage(config, stage == 0, layers)
        for stage, layers in enumerate(config.model.stage_partition(stages))
    ]


def functions_of_stage(config: Config, is_data_stage: bool, layers: int) -> StageFunctions:
    """Jit the functions of a run's stage of `layers` blocks; stages of equal shape share them."""
    tokens = config.data.microbatch_size * config.data.sequence_length
    # A stage does not depend on the others, so models of any depth share its functions.
    model = replace(config.model, layers=layers, stage_layers=None)
    given = model, config.optimizer, config.schedule_steps
    return stage_functions(*given, is_data_stage, layers, tokens, wire_of_run(config))


def wire_of_run(config: Config) -> Wire:
    """Return the encodings of a run's activations and of their gradients."""
    computed, width = activation(config.model, config.data), config.model.width
    forward, back = transfer_dtypes(config)
    return Wire(
        WireFormat(computed, forward, width),
        WireFormat(computed, back, width, config.network.gradient_rounding),
    )


def sum_of_squares(gradients: Gradients) -> Float[Array, ""]:
    """Sum the squares of all numbers; each device of a mesh sums its shards."""
    squares = (jnp.tensordot(leaf, leaf, leaf.ndim) for leaf in jax.tree.leaves(gradients))
    return sum(squares, jnp.float32(0))


def zero_gradients(parameters: Parameters) -> Gradients:
    """Return zero gradients, in float32 whatever the dtype of the parameters."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), parameters)


def add(gradients: Gradients, more: Gradients) -> Gradients:
    """Add two trees, in the dtype of the first."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), gradients, more)
