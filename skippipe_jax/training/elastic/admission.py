"""Admission of extra hosts: whether a host that wants to join pays off.

All hosts wait while the state of its stages is transferred; then iterations may be shorter. The
host is admitted if that saves more time within `join.horizon` than it costs, or if one of its
stages has a single host now, with which the stage would be lost. The place of a lost host is always
filled, as the run's own plan counts on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from skippipe_sched.methods.repair import repair_plan
from skippipe_sched.problem.node_addition import NewNode
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement
from skippipe_sched.timing.simulate import simulate_plan

from skippipe_jax.connections.link_probe import MeasuredLink
from skippipe_jax.training.elastic.extra_hosts import extend_case, with_stages


@dataclass(frozen=True)
class Admission:
    """Cost and benefit of admitting a host.

    Attributes:
        transfer_s: seconds that the others wait for the state transfer; infinite if no host with
            the state could be reached.
        saved: fraction by which iterations get shorter.
        is_spare: whether each of its stages is already on several hosts.
    """

    transfer_s: float
    saved: float
    is_spare: bool

    def pays(self, horizon_s: float, *, anyway: bool = False) -> bool:
        """Return whether to admit the host; `anyway` only requires that its state is reachable."""
        must_save = self.is_spare and not anyway
        return self.transfer_s < (self.saved * horizon_s if must_save else math.inf)

    def decline_reason(self, horizon_s: float) -> str:
        """Explain why a host is not admitted."""
        if math.isinf(self.transfer_s):
            return "this host could not reach a host with the state of its stage"
        return (
            f"join declined: the state transfer stalls the run {self.transfer_s:.3g} s, faster "
            f"steps ({self.saved:.2%}) save {self.saved * horizon_s:.3g} s within join.horizon = "
            f"{horizon_s:g} s (join --anyway overrides this)"
        )


def admission(
    plan: Plan,
    host_of: Sequence[int],
    host: int,
    members: Collection[int],
    placement: Placement,
    new: Mapping[int, NewNode],
    ways: Mapping[int, MeasuredLink],
    sizes: Sequence[float],
) -> Admission:
    """Estimate cost and benefit if a host joins the members, under their placement.

    `plan` is the run's own, `host_of` the host of each node including spare places, and `new` the
    measured nodes of spare places. `ways` are the measured links to other hosts, and `sizes` the
    bytes of the states of stages. State is only transferred from hosts with a measured link.
    """
    now = {node for node, own in enumerate(host_of) if own in members}
    then = now | {node for node, own in enumerate(host_of) if own == host}
    left_out = [stage for stage, own in enumerate(placement) if now.isdisjoint(own)]
    following = with_stages(plan, placement, then, left_out)

    def iteration_s(nodes: Collection[int], stages: Placement) -> float:
        present = tuple(tuple(node for node in own if node in nodes) for own in stages)
        # A plan made by hand may have no prediction, so both are simulated.
        repaired = repair_plan(extend_case(plan, nodes, new), nodes, present, left_out)
        return simulate_plan(repaired).iteration_s

    served = [
        stage for stage, own in enumerate(following) if any(host_of[node] == host for node in own)
    ]
    owners = {
        stage: {host_of[node] for node in placement[stage] if node in now} for stage in served
    }
    transfer_s = sum(
        min(
            (way.latency_s + sizes[stage] / way.back for h, way in ways.items() if h in own),
            default=math.inf,
        )
        for stage, own in owners.items()
    )
    saved = 1.0 - iteration_s(then, following) / iteration_s(now, placement)
    return Admission(transfer_s, max(0.0, saved), all(len(own) > 1 for own in owners.values()))
