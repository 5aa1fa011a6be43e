"""Which operation is next: never a deadlock, never over the memory, whatever comes late."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.problem.plan import Operation, Plan, microbatch_chain

from skippipe_jax.runtime.ready_queue import ReadyQueue
from tests.program.test_compiler import placements

PROPERTIES = settings(max_examples=80)


def turns_of(plan: Plan, ready_first: Sequence[bool]) -> list[ReadyQueue]:
    return [
        ReadyQueue(order, plan.case.nodes[node].memory, ready_first=ready_first[node])
        for node, order in enumerate(plan.order)
    ]


def run(plan: Plan, nodes: list[ReadyQueue], pick: random.Random) -> list[list[Operation]]:
    """What each node has run, in order, when arrivals and nodes take any time they like."""
    chains = [microbatch_chain(m, path) for m, path in enumerate(plan.microbatches)]
    following = {a: b for chain in chains for a, b in itertools.pairwise(chain)}
    underway = [chain[0] for chain in chains]
    running: dict[int, Operation] = {}
    ran: list[list[Operation]] = [[] for _ in nodes]
    while any(queue.left for queue in nodes) or running:
        for node, queue in enumerate(nodes):
            operation = queue.take() if node not in running else None
            if operation is not None:
                running[node] = operation
                ran[node].append(operation)
                in_flight = sum({"F": 1, "L": 0, "B": -1}[ran.kind] for ran in ran[node])
                assert in_flight <= plan.case.nodes[node].memory
        happening = [*underway, *running.values()]
        assert happening, f"locked, with {[queue.left for queue in nodes]} left"
        event = pick.choice(happening)
        if event in underway:
            underway.remove(event)
            nodes[event.node].arrive(event)
        else:
            del running[event.node]
            underway += [following[event]] if event in following else []
    return ran


@PROPERTIES
@given(placements(), st.integers(0, 2**32), st.data())
def test_nodes_come_to_the_end_whatever_is_late(placement, seed: int, data: st.DataObject):
    plan, _ = placement
    size = len(plan.order)
    ready_first = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    ran = run(plan, turns_of(plan, ready_first), random.Random(seed))
    for node, order in enumerate(plan.order):
        assert sorted(ran[node]) == sorted(order)
        if not ready_first[node]:
            assert ran[node] == list(order)


def forward(microbatch: int) -> Operation:
    return Operation("F", microbatch, 0)


def backward(microbatch: int) -> Operation:
    return Operation("B", microbatch, 0)


def test_the_earliest_that_is_there_goes_first():
    queue = ReadyQueue([forward(0), forward(1), forward(2)], memory=3, ready_first=True)
    queue.arrive(forward(2))
    queue.arrive(forward(1))
    assert queue.take() == forward(1)
    queue.arrive(forward(0))
    assert queue.take() == forward(0)
    assert queue.take() == forward(2)
    assert queue.take() is None


def test_a_forward_leaves_room_for_those_it_passes():
    order = [forward(0), forward(1), backward(0), forward(2), backward(1), backward(2)]
    queue = ReadyQueue(order, memory=2, ready_first=True)
    queue.arrive(forward(2))
    # Beside it, microbatches 0 and 1 are in flight together in the plan's order.
    assert queue.take() is None
    queue.arrive(forward(1))
    assert queue.take() == forward(1)
    queue.arrive(backward(1))
    assert queue.take() == backward(1)
    assert queue.take() == forward(2)
