"""When steps count, and checkpoints are whole: by formula as by going through the steps."""

from hypothesis import given
from hypothesis import strategies as st
from skippipe_sched.churn.simulation import StepSchedule

# Eighths of a second, so that sums are exact.
SECONDS = st.integers(0, 80).map(lambda eighths: eighths / 8)


def gone_through(pace, end_s):
    """The steps and the last checkpoint at the end, step by step."""
    time_s, step, saved = pace.start_s, pace.step, None
    while time_s + pace.iteration_s <= end_s:
        time_s, step = time_s + pace.iteration_s, step + 1
        if step % pace.save_every == 0:
            time_s += pace.save_s
            saved = step if time_s <= end_s else saved
    return step, saved


@given(
    start_s=SECONDS,
    step=st.integers(0, 9),
    iteration_s=SECONDS.map(lambda seconds: seconds + 0.125),
    save_every=st.integers(1, 5),
    save_s=SECONDS,
    watched_s=SECONDS,
)
def test_a_pace_is_what_going_through_the_steps_says(
    start_s, step, iteration_s, save_every, save_s, watched_s
):
    pace = StepSchedule(start_s, step, iteration_s, save_every, save_s)
    end_s = start_s + 4 * watched_s
    found = pace.steps_by(end_s), pace.saved_by(end_s)
    assert found == gone_through(pace, end_s)
    free_s = pace.free_after(end_s)
    assert free_s >= end_s
    assert free_s in [pace.free_s(found[0]), pace.free_s(found[0] + 1)]
