"""Offset to the clock of the leader, whoever leads, as long as it does."""

from __future__ import annotations

import json
import time

import pytest

from skippipe_jax.cluster.membership import CLOCK_EXCHANGES, Membership
from skippipe_jax.config import ClusterConfig
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.errors import GenerationEnded


@pytest.fixture
def host() -> Membership:
    """Host 0 in a generation that host 1 leads."""
    host = Membership(ClusterConfig(), 0, 2)
    host.inbox.begin(2)
    return host


def offset_s(host: Membership) -> float:
    return host.group_of(Generation(2, (0, 1), (7, 7), leader=1, step=0)).clock_offset_s()


def test_of_some_answers_the_quickest_counts(host: Membership, monkeypatch: pytest.MonkeyPatch):
    round_trips = iter([0.02, 0.01, *[0.03] * (CLOCK_EXCHANGES - 2)])
    asked = []

    def answer(leader: int, kind: str, sent: float) -> None:
        asked.append((leader, kind))
        seconds = next(round_trips)
        host.inbox.post(1, 2, "clock/1", json.dumps([seconds, 100 * seconds]))

    monkeypatch.setattr(host, "send", answer)
    assert offset_s(host) == 1.0
    assert asked == [(1, "clock")] * CLOCK_EXCHANGES


def test_an_answer_was_given_half_a_round_trip_ago(host: Membership):
    assert host._received(1, ["clock", time.monotonic() - 2.0, time.time() + 50.0])
    round_trip, offset_s = json.loads(host.inbox.take("clock/1", 0.0, 1, 2))
    assert round_trip == pytest.approx(2.0, abs=0.5)
    assert offset_s == pytest.approx(51.0, abs=0.5)


def test_who_asks_a_leader_that_is_lost_meanwhile_waits_no_longer(
    host: Membership, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host, "send", lambda *_: host.inbox.begin(3))
    with pytest.raises(GenerationEnded):
        offset_s(host)
