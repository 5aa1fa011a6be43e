"""Programs of hosts: parts of one order, so that hosts never wait for each other in a circle."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.problem.case import parse_case
from skippipe_sched.problem.plan import Operation, Plan, Predicted, microbatch_chain
from skippipe_sched.timing.simulate import simulate

from skippipe_jax.program.compiler import (
    Compute,
    Instruction,
    SumReplicas,
    compile_plan,
    global_order,
)

PROPERTIES = settings(max_examples=150, deadline=None, derandomize=True)


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


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Nodes scattered over stages, paths that skip and swap stages as they like."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    nodes = draw(st.permutations(range(sum(sizes))))
    stages = [[nodes.pop() for _ in range(size)] for size in sizes]
    paths = []
    for data_node in stages[0]:
        for _ in range(draw(st.integers(1, 3))):
            inner = draw(st.permutations(range(1, len(sizes))))
            visited = inner[: draw(st.integers(0, len(inner)))]
            paths.append([data_node, *(draw(st.sampled_from(stages[s])) for s in visited)])
    speeds = [draw(st.sampled_from([0.1, 0.3, 1.0])) for _ in range(sum(sizes))]
    return plan_of(
        stages,
        paths,
        nodes=[{"forward_s": s, "memory": draw(st.integers(1, 3))} for s in speeds],
        activation_bytes=draw(st.sampled_from([1e3, 1e9])),
    )


@st.composite
def placements(draw: st.DrawFn) -> tuple[Plan, tuple[int, ...]]:
    """A plan, and the host of each node: every host serves one at least."""
    plan = draw(plans())
    nodes = len(plan.stage_of)
    hosts = draw(st.integers(1, nodes))
    rest = draw(st.lists(st.integers(0, hosts - 1), min_size=nodes - hosts, max_size=nodes - hosts))
    return plan, tuple(draw(st.permutations([*range(hosts), *rest])))


def computes(instructions: tuple[Instruction, ...]) -> list[Compute]:
    return [step for step in instructions if isinstance(step, Compute)]


@PROPERTIES
@given(placements())
def test_a_host_runs_its_part_of_one_global_order(placement: tuple[Plan, tuple[int, ...]]):
    plan, host_of = placement
    order = global_order(plan)
    programs = compile_plan(plan, host_of)
    assert [program.host for program in programs] == list(range(max(host_of) + 1))
    served = [node for program in programs for node in program.nodes]
    assert sorted(served) == list(range(len(host_of)))
    for program in programs:
        own = set(program.nodes)
        assert own == {node for node, host in enumerate(host_of) if host == program.host}
        assert program.instructions == tuple(
            step
            for step in order
            if (step.operation.node if isinstance(step, Compute) else None) in own
            or (isinstance(step, SumReplicas) and own & set(plan.stages[step.stage]))
        )


@PROPERTIES
@given(plans())
def test_the_global_order_runs_everything_once_and_in_the_orders_of_the_plan(plan: Plan):
    order = global_order(plan)
    place = {
        step.operation if isinstance(step, Compute) else step: position
        for position, step in enumerate(order)
    }
    assert len(place) == len(order)
    chains = [microbatch_chain(m, path) for m, path in enumerate(plan.microbatches)]
    assert {key for key in place if isinstance(key, Operation)} == set(itertools.chain(*chains))
    for before, after in itertools.chain(*map(itertools.pairwise, [*chains, *plan.order])):
        assert place[before] < place[after]
    # A stage is summed once, after the last operation of every replica.
    for stage, nodes in enumerate(plan.stages):
        for operation in itertools.chain(*(plan.order[node] for node in nodes)):
            assert place[operation] < place[SumReplicas(stage)]


@PROPERTIES
@given(placements())
def test_every_hop_is_sent_once_and_received_once(placement: tuple[Plan, tuple[int, ...]]):
    plan, host_of = placement
    programs = compile_plan(plan, host_of)
    parts = [[c for c in p.instructions if isinstance(c, Compute)] for p in programs]
    computes = {compute.operation: compute for own in parts for compute in own}
    assert len(computes) == count * (len(stages) + 1)
    assert len(computes) == sum(len(program.instructions) for program in programs)
    arrived, left = [c.arrives for c in computes.values()], [c.leaves for c in computes.values()]
    hops = {hop.number: hop for hop in left if hop is not None}
    assert hops == {hop.number: hop for hop in arrived if hop is not None}
    assert sorted(hops) == list(range(5, numbers.free))

    for microbatch in range(count):
        path = [nodes[microbatch % len(nodes)] for nodes in stages]
        chain = [*(Operation("F", microbatch, n) for n in path)]
        chain.append(Operation("L", microbatch, path[0]))
        for before, after in itertools.pairwise(chain):
            assert programs[0].following[before] == after
            assert computes[before].leaves == computes[after].arrives

    for node in stages[0]:
        under_way = 0
        for compute in parts[host_of[node]]:
            if compute.operation.node == node:
                under_way += {"F": 1, "L": -1}[compute.operation.kind]
                assert under_way <= len(stages) + 1

    # Each host in its program's order, with whatever has arrived: all of it can run.
    before_of = {after: before for before, after in programs[0].following.items()}
    done: set[Operation | None] = {None}
    while any(parts):
        ready = [own for own in parts if own and before_of.get(own[0].operation) in done]
        assert ready
        done.add(ready[0].pop(0).operation)
