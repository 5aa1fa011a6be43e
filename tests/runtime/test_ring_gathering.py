"""Messages that go round a ring: all replicas have all of them, bit for bit, in any order."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe_jax.program.hops import HopNumbers
from skippipe_jax.runtime.ring import Gathering, GatheringRing
from tests.sched.examples import plan_of


def ring_of(replicas: list[int], length: int, chunk_length: int) -> GatheringRing:
    """The ring of replicas on these nodes, in the planner's order, with chunks of this length."""
    nodes = max(replicas) + 2
    plan = plan_of([[0], [*range(1, nodes)]], [[0, 1]])
    longest = jax.ShapeDtypeStruct((length,), jnp.int8)
    numbers = HopNumbers(7)
    ring = GatheringRing.of(plan.case, 1, replicas, numbers, longest)
    most = -(-length // chunk_length)
    hops = HopNumbers(7).take((len(replicas) - 1) * most * len(replicas))
    return replace(ring, numbers=hops, chunks=most, chunk_length=chunk_length)


@settings(max_examples=30)
@given(st.data())
def test_every_replica_comes_to_have_all_messages(data: st.DataObject):
    count = data.draw(st.integers(2, 5))
    replicas = data.draw(st.permutations(range(1, count + 1)))
    length = data.draw(st.integers(1, 9))
    ring = ring_of([*replicas], length, data.draw(st.integers(1, 4)))
    chance = random.Random(data.draw(st.integers(0, 99)))
    # By the place of a replica in its stage, which is not that in the ring.
    messages = {place: jnp.arange(length, dtype=jnp.int8) + 20 * place for place in range(count)}
    parts = {node: Gathering(ring, node, messages[replicas.index(node)]) for node in ring.nodes}
    given_by_hop: dict[int, jax.Array] = {}
    asked = {node: deque(part.unrequested) for node, part in parts.items()}
    for part in parts.values():
        for hop, array in part.begin():
            assert hop.number not in given_by_hop
            given_by_hop[hop.number] = array
    while any(asked.values()):
        ready = [
            (node, ask)
            for node, asks in asked.items()
            for ask in asks
            if ask[2].number in given_by_hop
        ]
        assert ready, "nobody waits in a circle"
        node, ask = chance.choice(ready)
        asked[node].remove(ask)
        step, chunk, hop, like = ask
        assert hop.target == node
        array = given_by_hop.pop(hop.number)
        assert (array.shape, array.dtype) == (like.shape, like.dtype)
        going_on = parts[node].arrive(step, chunk, array)
        if going_on is not None:
            assert going_on[0].number not in given_by_hop
            given_by_hop[going_on[0].number] = going_on[1]
    assert not given_by_hop
    for part in parts.values():
        assert part.left == 0
        found = part.messages()
        assert found.keys() == messages.keys()
        for place, message in messages.items():
            np.testing.assert_array_equal(found[place], message)


@pytest.mark.parametrize("count", [2, 3])
def test_a_ring_takes_a_number_for_every_hop(count: int):
    replicas = [*range(1, count + 1)]
    plan = plan_of([[0], replicas], [[0, 1]])
    numbers = HopNumbers(3)
    longest = jax.ShapeDtypeStruct((5_000_000,), jnp.int8)
    ring = GatheringRing.of(plan.case, 1, replicas, numbers, longest)
    hops = [
        ring.hop(position, step, chunk).number
        for position in range(count)
        for step in range(count - 1)
        for chunk in range(ring.chunks)
    ]
    assert sorted(hops) == [*range(3, numbers.free)] == [*ring.numbers]
    assert ring.chunks * ring.chunk_length >= longest.size
