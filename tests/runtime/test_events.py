"""What happens on a host is taken in turn, and is waited for no longer than the deadline."""

from __future__ import annotations

import pytest

from skippipe_jax.errors import PeerTimeout
from skippipe_jax.runtime.events import EventLoop


def test_what_has_come_is_taken_though_the_deadline_has_passed():
    loop, taken = EventLoop(deadline_s=30.0), []
    loop.post(taken.append)
    # As after a sleep of the host, or after this thread was long at something else.
    loop.last_event_s -= 100.0
    loop.run_one(lambda: "an array")
    assert len(taken) == 1


def test_what_has_not_come_is_not_waited_for_after_the_deadline():
    loop = EventLoop(deadline_s=30.0)
    loop.last_event_s -= 100.0
    with pytest.raises(PeerTimeout, match="an array"):
        loop.run_one(lambda: "an array")
