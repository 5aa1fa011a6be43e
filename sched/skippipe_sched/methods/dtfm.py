"""DT-FM's placement: a genetic search over partitions of the nodes into stages.

Yuan et al. 2022 (arXiv 2206.01288): the cost of a partition is that of its data parallelism (the
averaging of the slowest stage) plus that of its pipeline (activations between the replicas of
consecutive stages, in the best matching, in the cheapest order of the stages). A population of
partitions evolves by crossover, and every child is improved by swapping nodes between stages.

Links depend on the location only, so a partition is scored by the number of nodes of each location
in a stage: the cost of scoring depends on the number of locations and little on the number of
nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from skippipe_sched.problem.case import Case
from skippipe_sched.search.budget import Placement, Search
from skippipe_sched.search.compiled import allocating_kernel, fast
from skippipe_sched.timing.averaging import Rings, added_s, bytes_of_rings, rings_of_iteration

POPULATION = 16
# Swaps tried on every child, for each node of the case.
SWAPS_PER_NODE = 30
# Pairs of locations examined per second, which sets the number of children that a budget pays for.
PAIRS_PER_SECOND = 2e7
# Cost of a child in addition to its swaps, in the same unit.
PAIRS_PER_CHILD = 30_000
# The slowest stage decides the averaging; this weight of the others guides the search.
WEIGHT_OF_MEAN_AVERAGING = 0.1


_NO_SWAPS = np.empty((0, 2), dtype=np.int64)


class _Model(NamedTuple):
    """Arrays of a case for scoring, with links between locations instead of nodes."""

    location: np.ndarray  # of each node
    round_trip_s: np.ndarray  # [location, location] activation there and gradient back
    nearest_pairs: np.ndarray  # [pair, 2] pairs of locations in the order of their round trips
    seconds_per_byte: np.ndarray  # [location, location] mean of both directions
    latency_s: np.ndarray
    speed: np.ndarray  # of each node: forward passes a second
    work: np.ndarray  # of each stage: forward passes equal to the work of its microbatches
    sizes: np.ndarray  # nodes of each stage
    ring_bytes: np.ndarray  # of each stage: of an all-reduce as long as its ring, or twice as long
    rings: Rings
    group: np.ndarray  # stages of one group may trade their places in the pipeline
    rounds: float  # consecutive round trips of a data node


class _Parts(NamedTuple):
    """A partition's score in parts, so that a swap of two nodes changes few of them."""

    counts: np.ndarray  # [stage, location] nodes
    speed: np.ndarray  # of each stage
    averaging_s: np.ndarray  # of each stage
    match_s: np.ndarray  # between each stage and the next


def place(case: Case, search: Search, share: float = 1.0) -> Placement:
    """Return the given placement of `search`, or search for DT-FM's.

    `share` is the part of the budget for the placement; with the same seed, budget and share the
    placement is the same. If the scoring has to be compiled first, the budget counts from after
    that. Nodes of a stage are in ascending order, except that the fastest data nodes get the most
    microbatches.
    """
    if search.placement is not None:
        return search.placement
    model = _model(case)
    compile_scoring(case, model)
    search.start_clock()
    swaps = SWAPS_PER_NODE * len(case.nodes)
    locations = len(model.round_trip_s)
    # A matching examines all pairs of locations, then all pairs of its matches.
    pairs_per_swap = locations**2 + min(max(case.stages), 2 * locations) ** 2
    children = search.steps(share * PAIRS_PER_SECOND / (swaps * pairs_per_swap + PAIRS_PER_CHILD))
    population: list[tuple[float, np.ndarray]] = []
    for _ in range(children):
        if population and search.stopped():
            break
        if len(population) < POPULATION:
            child = np.repeat(np.arange(len(case.stages)), case.stages)
            search.random.shuffle(child)
        else:
            first, second = search.random.choice(len(population), 2, replace=False)
            child = _cross(population[first][1], population[second][1], model, search.random)
        tried = search.random.integers(len(case.nodes), size=(swaps, 2))
        cost = fast(_improve)(child, tried, model)
        if not population or cost < population[0][0]:
            # There is no plan yet: this only reports progress.
            search.found(search.best_s)
        if all(cost != other for other, _ in population):
            population.append((cost, child))
            population.sort(key=lambda member: member[0])
            del population[POPULATION:]
    return _seated(case, population[0][1])


