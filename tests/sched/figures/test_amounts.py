"""Bytes and seconds as people read them."""

import pytest
from skippipe_sched.figures.amounts import seconds_text, size_text


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
