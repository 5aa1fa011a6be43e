"""How far the clock of another host is: of the leader, whoever leads, as long as it does."""

from __future__ import annotations

import json
import time

import pytest

from skippipe_jax.cluster.inbox import Inbox
from skippipe_jax.connections import clock
from skippipe_jax.errors import GenerationEnded


def test_of_some_answers_the_quickest_counts():
    round_trips = [0.02, 0.01, *[0.03] * (clock.EXCHANGES - 2)]
    answers = iter([json.dumps([seconds, 100 * seconds]) for seconds in round_trips])
    asked: list[float] = []
    assert clock.offset_s(asked.append, lambda: next(answers)) == 1.0
    assert len(asked) == clock.EXCHANGES


def test_an_answer_was_given_half_a_round_trip_ago():
    sent, theirs = time.monotonic() - 2.0, time.time() + 50.0
    round_trip, offset_s = json.loads(clock.answered(sent, theirs))
    assert round_trip == pytest.approx(2.0, abs=0.5)
    assert offset_s == pytest.approx(51.0, abs=0.5)


def test_who_asks_a_leader_that_is_lost_meanwhile_waits_no_longer():
    inbox = Inbox()
    inbox.begin(2)
    with pytest.raises(GenerationEnded):
        clock.offset_s(lambda _: inbox.begin(3), lambda: inbox.take(clock.key(1), 60.0, 1, 2))
