"""Bytes, times and ticks as people read them."""

import pytest
from skippipe_sched.figures.amounts import duration_text, seconds_text, size_text
from skippipe_sched.figures.svg import round_ticks


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999.4, "999 B"), (999.6, "1.00 kB"), (33554432, "33.6 MB"), (4e15, "4000 TB")],
)
def test_sizes_have_three_digits(size, text):
    assert size_text(size) == text


def test_seconds_have_three_digits():
    assert [seconds_text(s) for s in (0.00123, 2, 142.5, 4321)] == [
        "0.00123 s",
        "2.00 s",
        "142 s",
        "4321 s",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.25, "0.25s"),
        (59.99, "1min"),
        (90, "1.5min"),
        (75600, "21h"),
        (126144e3, "1460d"),
    ],
)
def test_durations_have_the_unit_that_suits_them(seconds, text):
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("start", "end", "most", "ticks"),
    [
        (0.0, 5.2, 12, [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5]),
        (2.05, 3.01, 5, [2.2, 2.4, 2.6, 2.8, 3.0]),
        (1, 2, 6, [1, 1.2, 1.4, 1.6, 1.8, 2]),
        (-0.3, 0.3, 3, [-0.2, 0, 0.2]),
    ],
)
def test_ticks_are_round_numbers(start, end, most, ticks):
    assert round_ticks(end, start, most) == pytest.approx(ticks)
