"""How many threads XLA has on a CPU, which it creates when it is first used."""

from __future__ import annotations

import os

from skippipe_sched.problem.case import Case

from skippipe_jax.config import Config
from skippipe_jax.config.hardware import ONE_DEVICE

# Of a host whose nodes have all the devices that there are, which are not counted yet.
MANY_DEVICES = 64


def give_collectives_threads(
    config: Config, nodes: int, case: Case | None = None, *, is_distributed: bool
) -> None:
    """Let XLA have more threads than cores, where so many nodes of a host need them.

    On a CPU a collective holds a thread until all devices have come to it, and so does a launch for
    which the device has no room yet: with few threads, all may wait for work that has no thread
    left. Rings need no such threads, and operations are quicker without. `case` is that of the
    plan, once it is known; its nodes may have meshes of their own.
    """
    held = 2 * nodes if is_distributed and config.network.averaging != "ring" else 0
    meshes = [config.node.mesh] if case is None else config.node.meshes(case)
    if any(mesh != ONE_DEVICE for mesh in meshes):
        most = max(MANY_DEVICES if mesh is None else mesh.devices for mesh in meshes)
        held += 2 * nodes * most if None not in meshes else 2 * most
    if held:
        os.environ.setdefault("PJRT_NPROC", str((os.cpu_count() or 1) + held + 1))
