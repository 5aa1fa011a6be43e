"""What SIGTERM means to a host: alone, within one JAX, and among hosts that go on without it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from signal import SIGINT, SIGTERM
from types import SimpleNamespace
from typing import Any

import pytest
from skippipe_sched.errors import Terminated

from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE
from skippipe_jax.cluster.inbox import NOBODY
from skippipe_jax.training import preemption
from skippipe_jax.training.preemption import Preemption

GRACE_S = 7.0


class Hosts:
    """The others, who may go on without this host."""

    def __init__(self, count: int = 3, *, is_distributed: bool = False):
        self.index, self.count, self.is_distributed = 1, count, is_distributed
        self.generation_number = 4
        self.is_the_end = False
        self.told: list[tuple[float, Callable[[], None]]] = []
        self.last_words = lambda: "Resume from step 7."

    @property
    def control(self) -> Any:
        assert self.count > 1
        assert not self.is_distributed
        return SimpleNamespace(
            is_the_end=self.is_the_end, start_leaving=lambda *given: self.told.append(given)
        )


def preemption_of(hosts: Any) -> Preemption:
    return Preemption(hosts, GRACE_S)


@pytest.mark.parametrize("hosts", [Hosts(count=1), Hosts(is_distributed=True)])
def test_where_no_host_can_go_alone_any_signal_ends_the_run(hosts: Hosts):
    here = preemption_of(hosts)
    assert not here.votes_to_end()
    here.receive(SIGTERM)
    assert hosts.told == []
    assert here.votes_to_end()
    assert not here.has_left()


def test_a_host_among_others_leaves_unless_too_many_do():
    here = preemption_of(hosts := Hosts())
    here.receive(SIGINT)
    assert hosts.told == []
    assert here.votes_to_end()
    here = preemption_of(hosts)
    here.receive(SIGTERM)
    [(grace_s, _)] = hosts.told
    assert grace_s == GRACE_S
    assert not here.votes_to_end()
    assert not here.has_left()
    hosts.is_the_end = True
    assert here.votes_to_end()
    assert preemption_of(hosts).votes_to_end(), "whoever was told"


def test_a_host_has_left_once_others_go_on_without_it():
    here = preemption_of(hosts := Hosts())
    hosts.generation_number = NOBODY
    assert not here.has_left()  # It was left out, and comes back.
    here.receive(SIGTERM)
    assert here.has_left()
    assert here.must_stay, "no grace ends it now"


def test_a_host_goes_when_its_time_is_over_unless_the_run_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    codes: list[int] = []
    monkeypatch.setattr(preemption, "exit_at_once", codes.append)
    here = preemption_of(hosts := Hosts())
    here.receive(SIGTERM)
    [(_, late)] = hosts.told
    hosts.is_the_end = True
    late()
    hosts.is_the_end, here.must_stay = False, True
    late()
    assert codes == []
    here.must_stay = False
    late()
    assert codes == [LOST_HOST_EXIT_CODE]
    told = "".join(capfd.readouterr())
    assert "grace_s = 7 s; exiting, the others will see a failure. Resume from step 7.\n" in told


@pytest.mark.parametrize("first", [SIGINT, SIGTERM], ids=str)
@pytest.mark.parametrize("second", [SIGINT, SIGTERM], ids=str)
def test_a_second_signal_ends_the_program_at_once_as_that_signal_does(
    first: signal.Signals, second: signal.Signals
):
    """By SIGINT a user ends all hosts, by SIGTERM a scheduler this one, and it may send two."""
    here = preemption_of(Hosts(count=1))
    with here.handling():
        signal.raise_signal(first)
        with pytest.raises(KeyboardInterrupt) as caught:
            signal.raise_signal(second)
    assert here.received == first
    assert caught.type is (Terminated if second == SIGTERM else KeyboardInterrupt)
