"""The ring: the sum of all, the same bits everywhere, whatever the order of arrival."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe_jax.program.hops import Hop, HopNumbers
from skippipe_jax.runtime.ring import CHUNK_BYTES, FEWEST_CHUNKS, MOST_CHUNKS, Ring, RingPart

SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=3)


def gradients(shapes: list[tuple[int, ...]], seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {f"{i}": jnp.asarray(random.normal(size=s), jnp.float32) for i, s in enumerate(shapes)}


def average(ring: Ring, own: list[Any], dtype: Any, pick: random.Random) -> list[Any]:
    """What every replica ends with, when hops take any time they like."""
    parts = [RingPart(ring, node, own[i], jnp.dtype(dtype)) for i, node in enumerate(ring.nodes)]
    expected = {
        hop: (part, step, chunk) for part in parts for step, chunk, hop in list(part.unasked)
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


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(2, 5), SHAPES, st.sampled_from(["float32", "bfloat16"]), st.integers(0, 99))
def test_all_replicas_get_the_sum_and_the_same_bits(
    replicas: int, shapes: list[tuple[int, ...]], dtype: str, seed: int
):
    own = [gradients(shapes, seed + replica) for replica in range(replicas)]
    length = sum(leaf.size for leaf in jax.tree.leaves(own[0]))
    nodes = [3 + 2 * position for position in range(replicas)]
    ring = Ring.of(0, nodes, HopNumbers(10), length)
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
    ring = Ring.of(2, [4, 7, 5], numbers, length=1000)
    assert (ring.numbers.start, ring.numbers.stop) == (100, numbers.free)
    hops = [
        ring.hop(position, step, chunk)
        for position in range(3)
        for step in range(ring.steps)
        for chunk in range(ring.chunks)
    ]
    assert {(hop.source, hop.target) for hop in hops} == {(4, 7), (7, 5), (5, 4)}
    assert sorted(hop.number for hop in hops) == list(ring.numbers)


@pytest.mark.parametrize(
    ("length", "chunks"),
    [(1, FEWEST_CHUNKS), (2 * 8 * CHUNK_BYTES // 4, 8), (10**9, MOST_CHUNKS)],
)
def test_chunks_are_neither_too_many_nor_too_few(length: int, chunks: int):
    ring = Ring.of(0, [0, 1], HopNumbers(0), length)
    assert ring.chunks == chunks
    assert 2 * ring.chunks * ring.chunk_length >= length
