"""What may be better than the plan that stands: cases to search, and when a plan is worth taking.

Nodes have the numbers of the plan that stands, unless the run's own are named. No JAX, no search.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.problem.fewer_nodes import with_nodes
from skippipe_sched.problem.plan import Plan
from skippipe_sched.search.budget import Placement
from skippipe_sched.timing.simulate import simulate, simulate_plan

from skippipe_jax.storage.records import StepMetrics


def cases_to_search(standing: Plan, own: Plan) -> list[Case]:
    """Return the case of the present plan, and one with stages as even as in the `own` plan.

    An iteration keeps its number of microbatches.
    """
    case, nodes = standing.case, range(len(standing.case.nodes))
    sizes = _in_proportion(len(nodes), own.case.stages)
    if sizes == list(case.stages):
        return [case]
    share, more = divmod(sum(case.microbatches), sizes[0])
    if share == 0:  # Each data node has to send something.
        return [case]
    microbatches = [share + (place < more) for place in range(sizes[0])]
    return [case, with_nodes(case, nodes, sizes, microbatches)]


def _in_proportion(total: int, sizes: Sequence[int]) -> list[int]:
    """Split a count in proportion to these parts, with no part empty."""
    parts = [1] * len(sizes)
    while sum(parts) < total:
        short = [size * total / sum(sizes) - part for size, part in zip(sizes, parts, strict=True)]
        parts[int(np.argmax(short))] += 1
    return parts


def recalibrated(plan: Plan, busy_s: Sequence[float]) -> Plan:
    """Return the plan with measured node speeds, and what it then predicts.

    `busy_s` is how long each node computes in an iteration.
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
    standing: Plan,
    gain: float,
    iterations: int,
    host_of: Sequence[int],
    state_bytes: Sequence[float],
) -> bool:
    """Tell whether changing to a plan pays off within so many iterations.

    `host_of` is the host of each node, and `state_bytes` is what moves of each stage.
    """
    if len(found.microbatches) != len(standing.microbatches):
        return False  # Of a plan made by hand, whose data nodes need not all send something.
    saved_s = standing.predicted.iteration_s - found.predicted.iteration_s
    if saved_s <= gain * standing.predicted.iteration_s:
        return False
    return saved_s * iterations > migration_seconds(found, standing, host_of, state_bytes)


def keeps_data_hosts(
    found: Plan, standing: Plan, host_of: Sequence[int], apart: Collection[int]
) -> bool:
    """Tell whether a plan gives no data node to a host without the run folder that has none now.

    They may lack the text that data nodes read. `host_of` is the host of each node.
    """
    reading = {host_of[node] for node in standing.stages[0]}
    return {host_of[node] for node in found.stages[0]}.isdisjoint({*apart} - reading)


def migration_seconds(
    found: Plan, standing: Plan, host_of: Sequence[int], state_bytes: Sequence[float]
) -> float:
    """Estimate the seconds until all hosts have the states that a plan asks of them.

    Each takes one stage after another, over the quickest link, and all do so at once.
    """
    latency_s, bandwidth = standing.case.link_matrices
    taking_s = dict.fromkeys(host_of, 0.0)
    for stage, (nodes, before) in enumerate(zip(found.stages, standing.stages, strict=True)):
        holding = {host_of[node] for node in before}
        targets = {host_of[node]: node for node in nodes if host_of[node] not in holding}
        for host, node in targets.items():
            taking_s[host] += min(
                float(latency_s[source, node] + state_bytes[stage] / bandwidth[source, node])
                for source in before
            )
    return max(taking_s.values())


def placement_of(plan: Plan, kept: Sequence[int], last: Placement) -> Placement:
    """Return the placement of a plan, by the run's own numbers.

    Node k of the plan is `kept[k]` of the run; nodes that are not there stay where they were.
    """
    absent = {node for nodes in last for node in nodes} - set(kept)
    return tuple(
        tuple(sorted([*(kept[node] for node in nodes), *absent.intersection(before)]))
        for nodes, before in zip(plan.stages, last, strict=True)
    )


def has_drifted(seconds: Sequence[float], predicted_s: float, drift: float) -> bool:
    """Tell whether the median iteration differs from the prediction by more than a share."""
    return abs(float(np.median(seconds)) - predicted_s) > drift * predicted_s > 0.0


def busy_seconds(lines: Sequence[StepMetrics]) -> list[float] | None:
    """Return the median seconds that each node computes in an iteration, if the metrics tell."""
    shares = [line.idle_share for line in lines]
    if any(share is None for share in shares):
        return None
    seconds = np.array([line.seconds_per_iteration for line in lines], float)
    busy_s = (1.0 - np.array(shares, float)) * seconds[:, None]
    return np.median(busy_s, axis=0).tolist()
