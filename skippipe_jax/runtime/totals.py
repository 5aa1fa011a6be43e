"""What all hosts need to know of an iteration: its totals, and how long each node computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from skippipe_jax.runtime.reduction import sum_over_devices
from skippipe_jax.runtime.stage_functions import STOP, TOTALS, Gauge, Totals
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.storage.recording import Recording


@dataclass(frozen=True)
class Outcome:
    """Of one iteration, still being computed: the totals over all nodes, and this host's gauges.

    `busy_s` is how long each node computed, where that was watched; `recording` what happened when,
    where that was asked for.
    """

    totals: Totals
    gauges: dict[int, Gauge]
    busy_s: Float[Array, " nodes"] | None
    recording: Recording | None = None


def add_up(
    topology: Topology, parts: Sequence[Totals], stop: bool, busy_s: Mapping[int, float]
) -> Float[Array, " totals_and_nodes"]:
    """What this host adds to the sum over all: totals, then how long each node computed."""
    own = np.zeros(TOTALS + len(topology.devices), np.float32)
    own[STOP] = stop
    for node, seconds in busy_s.items():
        own[TOTALS + node] = seconds
    here = [jax.device_put(part, topology.host_device) for part in parts]
    return _add_totals(here, jax.device_put(own, topology.host_device))


def sum_by_collective(
    topology: Topology, local: Float[Array, " totals_and_nodes"]
) -> Float[Array, " totals_and_nodes"]:
    """The sum over all hosts, which call this together."""
    own = {topology.host_device: local}
    return sum_over_devices(topology.host_devices, own)[topology.host_device]


@jax.jit
def add_all(parts: list[Array]) -> Array:
    """The sum of what hosts have told, in their order."""
    return sum(parts[1:], start=parts[0])


@jax.jit
def apart(summed: Float[Array, " totals_and_nodes"]) -> tuple[Totals, Float[Array, " nodes"]]:
    """Totals, and how long each node computed."""
    return summed[:TOTALS], summed[TOTALS:]


@jax.jit
def _add_totals(parts: list[Array], own: Array) -> Array:
    return own.at[:TOTALS].add(jnp.sum(jnp.stack([*parts, jnp.zeros(TOTALS)]), axis=0))
