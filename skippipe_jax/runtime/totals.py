"""Sums over all hosts of an iteration: totals, compute time of each node, gradient norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.runtime.reduction import sum_over_nodes
from skippipe_jax.runtime.stage_functions import STOP, TOTALS, Gauge, Totals
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.storage.recording import Recording


@dataclass(frozen=True)
class Sums:
    """Sums over all hosts of an iteration.

    `busy_s` has the seconds that each node computed, if measured. `squared_norms` has the squared
    norm of the gradients of each stage's blocks, if recorded.
    """

    totals: Totals
    busy_s: Float[Array, " nodes"] | None = None
    squared_norms: Float[Array, " stages"] | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of one iteration, which may still be computed.

    Attributes:
        sums: waits for the sums over all hosts and returns them, or raises the error that has
            prevented them.
        gauges: gauges of the nodes of this host.
        recording: times of all events, if requested.
        ended_s: when this host left the iteration, if other hosts may still be in it.
    """

    sums: Callable[[], Sums]
    gauges: dict[int, Gauge]
    recording: Recording | None = None
    ended_s: float | None = None

    @property
    def totals(self) -> Totals:
        """Totals over all nodes; waits for them."""
        return self.sums().totals


def add_up(
    topology: Topology,
    parts: Sequence[Totals],
    stop: bool,
    busy_s: Mapping[int, float],
    squared_norms: Mapping[int, Float[Array, ""]] | None = None,
) -> Float[Array, " all"]:
    """Return the contribution of this host to the sum over all hosts.

    It has totals, then the compute seconds of each node, then the squared norm of each stage.
    """
    nodes = len(topology.devices)
    own = np.zeros(TOTALS + nodes + len(topology.plan.stages), np.float32)
    own[STOP] = stop
    for node, seconds in busy_s.items():
        own[TOTALS + node] = seconds
    norms = {TOTALS + nodes + stage: norm for stage, norm in (squared_norms or {}).items()}
    here = jax.device_put(([*parts], norms, own), topology.host_device)
    return _add_totals(*here)


def sum_by_collective(topology: Topology, local: Float[Array, " all"]) -> Float[Array, " all"]:
    """Sum over all hosts, which call this together, in their order as an elastic run does."""
    hosts = len(topology.hosts)
    if hosts == 1:
        return local
    here = NodeSharding((topology.host_device,))
    of_hosts = [NodeSharding((topology.device(node),)) for node in topology.first_nodes]
    # A collective may add in another order, but all it adds to the row of a host is zeros.
    rows = _in_row(local, topology.host, hosts)
    return _sum_of_rows(sum_over_nodes(of_hosts, {here: rows})[here])


def split_sums(summed: Float[Array, " all"], nodes: int) -> Sums:
    """Split the summed vector of a run with `nodes` nodes."""
    return Sums(*_split_sums(summed, nodes))


@partial(jax.jit, static_argnums=(1, 2))
def _in_row(local: Array, host: int, hosts: int) -> Array:
    return jnp.zeros((hosts, *local.shape), local.dtype).at[host].set(local)


@jax.jit
def _sum_of_rows(rows: Array) -> Array:
    return sum(rows[1:], start=rows[0])


@partial(jax.jit, static_argnums=1)
def _split_sums(summed: Array, nodes: int) -> tuple[Array, Array, Array]:
    busy_s, norms = summed[TOTALS : TOTALS + nodes], summed[TOTALS + nodes :]
    return summed[:TOTALS], busy_s, norms


@jax.jit
def _add_totals(parts: list[Array], norms: dict[int, Array], own: Array) -> Array:
    own = own.at[:TOTALS].add(jnp.sum(jnp.stack([*parts, jnp.zeros(TOTALS)]), axis=0))
    for place, norm in norms.items():
        own = own.at[place].set(norm)
    return own
