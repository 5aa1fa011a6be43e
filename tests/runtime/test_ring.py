"""Rings: what all replicas end with, in any order of arrival, and what is on its way at once."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.problem.links import GIBIBYTE

from skippipe_jax.config import NodeMesh
from skippipe_jax.program.compiler import Hop
from skippipe_jax.runtime.node_sharding import NodeSharding
from skippipe_jax.runtime.ring import (
    ANSWER_S,
    ENOUGH_CHUNKS,
    FEWEST_CHUNKS,
    LARGEST_CHUNK_BYTES,
    LEAST_CHUNK_S,
    SHARE_OF_HOP,
    SMALLEST_CHUNK_BYTES,
    Gathering,
    Ring,
    RingMember,
    RingPart,
    chunk_bytes,
)
from tests.sched.examples import plan_of

MB, MS = 1e6, 1e-3
# Float32.
WIDTH = 4


def case_of(nodes: int, bandwidth: float, latency_s: float = 0.0) -> Case:
    """Nodes with links of so many bytes per second; those to node 0 are ten times as quick."""
    places = [str(node) for node in range(nodes)]
    links = [
        [source, target, latency_s / MS, bandwidth / GIBIBYTE * (1 if target != "0" else 10)]
        for source, target in permutations(places, 2)
    ]
    return parse_case(
        {
            "nodes": nodes,
            "locations": places,
            "links": links,
            "activation_bytes": 1e6,
            "stage_bytes": 1e6,
            "forward_s": 0.1,
            "stages": [nodes],
            "path_length": 1,
            "microbatches_per_data_node": 1,
            "memory": 1,
        }
    )


@pytest.mark.parametrize(
    ("bandwidth", "hop_bytes", "size"),
    [
        # A large stage between continents, where hops are large: what a server copies at a time.
        (10 * MB, 100 * MB, LARGEST_CHUNK_BYTES),
        # Small hops: two chunks are an eighth of one.
        (1 * MB, 1 * MB, MB * SHARE_OF_HOP),
        # Quick links: each chunk takes its link long enough that its host has time for it.
        (100 * MB, 1 * MB, 100 * MB * LEAST_CHUNK_S),
        (1e-3 * MB, 1e-3 * MB, SMALLEST_CHUNK_BYTES),
        # Nothing to hold up.
        (1e-3 * MB, math.inf, LARGEST_CHUNK_BYTES),
    ],
)
def test_a_chunk_is_bounded_by_the_hops_and_the_slowest_link(
    bandwidth: float, hop_bytes: float, size: float
):
    case = case_of(3, bandwidth)
    assert chunk_bytes(case, (0, 1, 2), hop_bytes) == pytest.approx(size)
    assert chunk_bytes(case, (2, 1, 0), hop_bytes) == pytest.approx(size)


@settings(max_examples=100)
@given(
    st.integers(2, 5),
    st.floats(0.01, 3000),
    st.floats(0, 0.3),
    st.floats(0.001, 100) | st.just(math.inf),
    st.integers(1, 10**10),
)
def test_what_is_asked_for_fills_the_link_and_delays_a_hop_little(
    nodes: int, bandwidth_MB: float, latency_s: float, hop_MB: float, length: int
):
    case, hop_bytes = case_of(nodes, bandwidth_MB * MB, latency_s), hop_MB * MB
    ring = Ring.of(case, 0, range(nodes), length, width=WIDTH, hop_bytes=hop_bytes)
    assert nodes * ring.chunks * ring.chunk_length >= length
    size = ring.chunk_length * WIDTH
    assert size < chunk_bytes(case, ring.nodes, hop_bytes) + WIDTH
    _, bandwidth = case.link_matrices
    for before, node, ahead in zip((nodes - 1, *ring.nodes), ring.nodes, ring.ahead, strict=False):
        round_trip = bandwidth[before, node] * (2 * latency_s + ANSWER_S)
        in_all = ring.steps * ring.chunks
        assert 2 <= ahead <= in_all
        # All but the one that is being sent: while they are on their way, others are asked for.
        assert ahead == in_all or round_trip <= (ahead - 1) * size * (1 + 1e-9)
        assert ahead * size < round_trip + 2 * size


@pytest.mark.parametrize(
    ("length", "chunks"),
    [
        (1, FEWEST_CHUNKS),
        (2 * 8 * LARGEST_CHUNK_BYTES // WIDTH, 8),
        (10**9, ENOUGH_CHUNKS),
    ],
)
def test_there_are_enough_chunks_on_links_that_are_quick(length: int, chunks: int):
    ring = Ring.of(case_of(2, 10_000 * MB), 0, [0, 1], length)
    assert chunks <= ring.chunks <= chunks + 8
    assert 2 * ring.chunks * ring.chunk_length >= length


def test_numbers_that_are_rounded_make_chunks_of_as_many_bytes():
    case = case_of(2, 10 * MB)
    whole, rounded = (Ring.of(case, 0, [0, 1], 10**8, width=width) for width in (4, 2))
    assert rounded.chunk_length == pytest.approx(2 * whole.chunk_length, rel=0.02)


# Sums.

# Few, as each is compiled: one number, fewer than replicas, and some that no segment divides.
SHAPES = st.sampled_from([[()], [(3,), ()], [(2, 5, 3), (4,), (5, 2)]])
CASE = case_of(12, 100 * MB)


def gradients(shapes: list[tuple[int, ...]], seed: int) -> dict[str, Any]:
    drawn = np.random.default_rng(seed)
    return {f"{i}": jnp.asarray(drawn.normal(size=s), jnp.float32) for i, s in enumerate(shapes)}


def pass_round(parts: Sequence[RingMember], pick: random.Random) -> None:
    """Deliver all chunks of a ring, when hops take any time they like."""
    expected = {
        hop: (part, step, chunk, like)
        for part in parts
        for step, chunk, hop, like in list(part.unrequested)
    }
    assert expected.keys() == {*parts[0].ring.hops}
    underway: dict[Hop, Any] = {}
    for part in parts:
        underway |= dict(part.begin())
    while underway:
        hop = pick.choice(list(underway))
        array = underway.pop(hop)
        part, step, chunk, like = expected.pop(hop)
        assert (array.shape, array.dtype) == (like.shape, like.dtype)
        assert hop.target == part.ring.nodes[part.position]
        going_on = part.arrive(step, chunk, jax.device_put(array, like.sharding))
        if going_on is not None:
            assert going_on[0] not in underway
            underway |= dict([going_on])
    assert not expected
    assert all(part.left == 0 for part in parts)


def average(
    ring: Ring,
    own: list[Any],
    dtype: Any,
    pick: random.Random,
    shardings: Sequence[NodeSharding | None] | None = None,
) -> list[Any]:
    """Return the sum that every replica ends with."""
    shardings = shardings or [None] * len(own)
    parts = [
        RingPart(ring, node, tree, jnp.dtype(dtype), here)
        for node, tree, here in zip(ring.nodes, own, shardings, strict=True)
    ]
    pass_round(parts, pick)
    return [part.result() for part in parts]


@settings(max_examples=12)
@given(st.integers(2, 4), SHAPES, st.sampled_from(["float32", "bfloat16"]), st.integers(0, 99))
def test_all_replicas_get_the_sum_and_the_same_bits(
    replicas: int, shapes: list[tuple[int, ...]], dtype: str, seed: int
):
    own = [gradients(shapes, seed + replica) for replica in range(replicas)]
    length = sum(leaf.size for leaf in jax.tree.leaves(own[0]))
    nodes = [3 + 2 * position for position in range(replicas)]
    ring = Ring.of(CASE, 0, nodes, length)
    truth = jax.tree.map(lambda *leaves: np.sum(np.stack(leaves), axis=0), *own)
    results = average(ring, own, dtype, random.Random(seed))
    for result in results:
        for name, leaf in result.items():
            assert leaf.dtype == jnp.float32
            assert leaf.shape == truth[name].shape
            assert leaf.tobytes() == results[0][name].tobytes()
            scale = sum(np.abs(tree[name]) for tree in own)
            tolerance = 1e-6 if dtype == "float32" else replicas * 2**-8
            assert np.all(np.abs(leaf - truth[name]) <= tolerance * scale)


def test_each_device_of_a_mesh_sums_its_shards():
    devices, random_numbers = jax.local_devices(), np.random.default_rng(0)
    shardings = [NodeSharding.over(devices[first : first + 2], NodeMesh(2, 1)) for first in (0, 2)]
    shapes = {"query": {"kernel": (2, 8, 6)}, "ffn_norm": {"scale": (2, 8)}}
    whole = [
        jax.tree.map(
            lambda shape: random_numbers.normal(size=shape).astype(np.float32),
            shapes,
            is_leaf=lambda shape: isinstance(shape, tuple),
        )
        for _ in shardings
    ]
    own = [here.put(tree) for here, tree in zip(shardings, whole, strict=True)]
    ring = Ring.of(CASE, 0, [3, 5], length=56, shards=2)
    results = average(ring, own, "float32", random.Random(0), shardings)
    for result, here in zip(results, shardings, strict=True):
        jax.tree.map(np.testing.assert_array_equal, result, jax.tree.map(np.add, *whole))
        assert jax.tree.map(lambda leaf: leaf.sharding, result) == here.of_tree(result)


@pytest.mark.parametrize("carries_messages", [False, True])
def test_hops_go_to_the_next_of_the_ring_and_have_their_own_names(carries_messages: bool):
    ring = ring_of([4, 7, 5], 1000, 100)
    if not carries_messages:
        ring = Ring.of(CASE, 2, [4, 7, 5], length=1000)
    hops = [*ring.hops]
    pairs = {*zip(ring.nodes, (*ring.nodes[1:], ring.nodes[0]), strict=True)}
    assert {(hop.source, hop.target) for hop in hops} == pairs
    assert len({hop.name for hop in hops}) == 3 * ring.steps * ring.chunks


def test_many_chunks_are_few_programs_and_no_second_copy():
    """Of a stage that is cut into hundreds of chunks, what is sent is taken out at its turn."""
    case = case_of(2, 0.5 * MB)
    own = [{"matrix": jnp.full((2000, 1999), 1.0 + node)} for node in range(2)]
    size = own[0]["matrix"].nbytes
    ring = Ring.of(case, 0, [0, 1], size // 4, hop_bytes=0.1 * MB)
    assert ring.chunks > 200
    held = held_bytes()
    parts = [RingPart(ring, node, own[node], jnp.dtype(jnp.float32)) for node in range(2)]
    del own
    # Instead of the gradients, and rounded up: of each replica, all chunks of both segments.
    assert held_bytes() - held <= 2 * 2 * ring.chunks * 4
    most = 0
    for chunk, both in enumerate(zip(parts[0].begin(), parts[1].begin(), strict=True)):
        for part, other, (_, own_part) in zip(parts, parts[::-1], both[::-1], strict=True):
            sums = part.arrive(0, chunk, own_part)
            assert sums is not None
            assert other.arrive(1, chunk, sums[1]) is None
        most = max(most, held_bytes())
    assert most - held < 20 * ring.chunk_length * 4
    for part in parts:
        assert part.left == 0
        np.testing.assert_array_equal(part.result()["matrix"], np.full((2000, 1999), 3.0))


def held_bytes() -> int:
    """Of all arrays that are held."""
    return sum(array.nbytes for array in jax.live_arrays())


# Messages of replicas that go apart.


def ring_of(replicas: list[int], length: int, chunk_length: int) -> Ring:
    """The ring of replicas on these nodes, in the planner's order, with chunks of this length."""
    nodes = max(replicas) + 2
    plan = plan_of([[0], [*range(1, nodes)]], [[0, 1]])
    longest = jax.ShapeDtypeStruct((length,), jnp.int8)
    ring = Ring.of_messages(plan.case, 1, replicas, longest)
    assert ring.chunks * ring.chunk_length >= length
    return replace(ring, chunks=-(-length // chunk_length), chunk_length=chunk_length)


@settings(max_examples=15)
@given(st.data())
def test_every_replica_comes_to_have_all_messages(data: st.DataObject):
    count = data.draw(st.integers(2, 5))
    replicas = data.draw(st.permutations(range(1, count + 1)))
    length = data.draw(st.sampled_from([1, 8, 9]))
    ring = ring_of([*replicas], length, data.draw(st.sampled_from([1, 4])))
    # By the place of a replica in its stage, which is not that in the ring.
    messages = {place: jnp.arange(length, dtype=jnp.int8) + 20 * place for place in range(count)}
    parts = [Gathering(ring, node, messages[replicas.index(node)]) for node in ring.nodes]
    pass_round(parts, random.Random(data.draw(st.integers(0, 99))))
    for part in parts:
        found = part.messages()
        assert found.keys() == messages.keys()
        for place, message in messages.items():
            np.testing.assert_array_equal(found[place], message)
