"""The paper's figures say how sure they are: means over seeds with their intervals, by hand."""

from __future__ import annotations

import math

import pytest

from experiments.paper import intervals


def test_an_interval_is_that_of_the_paired_differences():
    """By hand: differences 0.1, 0.2, 0.3, 0.2, 0.2 deviate by 0.0707; t(4) is 2.776."""
    control = [1.0, 1.5, 1.2, 1.1, 1.4, 9.9]
    arm = [1.1, 1.7, 1.5, 1.3, 1.6]
    own = intervals.minus({"arm": arm}, control)["arm"]
    half = 2.776445 * math.sqrt(0.005) / math.sqrt(5)
    expected = {"mean": 0.2, "low": 0.2 - half, "high": 0.2 + half, "seeds": 5, "pooled": False}
    assert own == pytest.approx(expected, abs=1e-5)


def test_two_seeds_are_judged_by_the_deviation_of_all_arms():
    """By hand: squares 0.08, 0.5 and 0.02 over 2 + 1 + 1 degrees of freedom."""
    arms = {"three": [0.8, 1.0, 1.2], "two": [1.0, 2.0], "also": [3.0, 3.2], "one": [5.0]}
    found = intervals.figures(arms)
    deviation = math.sqrt((0.08 + 0.5 + 0.02) / 4)
    for name, mean, seeds in (("two", 1.5, 2), ("also", 3.1, 2), ("one", 5.0, 1)):
        half = 2.776445 * deviation / math.sqrt(seeds)
        expected = {"mean": mean, "low": mean - half, "high": mean + half, "seeds": seeds}
        assert found[name] == pytest.approx(expected | {"pooled": True}, abs=1e-5)
    assert found["three"]["high"] == pytest.approx(1.0 + 4.302653 * 0.2 / math.sqrt(3), abs=1e-5)
    assert not found["three"]["pooled"]


def test_a_single_seed_has_a_mean_and_no_interval():
    own = intervals.figures({"one": [0.1], "other": [0.3]})
    assert own["one"] == {"mean": 0.1, "low": None, "high": None, "seeds": 1, "pooled": True}
