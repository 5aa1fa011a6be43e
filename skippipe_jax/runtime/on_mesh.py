"""Shardings of the results of stage functions, and the mesh that these are traced for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from skippipe_jax.models.sharding import specs, used
from skippipe_jax.runtime.spread import activations, named
from skippipe_jax.runtime.wire_format import Wire


@dataclass(frozen=True)
class Results:
    """Shardings of results on a mesh; all None on one device, where JAX needs none.

    Attributes:
        whole: of counters and totals.
        activations: of activations between stages, and of their gradients.
        gradients: of the gradients of parameters.
        state: of parameters, and of the optimizer's state between updates.
        gathered: of the gathered parameters of blocks.
    """

    whole: NamedSharding | None = None
    activations: NamedSharding | None = None
    gradients: PyTree = None
    state: tuple[PyTree, PyTree] | None = None
    gathered: PyTree = None

    @classmethod
    def over(cls, mesh: Mesh, shapes: Any, wire: Wire, state_memory: str | None) -> Results:
        """Return the shardings over a mesh, for a stage whose state has these `shapes`."""
        parameters, state, _ = shapes
        own = named(mesh, specs(parameters))
        return cls(
            NamedSharding(mesh, PartitionSpec()),
            activations(mesh, wire.activations.computed.shape[0]),
            own,
            (own, named(mesh, specs(state), state_memory)),
            named(mesh, specs(parameters["blocks"], used)),
        )


def jitted(function: Callable, shardings: Any, **how: Any) -> Callable:
    """Jit a function, with the shardings of its results if they are not None."""
    return (
        jax.jit(function, **how)
        if shardings is None
        else jax.jit(function, out_shardings=shardings, **how)
    )


def within(mesh: Mesh | None) -> Any:
    """Return a context in which functions are traced for the devices of a mesh."""
    if mesh is None:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
