"""Ballots: whoever dies and whichever link is cut, those that are enough go on."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count

import pytest

from skippipe_jax.consensus.control import TICK_S
from skippipe_jax.consensus.generations import Ask, Presence, Received, Tick
from tests.consensus.exploration import explore
from tests.consensus.simulation import Simulation, lose, pass_time, step, stepped


def deliver_some(simulation: Simulation, kind: type, source: int, target: int) -> None:
    """Deliver the messages of a kind from a host to another, and lose all others."""
    messages, simulation.messages = simulation.messages, []
    for sender, sent in messages:
        if (sender, sent.target) == (source, target) and isinstance(sent.message, kind):
            simulation.tell(target, Received(sender, sent.message))


@pytest.mark.parametrize("hosts", [3, 4, 5])
def test_a_ballot_of_the_same_round_that_a_dead_host_left_is_outbid(hosts: int):
    """Hosts 0 and 1 do not hear each other; the ballot of 1 is the first that 2 hears of."""
    simulation = stepped(hosts)
    for host, other in ((0, 1), (1, 0)):
        simulation.tell(host, Presence(other, is_there=False))
        simulation.tell(host, Tick())
    deliver_some(simulation, Ask, 1, 2)
    promised = simulation.live[2].state.promised
    assert promised == (1, 1)
    simulation.messages.clear()
    lose(simulation, 1)
    pass_time(simulation, 3)
    left = tuple(host for host in range(hosts) if host != 1)
    second = simulation.decided[2]
    assert second.members == left
    step(simulation)
    assert {len(own.applied) for own in simulation.live.values()} == {second.step + 1}


class Timed:
    """A simulation in which messages take a while, and hosts tick by their own clocks [s]."""

    def __init__(self, hosts: int, seed: int, cut: set[frozenset[int]]):
        self.simulation = stepped(hosts)
        self.now_s, self.cut, self._random = 0.0, cut, random.Random(seed)
        self._order, self._waiting = count(), list[tuple[float, int, Callable[[], None]]]()
        for host in range(hosts):
            self.later(self._random.uniform(0, TICK_S), lambda host=host: self._tick(host))
        for host, other in (pair for link in cut for pair in (sorted(link), sorted(link)[::-1])):
            self.later(self._random.uniform(0, TICK_S), lambda h=host, o=other: self._miss(h, o))

    def later(self, delay_s: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._waiting, (self.now_s + delay_s, next(self._order), then))

    def run(self, until_s: float) -> None:
        while self._waiting[0][0] < until_s:
            self.now_s, _, then = heapq.heappop(self._waiting)
            then()
            for source, sent in self.simulation.messages:
                if {source, sent.target} not in self.cut:
                    event = Received(source, sent.message)
                    delay_s = self._random.uniform(0.01, 0.1)
                    self.later(delay_s, lambda t=sent.target, e=event: self.simulation.tell(t, e))
            self.simulation.messages.clear()

    def _miss(self, host: int, other: int) -> None:
        self.simulation.tell(host, Presence(other, is_there=False))

    def _tick(self, host: int) -> None:
        self.simulation.hold(host)
        self.simulation.tell(host, Tick())
        self.later(TICK_S, lambda: self._tick(host))


@pytest.mark.parametrize("others", [(0, 2), (0, 3)])
def test_a_host_that_hears_too_few_holds_up_nobody(others: tuple[int, int]):
    for seed in range(12):
        timed = Timed(4, seed, {frozenset({1, other}) for other in others})
        timed.run(30.0)
        healthy = [timed.simulation.live[host] for host in (0, 2, 3)]
        before = min(len(own.applied) for own in healthy)
        timed.run(40.0)
        assert min(len(own.applied) for own in healthy) > before, f"seed {seed}"


CASES = [(cut, dies) for cut in ((0, 1), (0, 2), (1, 2)) for dies in range(3)]
SMALL = [case for case in CASES if case[0] != (0, 1) or case[1] == 1]


@pytest.mark.parametrize(("cut", "dies"), SMALL)
def test_three_hosts_agree_and_go_on_in_every_order(cut: tuple[int, int], dies: int):
    assert explore(cut, dies, rounds=1) > 50


@pytest.mark.parametrize("abandons", range(3))
def test_three_hosts_agree_and_go_on_whenever_one_abandons_its_generation(abandons: int):
    """Where they have more states than that, the first of them."""
    assert explore((1, 2), 0, rounds=2, most=10_000, abandons=abandons) > 50


@pytest.mark.slow
@pytest.mark.parametrize("abandons", [None, 0, 1, 2])
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(("cut", "dies"), CASES)
def test_three_hosts_agree_and_go_on_in_every_order_of_more_ballots(
    cut: tuple[int, int], dies: int, rounds: int, abandons: int | None
):
    """Where two rounds have more states than that, the first of them."""
    assert explore(cut, dies, rounds, most=300_000, abandons=abandons) > 50
