"""Candidates to replace the current plan: cases to search, and when a found plan pays off.

Nodes have the numbers of the current plan unless stated otherwise. Imports no JAX and no search.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.problem.node_subset import with_nodes
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement
from skippipe_sched.timing.simulate import simulate, simulate_plan

from skippipe_jax.storage.records import StepMetrics


def cases_to_search(current: Plan, own: Plan) -> list[Case]:
    """Return the case of the current plan, and one with stage sizes in proportion to `own`.

    An iteration keeps its number of microbatches.
    """
    case, nodes = current.case, range(len(current.case.nodes))
    sizes = _in_proportion(len(nodes), own.case.stages)
    if sizes == list(case.stages):
        return [case]
    share, more = divmod(sum(case.microbatches), sizes[0])
    if share == 0:  # Each data node must have a microbatch.
        return [case]
    microbatches = [share + (index < more) for index in range(sizes[0])]
    return [case, with_nodes(case, nodes, sizes, microbatches)]


def _in_proportion(total: int, sizes: Sequence[int]) -> list[int]:
    """Split `total` in proportion to `sizes`, with no part empty."""
    parts = [1] * len(sizes)
    while sum(parts) < total:
        short = [size * total / sum(sizes) - part for size, part in zip(sizes, parts, strict=True)]
        parts[int(np.argmax(short))] += 1
    return parts


def recalibrated(plan: Plan, busy_s: Sequence[float]) -> Plan:
    """Return the plan with measured node speeds and an updated prediction.

    `busy_s` is the seconds that each node computes in an iteration.
    """
    case, timeline = plan.case, simulate_plan(plan)
    every = range(len(case.nodes))
    source = dict(with_nodes(case, every, case.stages, case.microbatches).source)
    source["nodes"] = [
        node | {"forward_s": node["forward_s"] * (measured / planned if planned else 1.0)}
        for node, measured, planned in zip(source["nodes"], busy_s, timeline.busy_s, strict=True)
    ]
    case = parse_case(source)
    timeline = simulate(case, plan.stages, plan.microbatches, plan.order)
    predicted = replace(
        plan.predicted,
        iteration_s=timeline.iteration_s,
        pipeline_s=timeline.pipeline_s,
        averaging_s=timeline.averaging_s,
    )
    return replace(plan, case=case, predicted=predicted)


def pays_off(
    found: Plan,
    current: Plan,
    gain: float,
    iterations: int,
    host_of: Sequence[int],
    state_bytes: Sequence[float],
) -> bool:
    """Return whether changing to the plan `found` pays off within `iterations` iterations.

    Each iteration must also get shorter by more than the fraction `gain`. `host_of` is the host of
    each node, and `state_bytes` the bytes of each stage's state.
    """
    if len(found.microbatches) != len(current.microbatches):
        return False  # `standing` was made by hand; data nodes may be unused.
    saved_s = current.predicted.iteration_s - found.predicted.iteration_s
    if saved_s <= gain * current.predicted.iteration_s:
        return False
    return saved_s * iterations > migration_seconds(found, current, host_of, state_bytes)


def keeps_data_hosts(
    found: Plan, current: Plan, host_of: Sequence[int], diskless: Collection[int]
) -> bool:
    """Return whether no diskless host (`diskless`) gets its first data node by a plan.

    Such hosts may lack the text that data nodes read. `host_of` is the host of each node.
    """
    reading = {host_of[node] for node in current.stages[0]}
    return {host_of[node] for node in found.stages[0]}.isdisjoint({*diskless} - reading)


def migration_seconds(
    found: Plan, current: Plan, host_of: Sequence[int], state_bytes: Sequence[float]
) -> float:
    """Estimate the seconds until all hosts have the states that a plan requires.

    Each host fetches its stages one by one over the fastest link; all hosts fetch in parallel.
    """
    latency_s, bandwidth = current.case.link_matrices
    taking_s = dict.fromkeys(host_of, 0.0)
    for stage, (nodes, before) in enumerate(zip(found.stages, current.stages, strict=True)):
        holding = {host_of[node] for node in before}
        targets = {host_of[node]: node for node in nodes if host_of[node] not in holding}
        for host, node in targets.items():
            taking_s[host] += min(
                float(latency_s[source, node] + state_bytes[stage] / bandwidth[source, node])
                for source in before
            )
    return max(taking_s.values())


def placement_of(plan: Plan, kept: Sequence[int], last: Placement) -> Placement:
    """Return the placement of a plan, by the node numbers of the run's own plan.

    Node k of the plan is `kept[k]` of the run; absent nodes stay at their stage in `last`.
    """
    absent = {node for nodes in last for node in nodes} - set(kept)
    return tuple(
        tuple(sorted([*(kept[node] for node in nodes), *absent.intersection(before)]))
        for nodes, before in zip(plan.stages, last, strict=True)
    )


def has_drifted(seconds: Sequence[float], predicted_s: float, drift: float) -> bool:
    """Return whether the median iteration deviates from the prediction by more than `drift`."""
    return abs(float(np.median(seconds)) - predicted_s) > drift * predicted_s > 0.0


def busy_seconds(lines: Sequence[StepMetrics]) -> list[float] | None:
    """Return the median seconds that each node computes in an iteration; None if not measured."""
    shares = [line.idle_share for line in lines]
    if any(share is None for share in shares):
        return None
    seconds = np.array([line.seconds_per_iteration for line in lines], float)
    busy_s = (1.0 - np.array(shares, float)) * seconds[:, None]
    return np.median(busy_s, axis=0).tolist()
