"""Bytes and times as people read them."""

import pytest
from skippipe_sched.figures.amounts import duration_text, seconds_text, size_text


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
