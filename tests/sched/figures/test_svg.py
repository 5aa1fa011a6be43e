"""What pictures are drawn with."""

import pytest
from skippipe_sched.figures.svg import round_ticks


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
