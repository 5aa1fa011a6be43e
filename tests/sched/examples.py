"""Small cases, random cases and random paths for the planner's tests."""

from collections.abc import Iterator
from itertools import accumulate, permutations
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.methods.routes import place_in_order
from skippipe_sched.problem.case import CONTENTIONS, Case, parse_case
from skippipe_sched.problem.plan import Operation, Plan, Predicted, load_plan, microbatch_chain
from skippipe_sched.timing.simulate import forecast, simulate
from skippipe_sched.timing.timeline import Timeline

PAPER = "experiments/paper/gcp20.yaml"
# The placement and the paths published for that case; an order is ours.
PUBLISHED = load_plan(Path(__file__).parents[2] / "experiments/paper/published_gcp20.json")
LOCATIONS = ("Iowa", "Oregon", "Belgium", "Taiwan", "Australia")

# Two nodes; F takes 1 s, L half a second, B 2 s, and a hop 1 s each way.
TWO_NODES: dict[str, Any] = {
    "nodes": 2,
    "locations": ["here", "there"],
    "links": [["here", "there", 1000, 1]],
    "activation_bytes": 0,
    "stage_bytes": 0,
    "forward_s": 1,
    "backward_ratio": 2,
    "loss_ratio": 0.5,
    "stages": [1, 1],
    "path_length": 2,
    "microbatches_per_data_node": 1,
    "memory": 2,
}


def case_with(**changes: Any) -> Case:
    return parse_case(TWO_NODES | changes)


def same_place(stages: list[int], **changes: Any) -> Case:
    """Nodes of one location, whose hops take a millisecond, and paths through all stages."""
    given = {"nodes": sum(stages), "locations": ["here"], "links": [], "stages": stages}
    given["path_length"] = len(stages)
    return parse_case(TWO_NODES | given | changes)


def in_order(sizes) -> tuple[tuple[int, ...], ...]:
    """Nodes 0, 1, 2, ... on stages of these sizes."""
    ends = accumulate(sizes)
    return tuple(tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True))


def plan_of(
    stages: list[list[int]],
    paths: list[list[int]],
    order: list[list[tuple[str, int]]] | None = None,
    **case: Any,
) -> Plan:
    """A plan by hand; without an order, in the one that the simulator finds."""
    sent = [sum(path[0] == node for path in paths) for node in stages[0]]
    parsed = parse_case(
        {
            "nodes": sum(len(nodes) for nodes in stages),
            "locations": ["here"],
            "links": [],
            "activation_bytes": 1e6,
            "stage_bytes": 1e6,
            "forward_s": 0.1,
            "stages": [len(nodes) for nodes in stages],
            "path_length": 1,
            "microbatches_per_data_node": sent,
            "memory": 2,
        }
        | case
    )
    if order is None:
        operations = simulate(parsed, stages, [tuple(path) for path in paths]).order
    else:
        operations = tuple(
            tuple(Operation(kind, microbatch, node) for kind, microbatch in own)  # pyright: ignore[reportArgumentType]
            for node, own in enumerate(order)
        )
    return Plan(
        "by hand",
        tuple(map(tuple, stages)),
        tuple(map(tuple, paths)),
        operations,
        Predicted(0, 0, 0, 0),
        parsed,
    )


def planned(case: Case, stages, paths) -> tuple[Plan, Timeline]:
    """A plan of these paths as the simulator dispatches them, with a bound of half its pipeline."""
    stages, paths = tuple(map(tuple, stages)), tuple(map(tuple, paths))
    timeline = forecast(case, stages, paths)
    predicted = timeline.predicted(0.5 * timeline.pipeline_s)
    return Plan("example", stages, paths, timeline.order, predicted, case), timeline


def outer(case: Case, **averaging: Any) -> Case:
    """The case with averaging behind the iterations."""
    return parse_case({**case.source, "averaging": {"mode": "outer"} | averaging})


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    """Short cycles, with everything that a policy of mode outer says."""
    every = draw(st.integers(1, 6))
    return {
        "every": every,
        "fragments": draw(st.integers(1, every)),
        "delay": draw(st.integers(0, every - 1)),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "int8"])),
    }