def compile_scoring(case: Case, model: _Model | None = None) -> None:
    """Compile the scoring of a placement, so that this does not count as searching."""
    stage_of = np.repeat(np.arange(len(case.stages)), case.stages)
    fast(_improve)(stage_of, _NO_SWAPS, model or _model(case))


def _seated(case: Case, stage_of: np.ndarray) -> Placement:
    stages = [
        tuple(np.flatnonzero(stage_of == stage).tolist()) for stage in range(len(case.stages))
    ]
    if len(set(case.microbatches)) > 1:
        fastest_first = sorted(stages[0], key=lambda node: case.nodes[node].forward_s)
        most_first = np.argsort([-count for count in case.microbatches], kind="stable")
        seats = dict(zip(most_first.tolist(), fastest_first, strict=True))
        stages[0] = tuple(seats[seat] for seat in range(len(seats)))
    return tuple(stages)


def _model(case: Case) -> _Model:
    location, latency, bandwidth = case.location_matrices
    latency_s = (latency + latency.T) / 2
    seconds_per_byte = (1 / bandwidth + 1 / bandwidth.T) / 2
    mean_bytes = (case.activation_bytes + case.gradient_bytes) / 2
    round_trip_s = 2 * (latency_s + mean_bytes * seconds_per_byte + case.hop_overhead_s)
    visits = sum(case.microbatches)
    work = visits * (1 + case.backward_ratio) * np.array(case.stage_cost)
    work[0] += visits * case.loss_ratio * case.stage_cost[0]
    alike = list(zip(case.stages, case.stage_bytes, case.stage_cost, strict=True))
    group = np.array([alike.index(stage, 1) if s else 0 for s, stage in enumerate(alike)])
    memory = np.mean([node.memory for node in case.nodes])
    return _Model(
        location=location,
        round_trip_s=round_trip_s,
        nearest_pairs=np.column_stack(
            np.unravel_index(np.argsort(round_trip_s, axis=None, kind="stable"), round_trip_s.shape)
        ),
        seconds_per_byte=seconds_per_byte,
        latency_s=latency_s,
        speed=np.array([1 / node.forward_s for node in case.nodes]),
        work=work,
        sizes=np.array(case.stages),
        ring_bytes=bytes_of_rings(case),
        rings=rings_of_iteration(case.averaging),
        group=group,
        rounds=max(1.0, max(case.microbatches) / float(memory)),
    )


def _cross(
    first: np.ndarray, second: np.ndarray, model: _Model, random: np.random.Generator
) -> np.ndarray:
    """Make a child: as both parents where they agree, elsewhere as one of them while there is room.

    The stages of the second parent are first renamed after those of the first with which they share
    the most nodes.
    """
    from scipy.optimize import linear_sum_assignment  # Slow to load.

    stages = len(model.sizes)
    shared = np.zeros((stages, stages))
    np.add.at(shared, (second, first), 1.0)
    _, name = linear_sum_assignment(shared, maximize=True)
    second = name[second]
    child = np.where(first == second, first, -1)
    room = model.sizes - np.bincount(child[child >= 0], minlength=stages)
    for _ in range(2):
        undecided = random.permutation(np.flatnonzero(child < 0))
        for node, from_first in zip(undecided, random.random(len(undecided)) < 0.5, strict=True):
            stage = (first if from_first else second)[node]
            if room[stage] > 0:
                child[node] = stage
                room[stage] -= 1
    left = np.repeat(np.arange(stages), np.maximum(room, 0))
    child[child < 0] = random.permutation(left)
    return child


