"""Decides whether an extra host is worth admitting.

While the state of its stage is transferred, all hosts wait; then iterations may be shorter. It is
admitted if that saves more time within `join.horizon` than it costs, or if a single host serves
one of its stages now, with which that stage would be lost. The place of a lost host is always worth
taking, as the run's own plan counts on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from skippipe_sched.methods.without_nodes import plan_without
from skippipe_sched.problem.more_nodes import NewNode
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement
from skippipe_sched.timing.simulate import simulate_plan

from skippipe_jax.connections.ways import Way
from skippipe_jax.training.elastic.places import with_places, with_stages


@dataclass(frozen=True)
class Admission:
    """What it costs that a host comes, and what it saves.

    Attributes:
        transfer_s: seconds for which the others wait; infinite where no host could be reached that
            has the state.
        saved: by which share iterations are shorter.
        is_spare: whether each of its stages is on several hosts already.
    """

    transfer_s: float
    saved: float
    is_spare: bool

    def pays(self, horizon_s: float, *, anyway: bool = False) -> bool:
        """Tell whether the host is to come; `anyway`, it is if a host with the state is reached."""
        is_asked = self.is_spare and not anyway
        return self.transfer_s < (self.saved * horizon_s if is_asked else math.inf)

    def why(self, horizon_s: float) -> str:
        """Explain why a host is not to come."""
        if math.isinf(self.transfer_s):
            return "this host has reached none of those that have the state of its stage"
        return (
            f"it does not pay to join: the others would wait for {self.transfer_s:.3g} s, and "
            f"iterations that are {self.saved:.2%} shorter save "
            f"{self.saved * horizon_s:.3g} s in join.horizon = {horizon_s:g} s (join --anyway "
            "comes all the same)"
        )


def admission(
    plan: Plan,
    host_of: Sequence[int],
    host: int,
    members: Collection[int],
    placement: Placement,
    new: Mapping[int, NewNode],
    ways: Mapping[int, Way],
    sizes: Sequence[float],
) -> Admission:
    """Estimate what it brings if a host joins the members, under their placement.

    `plan` is the run's own, `host_of` the host of each node, those of spare places among them, and
    `new` are nodes of these. `ways` lead to other hosts, and `sizes` are the bytes of the states of
    stages. Hosts to which no way was measured give nothing.
    """
    now = {node for node, own in enumerate(host_of) if own in members}
    then = now | {node for node, own in enumerate(host_of) if own == host}
    left_out = [stage for stage, own in enumerate(placement) if now.isdisjoint(own)]
    following = with_stages(plan, placement, then, left_out)

    def iteration_s(nodes: Collection[int], stages: Placement) -> float:
        there = tuple(tuple(node for node in own if node in nodes) for own in stages)
        # Who has made a plan by hand need not have predicted anything.
        quick = plan_without(with_places(plan, nodes, new), nodes, there, left_out)
        return simulate_plan(quick).iteration_s

    served = [
        stage for stage, own in enumerate(following) if any(host_of[node] == host for node in own)
    ]
    giving = {
        stage: {host_of[node] for node in placement[stage] if node in now} for stage in served
    }
    lost_s = sum(
        min(
            (way.latency_s + sizes[stage] / way.back for h, way in ways.items() if h in own),
            default=math.inf,
        )
        for stage, own in giving.items()
    )
    saved = 1.0 - iteration_s(then, following) / iteration_s(now, placement)
    return Admission(lost_s, max(0.0, saved), all(len(own) > 1 for own in giving.values()))
