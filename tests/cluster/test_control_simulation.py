"""The control plane under faults, on a simulated clock, network and storage.

A seed that fails is shown with all that happened, and the same seed fails again.
"""

from __future__ import annotations

from datetime import date

import pytest

from skippipe_jax.training.elastic.coordinator import Confirming, Suspended
from tests.cluster.control_simulation import CLUSTER, simulate, simulated
from tests.training.test_rounds import OPENING


@pytest.mark.parametrize("seed", range(6))
def test_hosts_go_on_together_whatever_happened(seed: int, monkeypatch: pytest.MonkeyPatch):
    assert simulate(monkeypatch, seed, faults=15).steps > 0


# Other seeds every night: 2,000 in 40 nights. One that fails is shown with the error.
FIRST_TONIGHT = 50 * date.today().toordinal()


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_hosts_go_on_together_fifty_times(first: int, monkeypatch: pytest.MonkeyPatch):
    seeds = range(FIRST_TONIGHT + first, FIRST_TONIGHT + first + 10)
    settled = [simulate(monkeypatch, seed, faults=30).settled_s for seed in seeds]
    assert any(settled), "some go on, rather than end with too few left"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_hosts_go_on_together_two_thousand_times(first: int, monkeypatch: pytest.MonkeyPatch):
    for seed in range(first, first + 100):
        simulate(monkeypatch, seed, faults=80)


def test_a_seed_gives_one_course_of_events(monkeypatch: pytest.MonkeyPatch):
    once, again = (simulate(monkeypatch, 5, faults=4) for _ in range(2))
    assert len(once.log) > 4
    assert once.log == again.log
    assert once.steps == again.steps > 0


@pytest.mark.parametrize("seed", [8, 17])
def test_hosts_find_each_other_whose_addresses_changed_while_they_were_cut_off(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    """Two start again at other addresses, and reach neither each other nor all of the rest."""
    with simulated(monkeypatch, 5, seed, rewinds=True, keeps_enough=True) as simulation:
        simulation.wait(2.0)
        for one, other in ((0, 4), (0, 1), (4, 2)):
            simulation.cut(one, other)
        for host in (0, 4):
            simulation.crash(host)
        simulation.wait(15.0)
        simulation.require_goes_on()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("lost", [0, 1, 4])
def test_a_loss_costs_four_round_trips(lost: int, seed: int, monkeypatch: pytest.MonkeyPatch):
    """At 100 ms one way, with the two messages of `tests.training.test_rounds` that open sessions.

    Some hosts detect first that their transfers are cut, and take no further part in the old one.
    """
    with simulated(monkeypatch, 5, seed, rewinds=True, keeps_enough=True) as simulation:
        simulation.wait(2.0)
        monkeypatch.setattr(simulation.network, "delay_s", lambda *_: 0.1)
        simulation.wait(5.0)
        simulation.crash(lost, for_s=60.0)
        hosts = [own for host, own in simulation.live.items() if host != lost]
        while not all(lost in own.attended.missed for own in hosts):
            simulation.wait(0.005)
        noticed_s, before = simulation.loop.time(), len(simulation.log)
        simulation.run(lambda: all(own.state.number == 2 for own in hosts), 5.0)
        entered_s = max(at_s for at_s, _, _ in simulation.log[before:])
        assert 0.4 < entered_s - noticed_s + OPENING * 0.1 <= 4 * 0.2


@pytest.mark.parametrize("others", [(0, 2), (0, 3)])
def test_a_host_that_hears_too_few_holds_up_nobody(
    others: tuple[int, int], monkeypatch: pytest.MonkeyPatch
):
    with simulated(monkeypatch, 4, 1, rewinds=True, keeps_enough=True) as simulation:
        simulation.wait(2.0)
        for other in others:
            simulation.cut(1, other)
        simulation.wait(2 * CLUSTER.heartbeat_timeout_s)
        healthy = [simulation.live[host] for host in (0, 2, 3)]
        before = min(len(own.applied) for own in healthy)
        simulation.wait(CLUSTER.heartbeat_timeout_s)
        assert min(len(own.applied) for own in healthy) > before + 2


def test_a_host_that_was_stopped_learns_that_others_are_new_processes(
    monkeypatch: pytest.MonkeyPatch,
):
    """They are there again when it goes on, so it misses none; but none of them has its state."""
    with simulated(monkeypatch, 4, 1, rewinds=True, keeps_enough=False) as simulation:
        simulation.wait(2.0)
        stopped = simulation.live[0]
        stopped.process.stop()
        for host in (1, 2, 3):
            simulation.crash(host, for_s=1.0)
        simulation.wait(8.0)
        stopped.process.go_on()
        simulation.wait(4 * CLUSTER.heartbeat_timeout_s)
        assert isinstance(stopped.at, Suspended), "no error of its own ends it"


@pytest.mark.parametrize("seed", range(3))
def test_transfers_that_fail_while_a_host_is_missed_for_a_moment_end_their_generation(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    """The others may never miss it, and would wait for the host whose session is broken."""
    with simulated(monkeypatch, 4, seed, rewinds=True, keeps_enough=True) as simulation:
        simulation.wait(2.0)
        simulation.cut(2, 3)
        one = simulation.live[2]
        simulation.run(lambda: 3 in one.attended.missed, 2 * CLUSTER.heartbeat_timeout_s)
        one.has_cut_transfers = True
        simulation.run(lambda: isinstance(one.at, Confirming | Suspended), 3.0)
        simulation.require_goes_on()


@pytest.mark.parametrize("seed", range(3))
def test_all_go_back_further_where_the_newest_checkpoint_is_damaged(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    with simulated(monkeypatch, 5, seed, rewinds=True, keeps_enough=True) as simulation:
        simulation.wait(8.0)
        simulation.run(lambda: len(simulation.checkpoints) > 2, 30.0)
        stages = range(simulation.stages)
        serving = [
            {host for host, own in simulation.live.items() if s in own.served} for s in stages
        ]
        for host in min(serving, key=len):
            simulation.crash(host, for_s=30.0)
        assert len(simulation.live) > 2, "a majority"
        newest = max(simulation.checkpoints)
        simulation.damaged.add(newest)
        simulation.run(lambda: bool(simulation.read_in), 4 * CLUSTER.heartbeat_timeout_s)
        [(number, step)] = simulation.read_in.items()
        assert simulation.decided[number].step == newest > step > 0
        simulation.require_goes_on()
        assert simulation.steps > step


@pytest.mark.parametrize("seed", range(4))
def test_a_host_apart_takes_states_only_from_those_that_have_read_their_checkpoint(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    """It learns first that all go back further, and what the others hold is still damaged."""
    with simulated(
        monkeypatch, 4, seed, rewinds=True, keeps_enough=True, extra_hosts=1
    ) as simulation:
        simulation.start(4, is_diskless=True)
        simulation.run(lambda: 4 in simulation.live and simulation.live[4].has_all, 30.0)
        simulation.run(lambda: len(simulation.checkpoints) > 2, 30.0)
        for host in (0, 2):
            assert simulation.live[host].served == {0}, "no other host serves it"
            simulation.crash(host, for_s=30.0)
        simulation.damaged.add(max(simulation.checkpoints))
        simulation.run(lambda: bool(simulation.read_in), 4 * CLUSTER.heartbeat_timeout_s)
        assert simulation.live[4].state.members == (1, 3, 4)
        simulation.require_goes_on()