@allocating_kernel
def _improve(stage_of: np.ndarray, tried: np.ndarray, model: _Model) -> float:
    """Improve a partition in place: order its stages, swap nodes, order again. Return its cost."""
    _order_stages(stage_of, model)
    parts = _score(stage_of, model)
    best = _cost(parts, model)
    for swap in range(len(tried)):
        a, b = tried[swap]
        s, t = stage_of[a], stage_of[b]
        alike = model.location[a] == model.location[b] and model.speed[a] == model.speed[b]
        if s == t or alike:
            continue
        _move(a, s, t, stage_of, parts, model)
        _move(b, t, s, stage_of, parts, model)
        _rescore(s, parts, model)
        _rescore(t, parts, model)
        cost = _cost(parts, model)
        if cost < best:
            best = cost
            continue
        _move(a, t, s, stage_of, parts, model)
        _move(b, s, t, stage_of, parts, model)
        _rescore(s, parts, model)
        _rescore(t, parts, model)
    _order_stages(stage_of, model)
    return _cost(_score(stage_of, model), model)


@allocating_kernel
def _score(stage_of: np.ndarray, model: _Model) -> _Parts:
    stages = len(model.sizes)
    counts = np.zeros((stages, len(model.round_trip_s)), np.int64)
    speed = np.zeros(stages)
    for node in range(len(stage_of)):
        counts[stage_of[node], model.location[node]] += 1
        speed[stage_of[node]] += model.speed[node]
    parts = _Parts(counts, speed, np.zeros(stages), np.zeros(stages))
    for stage in range(stages):
        _rescore(stage, parts, model)
    return parts


@allocating_kernel
def _move(node, source, target, stage_of, parts, model):
    stage_of[node] = target
    place = model.location[node]
    parts.counts[source, place] -= 1
    parts.counts[target, place] += 1
    parts.speed[source] -= model.speed[node]
    parts.speed[target] += model.speed[node]


@allocating_kernel
def _rescore(stage, parts, model):
    """Rescore the parts that depend on the nodes of `stage`."""
    stages = len(model.sizes)
    counts = parts.counts
    before, after = (stage - 1) % stages, (stage + 1) % stages
    parts.averaging_s[stage] = model.rings.of_all_reduce * _averaging_s(counts[stage], stage, model)
    if stages > 1:
        parts.match_s[before] = _match_s(counts[before], counts[stage], model)
        parts.match_s[stage] = _match_s(counts[stage], counts[after], model)


@allocating_kernel
def _cost(parts, model):
    averaging_s = parts.averaging_s.max() + WEIGHT_OF_MEAN_AVERAGING * parts.averaging_s.mean()
    trips_s = model.rounds * parts.match_s.sum()
    busy_s = (model.work / parts.speed).max()
    pipeline_s = trips_s + busy_s
    return added_s(model.rings, averaging_s, pipeline_s, pipeline_s) + trips_s + busy_s


@allocating_kernel
def _averaging_s(counts, stage, model):
    """Estimate the fastest ring over these nodes: no ring has a cheaper slowest link than this.

    Each location needs two neighbors, and all of them must be connected.
    """
    size = model.sizes[stage]
    present = np.flatnonzero(counts)
    steps = 2.0 * (size - 1)
    if len(present) == 1:
        there = present[0]
        per_byte, latency_s = model.seconds_per_byte[there, there], model.latency_s[there, there]
        return steps / size * model.ring_bytes[stage] * per_byte + steps * latency_s
    neighbours = min(2, len(present) - 1)
    slowest = 0.0
    reach = np.full(len(present), np.inf)
    joined = np.zeros(len(present), np.bool_)
    newest = 0
    for _ in range(len(present)):
        joined[newest] = True
        nearest = np.full(2, np.inf)
        following = -1
        for other in range(len(present)):
            if other != newest:
                a, b = present[newest], present[other]
                link_s = (
                    steps / size * model.ring_bytes[stage] * model.seconds_per_byte[a, b]
                    + steps * model.latency_s[a, b]
                )
                reach[other] = min(reach[other], link_s)
                if link_s < nearest[0]:
                    nearest[1] = nearest[0]
                    nearest[0] = link_s
                elif link_s < nearest[1]:
                    nearest[1] = link_s
            if not joined[other] and (following < 0 or reach[other] < reach[following]):
                following = other
        slowest = max(slowest, nearest[neighbours - 1])
        if following >= 0:
            slowest = max(slowest, reach[following])
            newest = following
    return slowest


