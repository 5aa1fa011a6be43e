"""Values as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.errors import InputError
from skippipe_sched.fields import UNITS_S, duration
from skippipe_sched.figures.amounts import duration_text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("0s", 0), ("1.5 min", 90), ("2h", 7200), (" 7d ", 604800), ("1e3s", 1000)],
)
def test_a_time_has_its_unit(text, seconds):
    assert duration(text, "--mtbf") == seconds


@given(count=st.integers(1, 999), unit=st.sampled_from([*UNITS_S]))
def test_a_time_that_is_told_is_read_again(count, unit):
    seconds = count * UNITS_S[unit]
    assert duration(duration_text(seconds), "--mtbf") == pytest.approx(seconds, rel=0.005)


@pytest.mark.parametrize("text", ["", "s", "7", "2 H", "5m", "1h30min", "-1s", "nan s", "1e101s"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(InputError, match=r"^--mtbf = "):
        duration(text, "--mtbf")
