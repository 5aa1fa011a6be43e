"""Programs of hosts: parts of one order, so that hosts never wait for each other in a circle."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.problem.plan import Operation, Plan, microbatch_chain

from skippipe_jax.program.compiler import (
    Compute,
    Hop,
    Instruction,
    Program,
    SumGradients,
    compile_held_out,
    compile_plan,
    global_order,
    hosts_of_nodes,
)
from tests.sched.examples import plan_of

PROPERTIES = settings(max_examples=60)


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
            or (isinstance(step, SumGradients) and own & set(plan.stages[step.stage]))
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
            assert place[operation] < place[SumGradients(stage)]


@PROPERTIES
@given(placements())
def test_every_hop_is_sent_once_and_received_once(placement: tuple[Plan, tuple[int, ...]]):
    plan, host_of = placement
    programs = compile_plan(plan, host_of)
    steps = [step for program in programs for step in computes(program.instructions)]
    sent = {step.leaves: step.operation for step in steps if step.leaves}
    received = {step.arrives: step.operation for step in steps if step.arrives}
    assert len(sent) == sum(step.leaves is not None for step in steps)
    assert len(received) == sum(step.arrives is not None for step in steps)
    expected = {
        (before, after)
        for m, path in enumerate(plan.microbatches)
        for before, after in itertools.pairwise(microbatch_chain(m, path))
        if before.node != after.node
    }
    assert sent.keys() == received.keys()
    assert {(sent[hop], received[hop]) for hop in sent} == expected
    assert len({hop.name for hop in sent}) == len(sent)
    for hop in sent:
        assert (hop.source, hop.target) == (sent[hop].node, received[hop].node)
    assert sum(len(program.hops) for program in programs) == len(sent)
    assert {step.following for step in steps if step.leaves} == set(received.values())


def run_to_the_end(plan: Plan, programs: tuple[Program, ...], pick: random.Random) -> None:
    """Hosts in a random interleaving; each blocks until its input is there, and in every sum.

    Real hosts block less: they only dispatch. Whoever never locks here does not lock there.
    """
    place = [0] * len(programs)
    underway: set[Hop] = set()
    host_of = {node: program.host for program in programs for node in program.nodes}

    def next_of(host: int) -> Instruction | None:
        instructions = programs[host].instructions
        return instructions[place[host]] if place[host] < len(instructions) else None

    while any(next_of(program.host) is not None for program in programs):
        able = []
        for host in range(len(programs)):
            step = next_of(host)
            if isinstance(step, Compute) and (step.arrives is None or step.arrives in underway):
                able.append([host])
            if isinstance(step, SumGradients):
                together = sorted({host_of[node] for node in plan.stages[step.stage]})
                if host == together[0] and all(next_of(other) == step for other in together):
                    able.append(together)
        assert able, f"locked at {[next_of(host) for host in range(len(programs))]}"
        for host in pick.choice(able):
            step = next_of(host)
            if isinstance(step, Compute):
                if step.arrives is not None:
                    underway.remove(step.arrives)
                if step.leaves is not None:
                    underway.add(step.leaves)
            place[host] += 1
    assert not underway


@PROPERTIES
@given(placements(), st.integers(0, 2**32))
def test_hosts_of_any_speed_come_to_the_end(placement: tuple[Plan, tuple[int, ...]], seed: int):
    plan, host_of = placement
    run_to_the_end(plan, compile_plan(plan, host_of), random.Random(seed))


SWAPPED = [[0], [1], [2]], [[0, 1, 2], [0, 2, 1]]


def test_orders_that_wait_for_each_other_are_refused():
    data_node = [("F", 0), ("F", 1), ("L", 0), ("L", 1), ("B", 0), ("B", 1)]
    # Node 1 wants to end microbatch 1 before it begins with 0, and node 2 the other way round.
    plan = plan_of(
        *SWAPPED,
        order=[
            data_node,
            [("F", 1), ("B", 1), ("F", 0), ("B", 0)],
            [("F", 0), ("B", 0), ("F", 1), ("B", 1)],
        ],
    )
    with pytest.raises(InputError, match="these operations deadlock") as caught:
        compile_plan(plan, (0, 1, 2))
    assert caught.value.field == "plan.order"
    assert "F of microbatch 1 on node 1 waits for" in str(caught.value)


def test_orders_that_break_a_memory_limit_are_refused():
    plan = plan_of(*SWAPPED)
    assert compile_plan(plan, (0, 1, 2))
    full = dataclasses.replace(plan, case=plan_of(*SWAPPED, memory=1).case)
    with pytest.raises(InputError, match="puts 2 microbatches in flight on node") as caught:
        compile_plan(full, (0, 1, 2))
    assert caught.value.field.startswith("plan.order[")


@given(st.integers(1, 30), st.integers(1, 30))
def test_every_host_serves_as_many_nodes_as_another_give_or_take_one(nodes: int, hosts: int):
    hosts = min(nodes, hosts)
    host_of = hosts_of_nodes(nodes, hosts, None)
    counts = [host_of.count(host) for host in range(hosts)]
    assert list(host_of) == sorted(host_of)
    assert sum(counts) == nodes
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("nodes", "hosts", "given_hosts", "field", "words"),
    [
        (9, 12, None, "--hosts", "the plan has 9 nodes"),
        (3, 2, (0, 1), "cluster.host_of_node", "has 2 entries, but the plan has 3 nodes"),
        (3, 2, (0, 0, 0), "cluster.host_of_node", "each host from 0 to 1 must serve a node"),
        (3, 1, (0, 0, 1), "cluster.host_of_node", "Start 2 hosts"),
        (3, 2, (0, 1, -1), "cluster.host_of_node", "each host from 0 to 1"),
    ],
)
def test_plans_for_another_number_of_hosts_are_refused(
    nodes: int, hosts: int, given_hosts: tuple[int, ...] | None, field: str, words: str
):
    with pytest.raises(InputError) as caught:
        hosts_of_nodes(nodes, hosts, given_hosts)
    assert caught.value.field == field
    assert words in str(caught.value)


@PROPERTIES
@given(st.data())
def test_held_out_microbatches_go_through_all_stages_in_order(data: st.DataObject):
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    first = [sum(sizes[:stage]) for stage in range(len(sizes))]
    stages = [list(range(begin, begin + size)) for begin, size in zip(first, sizes, strict=True)]
    hosts = data.draw(st.integers(1, sum(sizes)))
    host_of = [node * hosts // sum(sizes) for node in range(sum(sizes))]
    count = data.draw(st.integers(0, 7))
    programs = compile_held_out(stages, host_of, count)

    parts = [[c for c in p.instructions if isinstance(c, Compute)] for p in programs]
    computes = {compute.operation: compute for own in parts for compute in own}
    assert len(computes) == count * (len(stages) + 1)
    assert len(computes) == sum(len(program.instructions) for program in programs)
    arrived, left = [c.arrives for c in computes.values()], [c.leaves for c in computes.values()]
    hops = {hop.name: hop for hop in left if hop is not None}
    assert hops == {hop.name: hop for hop in arrived if hop is not None}
    assert len(hops) == sum(hop is not None for hop in left)

    for microbatch in range(count):
        path = [nodes[microbatch % len(nodes)] for nodes in stages]
        chain = [*(Operation("F", microbatch, n) for n in path)]
        chain.append(Operation("L", microbatch, path[0]))
        for before, after in itertools.pairwise(chain):
            assert computes[before].following == after
            assert computes[before].leaves == computes[after].arrives

    for node in stages[0]:
        under_way = 0
        for compute in parts[host_of[node]]:
            if compute.operation.node == node:
                under_way += {"F": 1, "L": -1}[compute.operation.kind]
                assert under_way <= len(stages) + 1

    # Each host in its program's order, with whatever has arrived: all of it can run.
    before_of = {compute.following: own for own, compute in computes.items()}
    done: set[Operation | None] = {None}
    while any(parts):
        ready = [own for own in parts if own and before_of.get(own[0].operation) in done]
        assert ready
        done.add(ready[0].pop(0).operation)


def test_held_out_microbatches_go_past_stages_that_are_left_out():
    host_of = (0, 1, 2)
    past, without = (
        compile_held_out(stages, host_of, 3) for stages in (((0,), (), (1, 2)), ((0,), (1, 2)))
    )
    assert past == without


def test_stages_whose_replicas_go_apart_are_summed_before_that():
    paths, outer = [[0, 1], [0, 2]], {"mode": "outer", "every": 3, "fragments": 2, "delay": 1}
    order = global_order(plan_of([[0], [1, 2]], paths, averaging=outer))
    assert order == global_order(plan_of([[0], [1, 2]], paths))
