"""Regrouping after a change of hosts: the stages that each host serves, and the plans."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from skippipe_sched.methods.repair import fill_empty_stages, repair_plan
from skippipe_sched.problem.node_addition import NewNode
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement

from skippipe_jax.cluster.inbox import Totals
from skippipe_jax.cluster.membership import Group
from skippipe_jax.config import Config
from skippipe_jax.config.cluster import SKIP, STOP
from skippipe_jax.consensus.generations import ConsensusRules
from skippipe_jax.program.compiler import compile_plans
from skippipe_jax.program.schedule import OWN, Schedule
from skippipe_jax.storage.joined_folder import is_joined
from skippipe_jax.training.elastic.extra_hosts import (
    extend_case,
    host_by_node,
    with_second_hosts,
    with_stages,
)
from skippipe_jax.training.elastic.lost_stages import rebuild_rule
from skippipe_jax.training.setup import HostSetup


def elastic_rules(config: Config, setup: HostSetup) -> ConsensusRules:
    """Return the rules, the same on all hosts, by which consensus decides who can continue."""
    host_of = host_by_node(config, setup.host_of)

    def placed(
        placement: Placement,
        left: frozenset[int],
        diskless: Collection[int],
        left_out: Collection[int],
    ) -> Placement | None:
        kept = {node for node, host in enumerate(host_of) if host in left}
        without_text = kept & lacking_text(placement, diskless)
        if len(kept) < len(placement) - len(left_out) or kept <= without_text:
            return None
        # Lost nodes keep their stages, to which they return.
        placement = with_stages(setup.plan, placement, kept, left_out)
        before = replace(extend_case(setup.plan, kept, {}), stages=placement)
        moved = fill_empty_stages(before, kept, without_text, left_out)
        lost = [[node for node in nodes if node not in kept] for nodes in placement]
        return tuple(tuple(sorted([*own, *gone])) for own, gone in zip(moved, lost, strict=True))

    def lacking_text(placement: Placement, diskless: Collection[int]) -> set[int]:
        # Diskless hosts outside stage 0 may have no text.
        lacking = {*diskless}.difference(host_of[node] for node in placement[0])
        return {node for node, host in enumerate(host_of) if host in lacking}

    def without_text(placement: Placement, hosts: Collection[int]) -> Placement:
        barred = {node for node, host in enumerate(host_of) if host in hosts}
        kept = tuple(node for node in placement[0] if node not in barred)
        return with_stages(setup.plan, (kept, *placement[1:]), placement[0])

    def safest(placement: Placement, hosts: frozenset[int], diskless: Collection[int]) -> Placement:
        without_text = lacking_text(placement, diskless)
        return with_second_hosts(setup.plan.stages, placement, host_of, hosts, without_text)

    def fits(placement: Placement) -> bool:
        nodes = [node for own in placement for node in own]
        own, every = range(len(setup.host_of)), range(len(host_of))
        is_once = len(set(nodes)) == len(nodes) and {*own} <= {*nodes} <= {*every}
        return len(placement) == len(setup.plan.stages) and is_once

    return ConsensusRules(
        host_of=host_of,
        stages=len(setup.plan.stages),
        placed=placed,
        add_up=sum_over_hosts,
        fits=fits,
        safest=safest,
        without_text=without_text,
        rewinds=config.recovery.lost_stage != STOP,
        leaves_out=config.recovery.lost_stage == SKIP,
        remakes=rebuild_rule(config, len(setup.plan.stages)),
        is_diskless=is_joined(Path(config.run_dir)),
    )


def sum_over_hosts(totals: Mapping[int, Totals]) -> Totals:
    """Sum values over hosts, in host order and in float32, so that all get the same bits."""
    arrays = np.array([totals[host] for host in sorted(totals)], np.float32)
    summed: list[float] = np.add.reduce(arrays).tolist()
    return tuple(summed)


def setup_for_group(
    config: Config,
    setup: HostSetup,
    group: Group,
    found: Plan | None = None,
    new: Mapping[int, NewNode] | None = None,
) -> HostSetup:
    """Return the setup of a group after a change of hosts, before it exchanges reports.

    `setup` is that of the whole run, and `found` the plan of the placement if a search has found
    it; otherwise repair plans are made. `new` describes the nodes of extra hosts by their
    measurements. The stage partition stays, so only a host that gets another stage has to compile.
    """
    ranks = {host: rank for rank, host in enumerate(group.hosts)}
    places = host_by_node(config, setup.host_of)
    kept = [node for node, host in enumerate(places) if host in ranks]
    present = set(kept)
    stages = tuple(
        tuple(node for node in nodes if node in present) for nodes in group.generation.placement
    )
    plans = {
        name: repair_plan(
            extend_case(plan, kept, new or {}), kept, stages, group.generation.left_out
        )
        for name, plan in setup.schedule.plans.items()
    }
    if found is not None:
        plans[OWN] = found
    schedule = Schedule(setup.schedule.recipe, plans)
    host_of = tuple(ranks[places[node]] for node in kept)
    programs = compile_plans(plans, host_of, group.index)
    return replace(setup, schedule=schedule, host_of=host_of, programs=programs)
