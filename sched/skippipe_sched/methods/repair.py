"""Repair plan for a run that loses nodes, made at once without a search.

It keeps the stage partition: the number of stages is unchanged and every remaining node stays in
its stage, so no node needs state that it does not hold, and nothing is recompiled. Every microbatch
visits the same stages in the same order; another replica of the stage replaces a lost node on its
path. Stages without nodes may be left out: then paths skip them. It takes milliseconds and does not
load SciPy, which is slow.

A search finds orders in which nodes wait where that is faster, which dispatch never does; so the
plan keeps as much of the previous order as it can.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from skippipe_sched.errors import InputError
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.node_subset import sorted_nodes, with_nodes
from skippipe_sched.problem.plan import NodePath, Operation, Plan, microbatch_chain
from skippipe_sched.problem.rules import fair_shares, share_limits
from skippipe_sched.search.budget import Placement
from skippipe_sched.timing.simulate import forecast, require_memory, simulate

# In the first sweep, the visits of later stages are not dealt yet, and may be on lost nodes.
SWEEPS = 2
# Trades are searched among all pairs, so only among this many visits.
TRADED_AT_ONCE = 256
ROUNDING_S = 1e-9


def repair_plan(
    plan: Plan,
    kept: Collection[int],
    stages: Placement | None = None,
    left_out: Collection[int] = (),
) -> Plan:
    """Make a plan like `plan` on the nodes `kept` only; if they are all of its nodes, return it.

    `kept` may include nodes of the plan's case that are in none of its stages, because they joined
    later. Node k of the new plan is the k-th smallest of `kept`, and its case is the plan's with
    these nodes. `stages` are the kept nodes of each stage, by their old numbers; by default, each
    stays in its stage (`fill_empty_stages` moves some, so that no stage is empty).

    The iteration keeps its microbatches. The remaining data nodes share them evenly, or in
    proportion if the case gave them unequal numbers; replicas of an inner stage that has lost one
    share its visits by TC1. Stages without losses stay as they are. So such a plan always exists,
    however small the memories are, and it keeps every rule that `plan` keeps. Visits of lost nodes
    are dealt out so that trips are short; other visits of that stage trade their replicas only if
    that shortens the iteration. The order is the simulator's dispatch, or the rest of the plan's
    own order if that is faster. There is no time for a lower bound: `lower_bound_s` is None.

    Raises:
        InputError: if a stage has no node left, `stages` do not fit `kept` and the plan, or the
            plan's own order cannot be run.
    """
    nodes = sorted_nodes(plan.case, kept)
    stages = kept_stages(plan, nodes) if stages is None else tuple(map(tuple, stages))
    _require_placement(plan, nodes, stages, left_out)
    if stages == plan.stages:
        return plan
    plan = _without_stages(plan, left_out) if left_out else plan
    targets = {
        stage: _targets(plan, stage, replicas)
        for stage, replicas in enumerate(stages)
        if set(replicas) != set(plan.stages[stage]) and stage not in left_out
    }
    number = {node: new for new, node in enumerate(nodes)}
    placed = tuple(tuple(number[node] for node in replicas) for replicas in stages)
    sent = targets.get(0) or Counter(path[0] for path in plan.microbatches)
    # In a case every data node sends microbatches; in a plan made by hand it may send none.
    microbatches = [max(1, sent[node]) for node in stages[0]]
    case = with_nodes(plan.case, nodes, [len(replicas) for replicas in stages], microbatches)
    once_s = start_times(plan)
    options = []
    for all_visits in (False, True):
        dealt = _dealt(plan, targets, all_visits=all_visits)
        paths = tuple(tuple(number[node] for node in path) for path in dealt)
        options.append((forecast(case, placed, paths), paths))
        order = order_by_start_times(once_s, case, paths)
        if order is not None:
            options.append((forecast(case, placed, paths, order), paths))
    timeline, paths = min(options, key=lambda one: (one[0].iteration_s, one[0].pipeline_s))
    before = {node for replicas in plan.stages for node in replicas}
    lost, new = len(before - set(nodes)), len(set(nodes) - before)
    method = plan.method
    method += f", nodes lost: {lost}" if lost or not new else ""
    method += f", nodes added: {new}" if new else ""
    return Plan(method, placed, paths, timeline.order, timeline.predicted(None), case)


def kept_stages(plan: Plan, kept: Collection[int]) -> Placement:
    """Return the nodes `kept` of each stage of a plan, perhaps none.

    Raises:
        InputError: if one of `kept` is not a node of the plan.
    """
    nodes = sorted_nodes(plan.case, kept)
    return tuple(tuple(node for node in stage if node in nodes) for stage in plan.stages)


def _without_stages(plan: Plan, left_out: Collection[int]) -> Plan:
    """Return the plan whose paths and orders omit the nodes of these stages."""
    skipped = {node for stage in left_out for node in plan.stages[stage]}
    paths = tuple(tuple(node for node in path if node not in skipped) for path in plan.microbatches)
    order = tuple(() if node in skipped else own for node, own in enumerate(plan.order))
    return replace(plan, microbatches=paths, order=order)


def _require_placement(
    plan: Plan, nodes: Sequence[int], stages: Placement, left_out: Collection[int]
) -> None:
    placed = sorted(node for replicas in stages for node in replicas)
    if len(stages) != len(plan.stages) or placed != list(nodes):
        raise InputError(
            "stages",
            [list(replicas) for replicas in stages],
            f"must be {len(plan.stages)} stages that list each of the nodes {list(nodes)} once",
            "List each node in one stage",
        )
    for stage, replicas in enumerate(stages):
        if not replicas and (stage == 0 or stage not in left_out):
            problem = f"has no node; in the previous plan it has {list(plan.stages[stage])}"
            remedy = "Move a node of another stage to it, or restart one of its nodes"
            raise InputError(f"stages[{stage}]", list(replicas), problem, remedy)


def _targets(plan: Plan, stage: int, replicas: Sequence[int]) -> dict[int, int]:
    """Distribute the visits of a stage over these replicas."""
    now = Counter(
        node for path in plan.microbatches for node in path if plan.stage_of[node] == stage
    )
    visits = now.total()
    if stage == 0:
        return _distributed_as_before(plan.case, {node: now[node] for node in replicas}, visits)
    # TC1. Where shares are not integers, nodes that have more already keep them.
    of_stage = plan.case, stage, replicas, visits
    shares = dict(zip(replicas, fair_shares(*of_stage), strict=True))
    low, high = (dict(zip(replicas, own, strict=True)) for own in share_limits(*of_stage))
    targets = {node: min(max(now[node], low[node]), high[node]) for node in replicas}

    def deficit(node: int) -> tuple[float, int]:
        return shares[node] - targets[node], plan.case.nodes[node].memory

    while sum(targets.values()) < visits:
        targets[max((node for node in replicas if targets[node] < high[node]), key=deficit)] += 1
    while sum(targets.values()) > visits:
        targets[min((node for node in replicas if targets[node] > low[node]), key=deficit)] -= 1
    return targets


def _distributed_as_before(
    case: Case, sent: Mapping[int, int], microbatches: int
) -> dict[int, int]:
    """Distribute microbatches over the data nodes, given the numbers that they `sent` before.

    The shares are even if they were so before, and otherwise in proportion (D'Hondt's method, by
    which no node gets less than before). A node that sent none counts like the others' mean.
    """
    known = [count for count in sent.values() if count]
    even = not known or max(known) - min(known) <= 1
    weight = {
        node: 1.0 if even else count or sum(known) / len(known) for node, count in sent.items()
    }
    counts = dict.fromkeys(sent, 0)

    def priority(node: int) -> tuple[bool, float, int, float, int]:
        of_node, would_have = case.nodes[node], (counts[node] + 1) / weight[node]
        return counts[node] > 0, would_have, -sent[node], of_node.forward_s, -of_node.memory

    for _ in range(microbatches):
        counts[min(counts, key=priority)] += 1
    return counts


def _dealt(
    plan: Plan, targets: Mapping[int, Mapping[int, int]], *, all_visits: bool
) -> list[NodePath]:
    """Deal out the paths so that replicas of changed stages have as many visits as in `targets`.

    Only visits that must move do, unless `all_visits` may trade their replicas.
    """
    round_trip_s = plan.case.round_trip_s
    paths = [list(path) for path in plan.microbatches]
    visitors: dict[int, list[tuple[list[int], int]]] = {stage: [] for stage in targets}
    for path in paths:
        for position, node in enumerate(path):
            if plan.stage_of[node] in targets:
                visitors[plan.stage_of[node]].append((path, position))
    moving = {stage: _moving(visits, targets[stage]) for stage, visits in visitors.items()}
    for _, stage in product(range(SWEEPS), targets):
        visits, nodes = visitors[stage], list(targets[stage])
        if not visits:
            continue
        current = [path[position] for path, position in visits]
        before = [path[position - 1] for path, position in visits]
        after = [path[(position + 1) % len(path)] for path, position in visits]
        cost_s = round_trip_s[np.ix_(before, nodes)] + round_trip_s.T[np.ix_(after, nodes)]
        assigned = np.array([nodes.index(node) if node in nodes else -1 for node in current])
        assigned[moving[stage]] = -1
        free = np.array([targets[stage][node] for node in nodes])
        free -= np.bincount(assigned[assigned >= 0], minlength=len(nodes))
        for visit in moving[stage]:
            assigned[visit] = np.argmin(np.where(free > 0, cost_s[visit], np.inf))
            free[assigned[visit]] -= 1
        traders = np.arange(len(visits)) if all_visits else np.array(moving[stage], dtype=int)
        for start in range(0, len(traders), TRADED_AT_ONCE):
            _trade(cost_s, assigned, traders[start : start + TRADED_AT_ONCE])
        for (path, position), chosen in zip(visits, assigned.tolist(), strict=True):
            path[position] = nodes[chosen]
    return [tuple(path) for path in paths]


def _moving(visits: Sequence[tuple[list[int], int]], targets: Mapping[int, int]) -> list[int]:
    """List the visits of a stage that must move: those of lost nodes and those above targets."""
    remaining = dict(targets)
    moving = []
    for index, (path, position) in enumerate(visits):
        node = path[position]
        if remaining.get(node, 0) > 0:
            remaining[node] -= 1
        else:
            moving.append(index)
    return moving


def _trade(cost_s: np.ndarray, assigned: np.ndarray, traders: np.ndarray) -> None:
    """Let pairs of the `traders` trade places as long as that makes their trips shorter."""
    cost_s = cost_s[traders]
    while len(traders):
        now = assigned[traders]
        current_s = cost_s[np.arange(len(traders)), now]
        swapped_s = cost_s[:, now]
        saved_s = current_s[:, None] + current_s - swapped_s - swapped_s.T
        first, second = np.unravel_index(np.argmax(saved_s), saved_s.shape)
        if saved_s[first, second] <= ROUNDING_S:
            return
        assigned[traders[[first, second]]] = now[[second, first]]


NodeOrders = tuple[tuple[Operation, ...], ...]


def start_times(plan: Plan) -> list[list[float]]:
    """Return the start of each operation of each microbatch's chain in a single iteration [s].

    Raises:
        InputError: if the plan's own order cannot be run.
    """
    require_memory(plan)
    alone = simulate(plan.case, plan.stages, plan.microbatches, plan.order)
    start_s = {run.operation: run.start_s for run in alone.runs}
    return [
        [start_s[operation] for operation in microbatch_chain(microbatch, path)]
        for microbatch, path in enumerate(plan.microbatches)
    ]


def order_by_start_times(
    start_s: Sequence[Sequence[float]], case: Case, paths: Sequence[NodePath]
) -> NodeOrders | None:
    """Order the operations of each node by their earlier start times, with delays as necessary.

    `start_s` are the start times of a plan whose paths visit the same stages (`start_times`);
    `paths` are the new ones, on the nodes of `case`. Operations are processed by time. A forward on
    a node whose memory is full waits until a backward ends there, which delays the rest of its
    microbatch equally. That may deadlock where paths swap: None then.
    """
    chains = [microbatch_chain(microbatch, path) for microbatch, path in enumerate(paths)]
    order: list[list[Operation]] = [[] for _ in case.nodes]
    free_slots = [node.memory for node in case.nodes]
    waiting: list[list[tuple[float, int]]] = [[] for _ in case.nodes]
    position = [0] * len(chains)
    late_s = [0.0] * len(chains)
    coming = [(times[0], microbatch) for microbatch, times in enumerate(start_s)]
    heapq.heapify(coming)
    now_s = 0.0
    while coming:
        due_s, microbatch = heapq.heappop(coming)
        now_s = max(now_s, due_s)
        operation = chains[microbatch][position[microbatch]]
        node = operation.node
        if operation.kind == "F":
            if free_slots[node] == 0:
                heapq.heappush(waiting[node], (due_s, microbatch))
                continue
            free_slots[node] -= 1
        late_s[microbatch] += now_s - due_s
        order[node].append(operation)
        if operation.kind == "B":
            free_slots[node] += 1
            if waiting[node]:
                heapq.heappush(coming, heapq.heappop(waiting[node]))
        position[microbatch] += 1
        if position[microbatch] < len(chains[microbatch]):
            due_s = start_s[microbatch][position[microbatch]] + late_s[microbatch]
            heapq.heappush(coming, (due_s, microbatch))
    locked = any(waiting)
    return None if locked else tuple(map(tuple, order))


def fill_empty_stages(
    plan: Plan,
    kept: Collection[int],
    without_text: Collection[int] = (),
    left_out: Collection[int] = (),
) -> Placement:
    """Return the nodes `kept` of each stage, after moving one to each stage that has none left.

    The number of moves is minimal. Each moved node is from the stage that then has most nodes, and
    among equal ones from an inner stage, as data nodes need the run's text. Within that stage it is
    the node that serves a stage alone best: the fastest, then the one with most memory, then the
    nearest to all others. No node `without_text` is moved to the data stage, and none to stages
    that stay `left_out`. Nodes have their numbers in `plan`; `repair_plan` makes the plan of the
    placement.

    Raises:
        InputError: if there are fewer nodes than stages, or none that could become a data node.
    """
    stages = [list(nodes) for nodes in kept_stages(plan, kept)]
    nodes = [node for replicas in stages for node in replicas]
    needed = len(stages) - len(left_out)
    if len(nodes) < needed:
        raise InputError(
            "nodes",
            sorted(nodes),
            f"only {len(nodes)} nodes remain, and each of the {needed} stages needs one",
            f"Restart {needed - len(nodes)} of the failed nodes, or make a new plan with "
            "fewer stages",
        )
    case = plan.case
    round_trip_s = case.round_trip_s

    def alone(node: int) -> tuple[float, int, float]:
        far_s = float((round_trip_s[node, nodes] + round_trip_s[nodes, node]).sum())
        return case.nodes[node].forward_s, -case.nodes[node].memory, far_s

    for place, replicas in enumerate(stages):
        if not replicas and place not in left_out:
            excluded = set(without_text) if place == 0 else set[int]()
            candidates = [own for own in range(len(stages)) if set(stages[own]) - excluded]
            source_stage = max(
                candidates, key=lambda stage: (len(stages[stage]), stage > 0, -stage), default=None
            )
            if source_stage is None:
                problem = "none of the remaining nodes has the text that the data stage reads"
                remedy = "Restart one of the failed data nodes"
                raise InputError("nodes", sorted(nodes), problem, remedy)
            moved = min((node for node in stages[source_stage] if node not in excluded), key=alone)
            stages[source_stage].remove(moved)
            replicas.append(moved)
    return tuple(map(tuple, stages))
