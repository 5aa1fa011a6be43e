"""Numbers of hops are handed out once, in order, and not beyond what a name can hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippipe_jax.program.hops import NUMBER_BITS, HopNumbers


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(0, 1000))
def test_no_number_is_handed_out_twice(counts: list[int], free: int):
    numbers = HopNumbers(free)
    taken = [number for count in counts for number in numbers.take(count)]
    assert taken == list(range(free, free + sum(counts)))
    assert numbers.free == free + sum(counts)


def test_what_no_name_can_hold_is_refused():
    numbers = HopNumbers()
    numbers.take(1 << NUMBER_BITS)
    with pytest.raises(ValueError, match="names hold"):
        numbers.take(1)
