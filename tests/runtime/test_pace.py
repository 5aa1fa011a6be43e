"""What a ring has on its way at once: little beside a hop, and enough for its links."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.problem.case import Case, parse_case
from skippipe_sched.problem.links import GIBIBYTE

from skippipe_jax.program.hops import HopNumbers
from skippipe_jax.runtime.pace import (
    ANSWER_S,
    LARGEST_CHUNK_BYTES,
    LEAST_CHUNK_S,
    SHARE_OF_HOP,
    SMALLEST_CHUNK_BYTES,
    chunk_bytes,
)
from skippipe_jax.runtime.ring import ENOUGH_CHUNKS, FEWEST_CHUNKS, Ring

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
    ring = Ring.of(case, 0, range(nodes), HopNumbers(), length, width=WIDTH, hop_bytes=hop_bytes)
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
    ring = Ring.of(case_of(2, 10_000 * MB), 0, [0, 1], HopNumbers(), length)
    assert chunks <= ring.chunks <= chunks + 8
    assert 2 * ring.chunks * ring.chunk_length >= length


def test_a_large_stage_has_as_many_chunks_as_it_takes():
    ring = Ring.of(case_of(2, 10 * MB), 0, [0, 1], HopNumbers(), 10**9)
    assert ring.chunk_length * WIDTH <= LARGEST_CHUNK_BYTES
    assert ring.chunks == 1920
    assert ring.blocks == 32
    assert ring.ahead == (3, 2)


def test_numbers_that_are_rounded_make_chunks_of_as_many_bytes():
    case = case_of(2, 10 * MB)
    whole, rounded = (
        Ring.of(case, 0, [0, 1], HopNumbers(), 10**8, width=width) for width in (4, 2)
    )
    assert rounded.chunk_length == pytest.approx(2 * whole.chunk_length, rel=0.02)
