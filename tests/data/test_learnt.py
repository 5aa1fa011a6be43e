"""Stretches of learnt tokens say of every token, and of every span, what a mask of all says."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from skippipe_jax.data.rows import LossMask


@given(st.lists(st.booleans(), max_size=40), st.data())
def test_stretches_say_what_a_mask_says(flags, data):
    mask = np.array(flags, bool)
    learnt = LossMask.where(mask)
    places = np.arange(len(mask) + 1)
    np.testing.assert_array_equal(learnt.before(places), np.concatenate([[0], np.cumsum(mask)]))
    assert learnt.count == mask.sum()
    start = data.draw(st.integers(0, len(mask)))
    stop = data.draw(st.integers(start, len(mask)))
    np.testing.assert_array_equal(learnt.of(start, stop), mask[start:stop])


def test_stretches_that_touch_are_as_good_as_one():
    learnt = LossMask(np.array([1, 3, 7]), np.array([3, 4, 9]))
    assert learnt.of(2, 8).tolist() == [True, True, False, False, False, True]
    assert learnt.before(np.array([0, 2, 3, 4, 8, 20])).tolist() == [0, 1, 2, 3, 4, 5]
