"""Hosts that are threads tell each other what they have."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.cluster.agreement import barrier, from_host_0, gather, hear, tell
from skippipe_jax.errors import PeerFailed
from tests.harness.thread_hosts import ThreadHost, on_hosts

WAIT_S = 30.0


def wrong(host: ThreadHost) -> Any:
    raise InputError("field", host.index, "is wrong", "Mend it")


def test_all_get_what_host_0_makes():
    made = []

    def make(host: ThreadHost) -> Any:
        made.append(host.index)
        return {"step": 3, "nodes": (1, 2), "of": None}

    told = on_hosts(3, lambda host: from_host_0(host, "it", lambda: make(host), WAIT_S))
    # A tuple and a list must not differ by host.
    assert told == [{"step": 3, "nodes": [1, 2], "of": None}] * 3
    assert made == [0]


def test_a_host_alone_agrees_with_itself():
    host = ThreadHost()
    assert from_host_0(host, "a", lambda: (1,), 0.0) == [1]
    assert gather(host, "b", lambda: "x", 0.0) == {0: "x"}
    barrier(host, "c", 0.0)


def test_where_host_0_fails_all_others_name_its_error():
    own, *others = on_hosts(3, lambda host: from_host_0(host, "it", lambda: wrong(host), WAIT_S))
    assert isinstance(own, InputError)
    for error in others:
        assert isinstance(error, PeerFailed)
        assert str(error) == "host 5 failed at 'it': InputError: field = 0: is wrong. Mend it."
        assert error.kind == "InputError"


def test_what_json_cannot_hold_is_an_error_for_all():
    own, other = on_hosts(2, lambda host: from_host_0(host, "it", object, WAIT_S))
    assert isinstance(own, TypeError)
    assert isinstance(other, PeerFailed)


def test_only_those_that_are_asked_tell():
    def act(host: ThreadHost) -> Any:
        return gather(host, "text", lambda: f"of {host.index}", WAIT_S, hosts=[1, 3])

    assert on_hosts(4, act) == [{1: "of 1", 3: "of 3"}] * 4


def test_who_tells_waits_for_nobody():
    host = ThreadHost(count=2)
    assert tell(host, "it", lambda: (1,)) == [1]
    assert hear(host.peer(1), "it", [0], 0.0) == {0: [1]}
    assert hear(host.peer(1), "nothing", [], 0.0) == {}


def test_nobody_passes_a_barrier_before_the_last_has_come():
    came = threading.Event()

    def act(host: ThreadHost) -> bool:
        if host.index == 1:
            time.sleep(0.1)
            came.set()
        barrier(host, "it", WAIT_S)
        return came.is_set()

    assert on_hosts(3, act) == [True] * 3


@pytest.mark.parametrize(
    "act",
    [
        lambda host: from_host_0(host.peer(1), "it", list, 0.05),
        lambda host: gather(host, "it", list, 0.05),
        lambda host: hear(host, "it", [0, 1, 2], 0.05),
        lambda host: barrier(host, "it", 0.05),
    ],
)
def test_who_waits_in_vain_learns_for_whom(act: Any):
    with pytest.raises(TimeoutError, match=r"it/\d of host \d"):
        act(ThreadHost(count=3))


def test_the_deadline_counts_for_all_that_is_waited_for():
    class Slow(ThreadHost):
        def get(self, key: str, timeout_s: float, source: int) -> str:
            left_s.append(timeout_s)
            time.sleep(0.1)
            return '{"value": 0}'

    left_s: list[float] = []
    hear(Slow(count=4), "it", range(4), 0.25)
    assert left_s[0] <= 0.25
    assert left_s[1] <= left_s[0] - 0.1
    assert left_s[3] == 0.0
