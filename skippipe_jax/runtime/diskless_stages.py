"""Transfer of stages that only diskless hosts hold to the leader, for checkpoints.

Diskless hosts (`apart`) do not reach the folder of the run. If another host has a replica of the
stage, it saves the stage. Otherwise the leader, which reaches the folder, receives the state and
keeps it until it is written. All hosts wait for the transfer, so each checkpoint costs the bytes of
the stage over the bandwidth between the two hosts. The leader stores each array beside its own
states: in the memory of its machine, if JAX has a device for it, else on its device.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import PyTree

from skippipe_jax.cluster.agreement import barrier
from skippipe_jax.cluster.membership import Group
from skippipe_jax.config import Config
from skippipe_jax.program.hops import Hop, HopNumbers
from skippipe_jax.runtime.stage_functions import functions_of_run
from skippipe_jax.runtime.state import StageState, State, shapes_of_state
from skippipe_jax.runtime.state_transfer import ArrayTransfer, wait_for_arrays
from skippipe_jax.runtime.topology import Topology
from skippipe_jax.runtime.transport import AFTER_A_STEP, HostLink


class DisklessStages:
    """Stages that a group transfers to its leader; equal on all hosts.

    Attributes:
        source_of: the host that sends each of them.
        numbers: numbers of the hops of their arrays.
    """

    def __init__(self, topology: Topology, config: Config, group: Group):
        """Find the stages that only diskless hosts hold."""
        self._group = group
        numbers, leader = HopNumbers(topology.first_free_hop), topology.first_nodes[0]
        functions = functions_of_run(config, len(topology.plan.stages))
        self._shapes: dict[int, State] = {}
        self._transfers: dict[int, ArrayTransfer] = {}
        for stage, replicas in enumerate(topology.replicas):
            hosts = [topology.host_of[replica] for replica in replicas]
            if hosts and {*hosts} <= {*group.apart}:
                self._shapes[stage] = shapes_of_state(functions[stage])
                taken = numbers.take(len(jax.tree.leaves(self._shapes[stage])))
                hops = tuple(Hop(number, replicas[0], leader) for number in taken)
                self._transfers[stage] = ArrayTransfer(hosts[0], 0, hops)
        self.source_of = {stage: own.source for stage, own in self._transfers.items()}
        self.numbers = range(topology.first_free_hop, numbers.free)

    def after(
        self, step: int, states: Mapping[int, StageState], links: Mapping[int, HostLink]
    ) -> dict[int, dict[str, PyTree]]:
        """Return the states of these stages after a step, on the leader; all hosts call this.

        `states` are those of the local replicas. Hosts other than the leader return no states.

        Raises:
            GenerationEnded: if the group ends before all has arrived.
        """
        if not self._transfers:
            return {}
        iteration, own = AFTER_A_STEP + step, {}
        for stage, transfer in self._transfers.items():
            if transfer.hops[0].source in states:
                leaves = jax.tree.leaves(states[transfer.hops[0].source].to_save())
                transfer.send(links, leaves, iteration)
            elif self._group.index == 0:
                shapes, structure = jax.tree.flatten(dict(self._shapes[stage]))
                link = links[transfer.source]
                arrays = [
                    self._set_aside(link.receive(hop, iteration, shape))
                    for hop, shape in zip(transfer.hops, shapes, strict=True)
                ]
                own[stage] = jax.tree.unflatten(structure, arrays)
        # No host may update a state that the leader still receives.
        barrier(self._group, f"given/{step}", self._group.timeout_s)
        return own

    def _set_aside(self, array: jax.Array) -> jax.Array:
        [array] = wait_for_arrays([array], self._group)
        return beside(array)


def beside(array: jax.Array | np.ndarray) -> jax.Array:
    """Copy an array to the memory of the machine, or to the default device: see above."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and "cpu" not in platforms.split(","):
        return jax.device_put(array)
    return jax.device_put(np.asarray(array), jax.local_devices(backend="cpu")[0])
