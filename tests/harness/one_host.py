"""The runtime of a plan in this process alone, its nodes over some of the devices."""

from __future__ import annotations

from skippipe_sched.problem.plan import Plan

from skippipe_jax.cluster.membership import Group, Membership
from skippipe_jax.config import Config
from skippipe_jax.program.compiler import compile_plan
from skippipe_jax.program.schedule import OWN, Schedule
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.runtime.topology import Topology


def open_alone(
    config: Config,
    plan: Plan,
    devices: int,
    *,
    host_of: tuple[int, ...] | None = None,
    group: Group | None = None,
) -> Runtime:
    """A runtime whose nodes lie in turn over so many devices.

    With `host_of` it is that of host 0, which must need nothing from the others, in a `group`.
    """
    host_of = host_of or (0,) * len(plan.case.nodes)
    program, *_ = compile_plan(plan, host_of)
    kinds = [["cpu"] * devices] * (max(host_of) + 1)
    topology = Topology.of(config, plan, 0, host_of, kinds)
    schedule, group = (
        Schedule(config.recipe, {OWN: plan}),
        group or Membership(config.cluster, 0, 1),
    )
    return Runtime(config, schedule, {OWN: program}, topology, {}, group)
