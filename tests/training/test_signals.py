"""What signals do to a run that trains: the first one asks it to stop, the second one ends it."""

from __future__ import annotations

import signal
from signal import SIGINT, SIGTERM

import pytest
from skippipe_sched.errors import Terminated

from skippipe_jax.training.signals import stop_signals


@pytest.mark.parametrize("first", [SIGINT, SIGTERM], ids=str)
@pytest.mark.parametrize("second", [SIGINT, SIGTERM], ids=str)
def test_a_second_signal_ends_the_program_at_once_as_that_signal_does(
    first: signal.Signals, second: signal.Signals
):
    """By SIGINT a user ends all hosts, by SIGTERM a scheduler this one, and it may send two."""
    told: list[signal.Signals] = []
    with stop_signals(when_received=told.append) as received:
        signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt) as caught:
            signal.raise_signal(second)
        assert received == told == [first]
    assert caught.type is (Terminated if second == SIGTERM else KeyboardInterrupt)
