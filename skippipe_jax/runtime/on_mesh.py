"""How what stage functions return lies on a mesh, and the mesh that they are traced for."""

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
    """How what functions return lies on a mesh; all None on one device, where JAX needs no word.

    Attributes:
        whole: counters and totals.
        activations: what stages hand on, and its gradient.
        gradients: of parameters.
        state: parameters, and the optimizer's state where it waits.
        gathered: what blocks are computed with.
    """

    whole: NamedSharding | None = None
    activations: NamedSharding | None = None
    gradients: PyTree = None
    state: tuple[PyTree, PyTree] | None = None
    gathered: PyTree = None

    @classmethod
    def over(cls, mesh: Mesh, shapes: Any, wire: Wire, state_memory: str | None) -> Results:
        """Describe results over a mesh, for a stage whose state is of these `shapes`."""
        parameters, state, _ = shapes
        own = named(mesh, specs(parameters))
        return cls(
            NamedSharding(mesh, PartitionSpec()),
            activations(mesh, wire.activations.computed.shape[0]),
            own,
            (own, named(mesh, specs(state), state_memory)),
            named(mesh, specs(parameters["blocks"], used)),
        )


def jitted(function: Callable, lies: Any, **how: Any) -> Callable:
    """Jit a function, and say how what it returns lies, if that is given."""
    return (
        jax.jit(function, **how) if lies is None else jax.jit(function, out_shardings=lies, **how)
    )


def within(mesh: Mesh | None) -> Any:
    """Trace what is in this context for the devices of a mesh."""
    if mesh is None:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