@allocating_kernel
def _match_s(counts, others, model):
    """Compute the mean round trip when the replicas of two stages are matched, near ones first.

    A stage of three and one of five are matched in fifteen equal parts. Then pairs trade partners
    as long as that shortens the trips.
    """
    locations = len(counts)
    supply = counts * others.sum()
    demand = others * counts.sum()
    total = supply.sum()
    most = 8 * locations
    source, target = np.empty(most, np.int64), np.empty(most, np.int64)
    amount = np.empty(most, np.int64)
    pairs = 0
    left = total
    for pair in range(len(model.nearest_pairs)):
        a, b = model.nearest_pairs[pair, 0], model.nearest_pairs[pair, 1]
        taken = min(supply[a], demand[b])
        if taken > 0:
            supply[a] -= taken
            demand[b] -= taken
            source[pairs], target[pairs], amount[pairs] = a, b, taken
            pairs += 1
            left -= taken
            if left == 0:
                break
    trip = model.round_trip_s
    improved = True
    while improved:
        improved = False
        for e in range(pairs):
            for f in range(e):
                gain = (
                    trip[source[e], target[e]] + trip[source[f], target[f]]
                    - trip[source[e], target[f]] - trip[source[f], target[e]]
                )  # fmt: skip
                if gain <= 1e-9 or pairs + 1 >= most:
                    continue
                improved = True
                traded = min(amount[e], amount[f])
                # The rest of the larger pair stays as a pair of its own.
                if amount[e] != amount[f]:
                    larger = e if amount[e] > amount[f] else f
                    source[pairs], target[pairs] = source[larger], target[larger]
                    amount[pairs] = amount[larger] - traded
                    pairs += 1
                amount[e] = amount[f] = traded
                target[e], target[f] = target[f], target[e]
    cost = 0.0
    for pair in range(pairs):
        cost += amount[pair] * trip[source[pair], target[pair]]
    return cost / total


@allocating_kernel
def _order_stages(stage_of: np.ndarray, model: _Model) -> None:
    """Order stages of one group in the pipeline so that the tour through it is short.

    The data stage stays first: paths begin and end there.
    """
    stages = len(model.sizes)
    if stages < 4:
        return
    counts = _score(stage_of, model).counts
    match_s = np.zeros((stages, stages))
    for s in range(stages):
        for t in range(s):
            match_s[s, t] = match_s[t, s] = _match_s(counts[s], counts[t], model)
    place = np.arange(stages)
    improved = True
    while improved:
        improved = False
        length = _tour_s(place, match_s)
        for s in range(1, stages):
            for t in range(1, s):
                if model.group[s] != model.group[t]:
                    continue
                place[s], place[t] = place[t], place[s]
                shorter = _tour_s(place, match_s)
                if shorter < length - 1e-9:
                    length = shorter
                    improved = True
                else:
                    place[s], place[t] = place[t], place[s]
    seat = np.empty(stages, np.int64)
    for position in range(stages):
        seat[place[position]] = position
    for node in range(len(stage_of)):
        stage_of[node] = seat[stage_of[node]]


@allocating_kernel
def _tour_s(place, match_s):
    length = 0.0
    for position in range(len(place)):
        length += match_s[place[position - 1], place[position]]
    return length
