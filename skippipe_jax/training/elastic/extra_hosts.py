"""Places of a run: those of its original hosts, and extra ones for joiners.

Every count of hosts includes the extra places: host numbers, ports, and the hosts that consensus
may name. The first generation has only the original hosts, so an extra place is like that of a lost
host, except that no host waits for it.

Each extra place has one node, numbered after those of the run's own plan and without a stage until
its host joins. The host that proposes the generation with it assigns the stage. The node stays
there, like all others, unless a better plan moves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from skippipe_sched.problem.node_addition import NewNode, with_more_nodes
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement

from skippipe_jax.config import Config
from skippipe_jax.consensus.generations import ConsensusRules, Generation
from skippipe_jax.consensus.next_generation import covering


def host_by_node(config: Config, host_of: Sequence[int]) -> tuple[int, ...]:
    """Map each node of the run's own plan, and then each extra place, to its host."""
    hosts = max(host_of) + 1
    return (*host_of, *range(hosts, hosts + config.cluster.with_ports(hosts, config.join.places)))


def extend_case(plan: Plan, nodes: Collection[int], new: Mapping[int, NewNode]) -> Plan:
    """Extend the case of a plan to all of `nodes`, including extra nodes.

    `new` describes the extra nodes with measurements, by number. They are in no stage of the plan.
    """
    own = len(plan.case.nodes)
    extra = range(own, max(nodes) + 1)
    if not extra:
        return plan
    extra_nodes = [new.get(node, NewNode(f"place {node}")) for node in extra]
    return replace(plan, case=with_more_nodes(plan.case, extra_nodes))


def with_stages(
    plan: Plan, placement: Placement, nodes: Collection[int], left_out: Collection[int] = ()
) -> Placement:
    """Extend the placement so that each of `nodes` serves a stage.

    Each node is added to the stage with the most work per replica, but not to the data stage if
    there is another, as it may lack the text, nor to stages that are `left_out`. `plan` is the
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


def with_second_hosts(
    own: Placement,
    placement: Placement,
    host_of: Sequence[int],
    hosts: Collection[int],
    without_text: Collection[int] = (),
) -> Placement:
    """Give each stage with a single host a second one, if it had more in the `own` placement.

    A node that replaced lost hosts of a stage stays there when they are back, and the stage that it
    left may have a single host, with which it would be lost. Such a stage gets a node from a stage
    that has more hosts than in the run's `own` placement, preferably one of its original nodes.
    Nodes `without_text` do not go to the data stage.
    """

    def serving(nodes: Collection[int]) -> set[int]:
        return {host_of[node] for node in nodes if host_of[node] in hosts}

    at_first = [len({host_of[node] for node in nodes}) for nodes in own]
    stages = [[*nodes] for nodes in placement]
    for stage, nodes in enumerate(stages):
        serving_hosts = serving(nodes)
        if len(serving_hosts) != 1 or at_first[stage] == 1:
            continue
        candidates = [
            (node not in own[stage], node, giver)
            for giver, theirs in enumerate(stages)
            if len(serving(theirs)) > at_first[giver]
            for node in theirs
            if host_of[node] in {*hosts} - serving_hosts
            and not (stage == 0 and node in without_text)
        ]
        if candidates:
            _, node, giver = min(candidates)
            stages[giver].remove(node)
            nodes.append(node)
    moved = tuple(tuple(sorted(nodes)) for nodes in stages)
    return placement if moved == tuple(tuple(sorted(nodes)) for nodes in placement) else moved


def stages_for(rules: ConsensusRules, generation: Generation, host: int) -> tuple[int, ...]:
    """List the stages that a host would serve if it joined, as far as can be predicted."""
    members, diskless = frozenset({*generation.members, host}), {*generation.diskless, host}
    covered = covering(rules, generation.placement, members, diskless, generation.left_out)
    placement = generation.placement if covered is None else covered
    return tuple(sorted(rules.serves(placement, host)))