@st.composite
def cases(
    draw: st.DrawFn,
    speeds=(0.25, 0.5, 1.0, 1.5),
    contentions=CONTENTIONS,
    most_microbatches: int = 4,
) -> Case:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    sent = st.integers(1, most_microbatches)
    speed = st.sampled_from(speeds)
    if draw(st.booleans()):
        speed = st.just(speeds[0])
    node = st.fixed_dictionaries(
        {"forward_s": speed, "memory": st.integers(1, 3)},
        optional={"location": st.sampled_from(LOCATIONS)},
    )
    gradient_bytes = st.sampled_from([0, 2**21, 2**26])
    rules = {
        "max_swaps": st.integers(0, 3),
        "max_swap_distance": st.integers(1, 2),
        "max_jump": st.integers(0, 3),
    }
    given = {
        "nodes": draw(st.lists(node, min_size=sum(sizes), max_size=sum(sizes))),
        "locations": draw(st.lists(st.sampled_from(LOCATIONS), min_size=1, max_size=3)),
        "links": draw(st.sampled_from(["gcp12", _links()])),
        "hop_overhead_s": draw(st.sampled_from([0, 0.125])),
        "activation_bytes": draw(st.sampled_from([0, 2**22, 2**25])),
        "stage_bytes": 2**24,
        "forward_s": 1,
        **draw(st.fixed_dictionaries({}, optional={"gradient_bytes": gradient_bytes})),
        "loss_ratio": draw(st.sampled_from([0, 0.25])),
        "contention": draw(st.sampled_from(contentions)),
        "stages": sizes,
        "path_length": draw(st.integers(1, len(sizes))),
        "microbatches_per_data_node": draw(
            sent | st.lists(sent, min_size=sizes[0], max_size=sizes[0])
        ),
        "memory": 1,
        "rules": draw(st.fixed_dictionaries({}, optional=rules)),
    }
    if given["contention"] == "node":
        given["nodes"] = [node | draw(CONNECTIONS) for node in given["nodes"]]
        given |= draw(CONNECTIONS)
    return parse_case(given)


# Rates near those of links, or none.
CONNECTIONS = st.fixed_dictionaries(
    {},
    optional={
        "uplink_GiB_per_s": st.sampled_from([0.015625, 0.0625, 0.25]),
        "downlink_GiB_per_s": st.sampled_from([0.03125, 0.125, 2]),
    },
)


def _links() -> list[list]:
    """Links of round figures, slower in one direction than in the other."""
    return [
        [a, b, 125 * (1 + (i + 2 * j) % 3), 0.125 * (1 + (2 * i + j) % 4)]
        for i, a in enumerate(LOCATIONS)
        for j, b in enumerate(LOCATIONS)
        if a != b
    ]


@st.composite
def routed_cases(draw: st.DrawFn, swaps: bool = True, contentions=CONTENTIONS):
    """A case, a placement, and paths of any stages, in any order where there are `swaps`."""
    case = draw(cases(contentions=contentions))
    nodes = iter(draw(st.permutations(range(len(case.nodes)))))
    stages = tuple(tuple(next(nodes) for _ in range(size)) for size in case.stages)
    paths = []
    for data_node, count in zip(stages[0], case.microbatches, strict=True):
        for _ in range(count):
            inner = draw(st.permutations(range(1, len(stages))))
            inner = inner[: draw(st.integers(0, len(inner)))]
            visited = inner if swaps else sorted(inner)
            path = (data_node, *(draw(st.sampled_from(stages[stage])) for stage in visited))
            paths.append(path)
    return case, stages, tuple(paths)


@st.composite
def balanced_cases(draw: st.DrawFn, **options: Any):
    """A case, a random placement, and random paths that keep its rules."""
    # Slow to load, and no other test needs it.
    from skippipe_sched.methods.dtfm_skip import random_paths

    case, random = draw(cases(**options)), np.random.default_rng(draw(st.integers(0, 2**30)))
    stages = place_in_order(case, random.permutation(len(case.nodes)).tolist())
    try:
        return case, stages, random_paths(case, stages, random)
    except InputError:
        reject()  # No paths are balanced under the case's max_jump.


def every_placement(case: Case) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All placements; inner replicas in another order are the same one."""
    for nodes in permutations(range(len(case.nodes))):
        stages = place_in_order(case, nodes)
        if all(list(stage) == sorted(stage) for stage in stages[1:]):
            yield stages


def replicas(ring_s: float, speeds=(1.0, 1.0), **averaging):
    """Data nodes alone, on which an iteration takes 3.5 s, and a ring as many as are said."""
    case = same_place(
        [len(speeds)],
        nodes=[{"forward_s": speed} for speed in speeds],
        same_location={"latency_ms": 0, "bandwidth_GiB_per_s": 1},
        stage_bytes=ring_s * 2**30 / (len(speeds) - 1) * averaging.get("fragments", 1),
    )
    case = outer(case, **{"fragments": 1, "dtype": "float32"} | averaging)
    return case, in_order([len(speeds)]), tuple((node,) for node in range(len(speeds)))


def chains_of(paths) -> list[list[Operation]]:
    return [microbatch_chain(microbatch, path) for microbatch, path in enumerate(paths)]


def drawn_order(case: Case, paths, chance) -> list[list[Operation]]:
    """Any orders of the nodes that extend the chains of all microbatches."""
    turns = [m for m, chain in enumerate(chains_of(paths)) for _ in chain]
    chance.shuffle(turns)
    chains = [iter(chain) for chain in chains_of(paths)]
    order = [[] for _ in case.nodes]
    for operation in (next(chains[microbatch]) for microbatch in turns):
        order[operation.node].append(operation)
    return order


def operations(chains) -> list[Operation]:
    return [operation for chain in chains for operation in chain]
