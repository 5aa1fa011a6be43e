"""Number of XLA's threads on a CPU, which XLA creates at its first use."""

from __future__ import annotations

import os

from skippipe_sched.problem.case import Case

from skippipe_jax.config import Config
from skippipe_jax.config.hardware import ONE_DEVICE

# Upper bound for nodes that use all devices of a host, whose number is not known yet.
MANY_DEVICES = 64


def give_collectives_threads(
    config: Config, nodes: int, case: Case | None = None, *, is_distributed: bool
) -> None:
    """Give XLA more threads than cores, if the `nodes` of this host need them.

    On a CPU a collective blocks a thread until all devices have joined it, as does a launch that
    waits for room in the device's queue. With few threads, all may wait for work that has no
    thread. Rings need no extra threads, and operations are faster without them. `case` is the
    plan's, once it is known; its nodes may have their own meshes.
    """
    held = 2 * nodes if is_distributed and config.network.averaging != "ring" else 0
    meshes = [config.node.mesh] if case is None else config.node.meshes(case)
    if any(mesh != ONE_DEVICE for mesh in meshes):
        most = max(MANY_DEVICES if mesh is None else mesh.devices for mesh in meshes)
        held += 2 * nodes * most if None not in meshes else 2 * most
    if held:
        os.environ.setdefault("PJRT_NPROC", str((os.cpu_count() or 1) + held + 1))
