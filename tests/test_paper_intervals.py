"""The paper's figures say how sure they are: means over seeds with their intervals."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.paper import intervals


def test_an_interval_is_that_of_the_paired_differences():
    """By hand: differences 0.1, 0.2, 0.3, 0.2, 0.2 deviate by 0.0707; t(4) is 2.776."""
    control = [1.0, 1.5, 1.2, 1.1, 1.4, 9.9]
    arm = [1.1, 1.7, 1.5, 1.3, 1.6]
    differences = intervals.paired(arm, control)
    assert differences == pytest.approx([0.1, 0.2, 0.3, 0.2, 0.2])
    own = intervals.intervals({"arm": differences})["arm"]
    half = 2.776445 * math.sqrt(0.005) / math.sqrt(5)
    assert (own.mean, own.seeds, own.pooled) == (pytest.approx(0.2), 5, False)
    assert (own.low, own.high) == (pytest.approx(0.2 - half), pytest.approx(0.2 + half))


def test_two_seeds_are_judged_by_the_deviation_of_all_arms():
    """By hand: squares 0.08, 0.5 and 0.02 over 2 + 1 + 1 degrees of freedom."""
    arms = {"three": [0.8, 1.0, 1.2], "two": [1.0, 2.0], "also": [3.0, 3.2], "one": [5.0]}
    found = intervals.intervals(arms)
    deviation = math.sqrt((0.08 + 0.5 + 0.02) / 4)
    for name, mean, seeds in (("two", 1.5, 2), ("also", 3.1, 2), ("one", 5.0, 1)):
        half = 2.776445 * deviation / math.sqrt(seeds)
        own = found[name]
        assert (own.mean, own.seeds, own.pooled) == (pytest.approx(mean), seeds, True)
        assert (own.low, own.high) == (pytest.approx(mean - half), pytest.approx(mean + half))
    own = found["three"]
    half = 4.302653 * 0.2 / math.sqrt(3)
    assert (own.high, own.pooled) == (pytest.approx(1.0 + half), False)


def test_a_single_seed_has_a_mean_and_no_interval():
    own = intervals.figures({"one": [0.1], "other": [0.3]})
    assert own["one"] == {"mean": 0.1, "low": None, "high": None, "seeds": 1, "pooled": True}


@settings(max_examples=30)
@given(
    st.lists(st.floats(-10, 10), min_size=3, max_size=6),
    st.floats(-10, 10),
    st.floats(0.1, 10),
)
def test_an_interval_moves_and_grows_with_its_values(
    values: list[float], moved: float, times: float
):
    own = intervals.intervals({"own": values})["own"]
    other = intervals.intervals({"own": [times * value + moved for value in values]})["own"]
    for before, after in ((own.low, other.low), (own.high, other.high), (own.mean, other.mean)):
        assert before is not None
        assert after == pytest.approx(times * before + moved, abs=1e-6)
