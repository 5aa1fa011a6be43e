"""How arrays are cut over the devices of a node: declared once, by logical axes.

A node is a mesh of two axes. Over `fsdp` the width of every parameter is cut, and with it gradients
and moments: each device keeps a part, and weights come together where they are used. The batch is
cut over it, too, or where it has too few sequences, the tokens are. Over `tensor` the heads of
attention, the feed-forward and the vocabulary are cut and stay so while they are computed with;
between blocks the tokens are cut over it instead (Megatron's sequence parallelism, arXiv
2205.05198).

Model code says by `constrained` what the axes of an array are. That does nothing unless a stage is
traced within a mesh (`jax.sharding.use_abstract_mesh`), which JAX's own caches know of. XLA inserts
what moves data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, PyTree

FSDP, TENSOR = AXES = ("fsdp", "tensor")

WIDTH, HEADS, KV_HEADS, FFN, VOCABULARY = "width", "heads", "kv_heads", "ffn", "vocabulary"
STORED: Mapping[str, str] = {
    WIDTH: FSDP,
    HEADS: TENSOR,
    KV_HEADS: TENSOR,
    FFN: TENSOR,
    VOCABULARY: TENSOR,
}
"""Over which axis of the mesh each axis of a parameter is cut."""

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "query/kernel": (WIDTH, HEADS),
    "key/kernel": (WIDTH, KV_HEADS),
    "value/kernel": (WIDTH, KV_HEADS),
    "output/kernel": (HEADS, WIDTH),
    "gate/kernel": (WIDTH, FFN),
    "up/kernel": (WIDTH, FFN),
    "down/kernel": (FFN, WIDTH),
    "scale": (WIDTH,),
    "embedding": (VOCABULARY, WIDTH),
    "head/kernel": (WIDTH, VOCABULARY),
}
"""The last axes of each parameter, by the end of its name; others, of stacked blocks, stay whole.

Gradients and moments have the names of their parameters."""

BATCH, TIME, ALL_TIME = "batch", "time", "all time"
"""Axes of activations: between blocks tokens are cut as far as they can be (`TIME`). Within one, a
device has all tokens of its part of the batch (`ALL_TIME`)."""
EVERY_PART = "vocabulary over all devices"
"""Where logits are made: each device has a part of the vocabulary, and the tokens of all."""


def axes_of(name: str) -> tuple[str, ...]:
    """Return the last axes of a parameter, or of what belongs to one, of this name.

    Raises:
        KeyError: if they are declared nowhere.
    """
    for end, axes in PARAMETERS.items():
        if name == end or name.endswith(f"/{end}"):
            return axes
    raise KeyError(name)


def stored(name: str, dimensions: int) -> PartitionSpec:
    """How a parameter is cut, its gradient or a moment of it; counters, which have no axes, not."""
    if dimensions == 0:
        return PartitionSpec()
    axes = axes_of(name)
    return PartitionSpec(*[None] * (dimensions - len(axes)), *(STORED[axis] for axis in axes))


def used(name: str, dimensions: int) -> PartitionSpec:
    """Return the same where it is computed with: its parts over `fsdp` have come together."""
    spec = stored(name, dimensions)
    return PartitionSpec(*(None if axis == FSDP else axis for axis in spec))


def specs(tree: PyTree, of_array: Callable[[str, int], PartitionSpec] = stored) -> PyTree:
    """Return how every array of a tree is cut."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: of_array(_name(path), len(leaf.shape)), tree
    )


def activation_spec(batch: int, fsdp: int) -> PartitionSpec:
    """Return how [batch, time, channels] is cut between blocks, and on its way between nodes."""
    if batch % fsdp == 0:
        return PartitionSpec(FSDP, TENSOR, None)
    return PartitionSpec(None, AXES, None)


def mesh_here() -> AbstractMesh | None:
    """Return the mesh for which a stage is being traced; None on one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.axis_names == AXES else None


def constrained(x: Array, *axes: str | None) -> Array:
    """An array, cut by what its axes are; the batch is the first if there is one."""
    mesh = mesh_here()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, _spec(mesh, x.shape, axes))


def in_use(parameters: PyTree, compute_dtype: Any) -> PyTree:
    """Return the parameters of blocks as they are computed with, on a mesh; else as they are.

    Matrices are in the compute dtype before they come together, which takes half the time. Their
    gradients are cut again at once.
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
    """Attention of which each device computes that of its own sequences and heads.

    It takes queries, keys and values [batch, time, heads, head width], and documents [batch, time]
    or None, and gives [batch, time, width]. Where tokens are cut over `fsdp`, the heads are
    meanwhile, if there are enough of them (DeepSpeed-Ulysses, arXiv 2309.14509); otherwise each
    device along it computes the same.
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
    """Attention of a device that has some tokens of all its heads, and then all of some heads."""

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
    of_activations = {
        BATCH: FSDP if cuts_batch else None,
        TIME: TENSOR if cuts_batch else AXES,
        ALL_TIME: None if cuts_batch else FSDP,
        EVERY_PART: AXES,
        None: None,
    }
    return PartitionSpec(*({**STORED, **of_activations}[axis] for axis in axes))


def _name(path: tuple[Any, ...]) -> str:
    """Of an array in a tree, whichever kinds of nodes this has."""
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return name.removesuffix("/value")


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _together(array: Array, whole: PartitionSpec, cut: PartitionSpec) -> Array:
    return jax.lax.with_sharding_constraint(array, whole)


def _together_forward(array: Array, whole: PartitionSpec, cut: PartitionSpec) -> tuple[Array, None]:
    return jax.lax.with_sharding_constraint(array, whole), None


def _together_backward(
    whole: PartitionSpec, cut: PartitionSpec, _: None, cotangent: Array
) -> tuple[Array]:
    return (jax.lax.with_sharding_constraint(cotangent, cut),)


_together.defvjp(_together_forward, _together_backward)
