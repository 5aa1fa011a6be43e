"""The places of a run: those of the hosts that it begins with, and spare ones for hosts that come.

Every count of hosts includes the spare places: numbers of hosts, ports, and the hosts that
consensus may name. The first generation has only the hosts of the start, so a spare place is like
that of a lost host, except that nobody waits for it.

Each spare place has one node, numbered after those of the run's own plan and in no stage until its
host joins. The host that proposes the generation with it assigns the stage. There the node stays,
like all others, unless a better plan is found that has it elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from skippipe_sched.problem.more_nodes import NewNode, with_more_nodes
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement

from skippipe_jax.config import Config
from skippipe_jax.consensus.generations import Generation, Rules
from skippipe_jax.consensus.holders import covering


def host_of_places(config: Config, host_of: Sequence[int]) -> tuple[int, ...]:
    """Map each node of the run's own plan, and then each spare place, to its host."""
    hosts = max(host_of) + 1
    return (*host_of, *range(hosts, hosts + config.cluster.with_ports(hosts, config.join.places)))


def with_places(plan: Plan, nodes: Collection[int], new: Mapping[int, NewNode]) -> Plan:
    """Extend a plan to a case that has all of `nodes`, also those that are new.

    What is known of some of these is in `new`, by their numbers. They are in no stage of the plan.
    """
    own = len(plan.case.nodes)
    come = range(own, max(nodes) + 1)
    if not come:
        return plan
    nodes_to_come = [new.get(node, NewNode(f"place {node}")) for node in come]
    return replace(plan, case=with_more_nodes(plan.case, nodes_to_come))


def with_stages(
    plan: Plan, placement: Placement, nodes: Collection[int], left_out: Collection[int] = ()
) -> Placement:
    """Extend the placement so that each of `nodes` serves a stage.

    Each goes where a replica of those there are has most to compute, but not to the data stage if
    there is another: it may lack the text. None goes to stages that are `left_out`. `plan` is the
    run's own.
    """
    work = Counter(plan.stage_of[node] for path in plan.microbatches for node in path)
    stages = [[*own] for own in placement]
    choices = [stage for stage in range(1, len(stages)) if stage not in left_out] or [0]

    def load(stage: int) -> float:
        replicas = len(set(nodes).intersection(stages[stage]))
        return plan.case.stage_cost[stage] * work[stage] / replicas if replicas else float("inf")

    for node in sorted(set(nodes).difference(*placement)):
        stages[max(choices, key=load)].append(node)
    return tuple(map(tuple, stages))


def secured(
    own: Placement,
    placement: Placement,
    host_of: Sequence[int],
    hosts: Collection[int],
    without_text: Collection[int] = (),
) -> Placement:
    """Give each stage that a single host serves a second one, if it had more at first.

    Whoever stands in for a lost stage stays there when its hosts are back, and what it has left may
    be served by a single host, with which it would be lost. So a node goes to such a stage, if by
    the run's `own` placement more hosts serve it, from one that more serve than by that: a node
    that was there before, if there is any. Nodes `without_text` do not go to the data stage.
    """

    def serving(nodes: Collection[int]) -> set[int]:
        return {host_of[node] for node in nodes if host_of[node] in hosts}

    at_first = [len({host_of[node] for node in nodes}) for nodes in own]
    stages = [[*nodes] for nodes in placement]
    for stage, nodes in enumerate(stages):
        here = serving(nodes)
        if len(here) != 1 or at_first[stage] == 1:
            continue
        found = [
            (node not in own[stage], node, giver)
            for giver, theirs in enumerate(stages)
            if len(serving(theirs)) > at_first[giver]
            for node in theirs
            if host_of[node] in {*hosts} - here and not (stage == 0 and node in without_text)
        ]
        if found:
            _, node, giver = min(found)
            stages[giver].remove(node)
            nodes.append(node)
    moved = tuple(tuple(sorted(nodes)) for nodes in stages)
    return placement if moved == tuple(tuple(sorted(nodes)) for nodes in placement) else moved


def stages_for(rules: Rules, generation: Generation, host: int) -> tuple[int, ...]:
    """List the stages that a host at a place would serve, as far as known beforehand."""
    members, apart = frozenset({*generation.members, host}), {*generation.apart, host}
    found = covering(rules, generation.placement, members, apart, generation.left_out)
    placement = generation.placement if found is None else found
    return tuple(sorted(rules.serves(placement, host)))
