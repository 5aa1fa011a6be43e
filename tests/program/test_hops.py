"""Numbers of hops are handed out once, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skippipe_jax.program.hops import HopNumbers


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(0, 1000))
def test_no_number_is_handed_out_twice(counts: list[int], free: int):
    numbers = HopNumbers(free)
    taken = [number for count in counts for number in numbers.take(count)]
    assert taken == list(range(free, free + sum(counts)))
    assert numbers.free == free + sum(counts)
