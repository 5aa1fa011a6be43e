"""A time that no plan of a case can beat, reckoned at once and without SciPy.

`bound.lower_bound_s` is the greater one mostly. This one is for plans that cannot wait for it.
"""

from __future__ import annotations

import numpy as np

from skippipe_sched.problem.case import Case
from skippipe_sched.timing.averaging import (
    all_reduce_bytes,
    least_averaged_s,
    rings_of_iteration,
)
from skippipe_sched.timing.one_node import NodeWork, busy_apart_s


def quick_lower_bound_s(case: Case, path_length: int) -> float:
    """A bound [s] below `iteration_s` of every plan whose paths visit `path_length` stages or more.

    It holds for any placement, any paths, whichever rules they keep, as long as each data node
    sends as many microbatches as the case says, any order and either contention. No pipeline ends
    sooner than

    - the data node with most microbatches can do its work (`busy_apart_s`), the inner stages being
      the cheapest ones, each on the fastest node, all hops the quickest of the case;
    - all nodes together can do all the work.

    Then the data stage averages, over no slower links than the quickest of the case. In mode
    `outer` it does so behind the iterations that follow, as far as `least_averaged_s` does not say
    otherwise, and this is below their mean.
    """
    rings = rings_of_iteration(case.averaging)
    forward_s = [node.forward_s for node in case.nodes]
    inner_costs = sorted(case.stage_cost[1:])[: path_length - 1]
    inner_s = min(forward_s) * sum(inner_costs)
    forward_hops_s = backward_hops_s = 0.0
    ring_s = 0.0
    if len(case.nodes) > 1:
        apart = ~np.eye(len(case.nodes), dtype=bool)
        latency, bandwidth = (matrix[apart] for matrix in case.link_matrices)
        hops = path_length if path_length > 1 else 0
        forward_hops_s = float(case.forward_hop_s[apart].min()) * hops
        backward_hops_s = float(case.backward_hop_s[apart].min()) * hops
        steps = 2 * (case.stages[0] - 1)
        size = all_reduce_bytes(case.averaging, case.stage_bytes[0], case.stages[0])
        ring_s = steps / case.stages[0] * size / bandwidth.max()
        ring_s += steps * latency.min()
        ring_s *= rings.of_all_reduce
    most = max(case.microbatches)
    data_cost, loss_ratio, ratio = case.stage_cost[0], case.loss_ratio, case.backward_ratio
    works = {
        NodeWork(
            most, min(node.memory, most), node.forward_s * data_cost, inner_s + forward_hops_s,
            node.forward_s * data_cost * loss_ratio, inner_s * ratio + backward_hops_s,
            node.forward_s * data_cost * ratio,
        )
        for node in case.nodes
    }  # fmt: skip
    busiest_s = min(busy_apart_s(work) for work in works)
    work = (1 + loss_ratio + ratio) * data_cost + (1 + ratio) * sum(inner_costs)
    together_s = sum(case.microbatches) * work / sum(1 / seconds for seconds in forward_s)
    work_s = max(busiest_s, together_s)
    least_s = 0.0 if case.averaging.is_outer else work_s
    return float(least_averaged_s(rings, work_s, float(ring_s), least_s))
