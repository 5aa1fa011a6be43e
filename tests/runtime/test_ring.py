"""The ring: the sum of all, the same bits everywhere, whatever the order of arrival."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe_jax.program.hops import Hop, HopNumbers
from skippipe_jax.runtime.ring import Ring, RingPart
from tests.runtime.test_pace import MB, case_of

SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=3)
CASE = case_of(12, 100 * MB)


def gradients(shapes: list[tuple[int, ...]], seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {f"{i}": jnp.asarray(random.normal(size=s), jnp.float32) for i, s in enumerate(shapes)}


def average(ring: Ring, own: list[Any], dtype: Any, pick: random.Random) -> list[Any]:
    """What every replica ends with, when hops take any time they like."""
    parts = [RingPart(ring, node, own[i], jnp.dtype(dtype)) for i, node in enumerate(ring.nodes)]
    expected = {
        hop: (part, step, chunk) for part in parts for step, chunk, hop, _ in list(part.unrequested)
    }
    assert len(expected) == len(ring.numbers)
    underway: dict[Hop, Any] = {}
    for part in parts:
        underway |= dict(part.begin())
    while underway:
        hop = pick.choice(list(underway))
        array = underway.pop(hop)
        part, step, chunk = expected.pop(hop)
        assert (array.shape, array.dtype) == (part.travelling.shape, part.travelling.dtype)
        going_on = part.arrive(step, chunk, array)
        if going_on is not None:
            underway |= dict([going_on])
    assert not expected
    assert all(part.left == 0 for part in parts)
    return [part.result() for part in parts]


@settings(max_examples=25)
@given(st.integers(2, 5), SHAPES, st.sampled_from(["float32", "bfloat16"]), st.integers(0, 99))
def test_all_replicas_get_the_sum_and_the_same_bits(
    replicas: int, shapes: list[tuple[int, ...]], dtype: str, seed: int
):
    own = [gradients(shapes, seed + replica) for replica in range(replicas)]
    length = sum(leaf.size for leaf in jax.tree.leaves(own[0]))
    nodes = [3 + 2 * position for position in range(replicas)]
    ring = Ring.of(CASE, 0, nodes, HopNumbers(10), length)
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


def test_hops_go_to_the_next_of_the_ring_and_have_their_own_numbers():
    numbers = HopNumbers(100)
    ring = Ring.of(CASE, 2, [4, 7, 5], numbers, length=1000)
    assert (ring.numbers.start, ring.numbers.stop) == (100, numbers.free)
    hops = [
        ring.hop(position, step, chunk)
        for position in range(3)
        for step in range(ring.steps)
        for chunk in range(ring.chunks)
    ]
    assert {(hop.source, hop.target) for hop in hops} == {(4, 7), (7, 5), (5, 4)}
    assert sorted(hop.number for hop in hops) == list(ring.numbers)


def test_many_chunks_are_few_programs_and_no_second_copy():
    """Of a stage that is cut into hundreds of chunks, what is sent is taken out at its turn."""
    case = case_of(2, 0.5 * MB)
    own = [{"matrix": jnp.full((2000, 1999), 1.0 + node)} for node in range(2)]
    size = own[0]["matrix"].nbytes
    ring = Ring.of(case, 0, [0, 1], HopNumbers(), size // 4, hop_bytes=0.1 * MB)
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
