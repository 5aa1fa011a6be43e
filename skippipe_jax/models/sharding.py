"""Sharding of arrays over the devices of a node, declared once.

A node is a mesh of two axes. `fsdp` splits the width of every parameter, and of its gradients and
moments: each device stores a shard, and weights are gathered where they are used. It also splits
the batch or, if the batch has too few sequences, the tokens. `tensor` splits the heads of
attention, the feed-forward and the vocabulary, also while they are computed with; between blocks it
splits the tokens instead (Megatron's sequence parallelism, arXiv 2205.05198).

Model code names the axes of an array in `constrained`: mesh axes, or axes of activations. This has
no effect unless a stage is traced within a mesh (`jax.sharding.use_abstract_mesh`), which is part
of the key of JAX's caches. XLA inserts the communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, PyTree

FSDP, TENSOR = AXES = ("fsdp", "tensor")

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "query/kernel": (FSDP, TENSOR),
    "key/kernel": (FSDP, TENSOR),
    "value/kernel": (FSDP, TENSOR),
    "output/kernel": (TENSOR, FSDP),
    "gate/kernel": (FSDP, TENSOR),
    "up/kernel": (FSDP, TENSOR),
    "down/kernel": (TENSOR, FSDP),
    "scale": (FSDP,),
    "embedding": (TENSOR, FSDP),
    "head/kernel": (FSDP, TENSOR),
}
"""Mesh axes that split the last axes of each parameter, by the end of its name; axes of stacked
blocks are not split. Gradients and moments have the names of their parameters."""

BATCH, TIME, ALL_TIME = "batch", "time", "all time"
"""Axes of activations. `TIME`: tokens between blocks, split as far as possible. `ALL_TIME`:
tokens within a block, split over `fsdp` if the batch cannot be, and never over `tensor`."""
EVERY_PART = "vocabulary over all devices"
"""Vocabulary axis of logits: each device has a part of it, for all tokens."""


def axes_of(name: str) -> tuple[str, ...]:
    """Return the mesh axes that split the parameter `name`, or its gradient or moment.

    Raises:
        KeyError: if they are not declared.
    """
    for end, axes in PARAMETERS.items():
        if name == end or name.endswith(f"/{end}"):
            return axes
    raise KeyError(name)


def stored(name: str, dimensions: int) -> PartitionSpec:
    """Return the spec of a stored parameter, gradient or moment; scalar counters are not split."""
    if dimensions == 0:
        return PartitionSpec()
    axes = axes_of(name)
    return PartitionSpec(*[None] * (dimensions - len(axes)), *axes)


def used(name: str, dimensions: int) -> PartitionSpec:
    """Return the spec of a parameter in computations: gathered over `fsdp`."""
    spec = stored(name, dimensions)
    return PartitionSpec(*(None if axis == FSDP else axis for axis in spec))


def specs(tree: PyTree, of_array: Callable[[str, int], PartitionSpec] = stored) -> PyTree:
    """Return the spec of every array of a tree."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: of_array(_name(path), len(leaf.shape)), tree
    )


def activation_spec(batch: int, fsdp: int) -> PartitionSpec:
    """Return the spec of [batch, time, channels] between blocks, and in transfers between nodes."""
    if batch % fsdp == 0:
        return PartitionSpec(FSDP, TENSOR, None)
    return PartitionSpec(None, AXES, None)


def mesh_here() -> AbstractMesh | None:
    """Return the mesh for which a stage is being traced; None on one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names == AXES else None


def constrained(x: Array, *axes: str | None) -> Array:
    """Constrain the sharding of an array by its axes; without a mesh, change nothing."""
    mesh = mesh_here()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, _spec(mesh, x.shape, axes))


def in_use(parameters: PyTree, compute_dtype: Any) -> PyTree:
    """Return parameters of blocks gathered for computation on a mesh; without a mesh, unchanged.

    Matrices are cast to the compute dtype before they are gathered, which halves the time in
    bfloat16. Their gradients are split again at once.
    """
    if mesh_here() is None:
        return parameters

    def together(path: tuple[Any, ...], array: Array) -> Array:
        name = _name(path)
        if name.endswith("kernel"):
            array = array.astype(compute_dtype)
        return _together(array, used(name, array.ndim), stored(name, array.ndim))

    return jax.tree_util.tree_map_with_path(together, parameters)


def over_heads(attend: Callable[..., Array]) -> Callable[..., Array]:
    """Wrap `attend` so that each device computes its own sequences and heads.

    The result takes queries, keys and values [batch, time, heads, head width], and documents
    [batch, time] or None, and returns [batch, time, width]. Where `fsdp` splits the tokens, it
    splits the heads instead during attention, if there are enough (DeepSpeed-Ulysses, arXiv
    2309.14509); otherwise all devices along `fsdp` compute the same.
    """
    mesh = mesh_here()
    if mesh is None:
        return attend

    def of_all(query: Array, key: Array, value: Array, documents: Array | None) -> Array:
        cuts_batch = query.shape[0] % mesh.shape[FSDP] == 0
        turns = not cuts_batch and key.shape[2] % mesh.size == 0
        batch, time = FSDP if cuts_batch else None, FSDP if turns else None
        marks = None if documents is None else PartitionSpec(batch, None)
        of_heads = PartitionSpec(batch, time, TENSOR, None)
        return jax.shard_map(
            _turned(attend) if turns else attend,
            mesh=mesh,
            in_specs=(of_heads, of_heads, of_heads, marks),
            out_specs=PartitionSpec(batch, time, TENSOR),
            check_vma=False,
        )(query, key, value, documents)

    return of_all


def _turned(attend: Callable[..., Array]) -> Callable[..., Array]:
    """Wrap `attend` in all-to-alls, from some tokens of all heads to all tokens of some heads."""

    def turned(query: Array, key: Array, value: Array, documents: Array | None) -> Array:
        own = (
            jax.lax.all_to_all(array, FSDP, split_axis=2, concat_axis=1, tiled=True)
            for array in (query, key, value)
        )
        attended = attend(*own, documents)
        return jax.lax.all_to_all(attended, FSDP, split_axis=1, concat_axis=2, tiled=True)

    return turned


def _spec(
    mesh: AbstractMesh, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> PartitionSpec:
    cuts_batch = BATCH not in axes or shape[axes.index(BATCH)] % mesh.shape[FSDP] == 0
    of_activations: dict[str | None, str | tuple[str, ...] | None] = {
        BATCH: FSDP if cuts_batch else None,
        TIME: TENSOR if cuts_batch else AXES,
        ALL_TIME: None if cuts_batch else FSDP,
        EVERY_PART: AXES,
    }
    return PartitionSpec(*(of_activations.get(axis, axis) for axis in axes))


def _name(path: tuple[Any, ...]) -> str:
    """Return the name of an array in a tree, for any type of tree node."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return name.removesuffix("/value")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _together(array: Array, whole: PartitionSpec, cut: PartitionSpec) -> Array:
    return jax.lax.with_sharding_constraint(array, whole)


_together.defvjp(
    lambda array, whole, cut: (jax.lax.with_sharding_constraint(array, whole), None),
    lambda whole, cut, _, cotangent: (jax.lax.with_sharding_constraint(cotangent, cut),),
)
