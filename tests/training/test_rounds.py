"""How many messages have to come one after another for a run to go on without a lost host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skippipe_jax.consensus.decisions import advance, first_state
from skippipe_jax.consensus.generations import (
    Enter,
    Generation,
    Presence,
    Received,
    Rules,
    Send,
    Tick,
)
from skippipe_jax.training.trainer import Trainer
from tests.thread_cluster import Host, Lost, Network, train
from tests.training_runs import write_config

PATIENCE_S = 60.0
STEPS = 6
# Host 0 has stage 0, and hosts 1 and 2 have a replica of stage 1 each.
CASE = {
    "nodes": 3,
    "locations": ["here"],
    "links": [],
    "forward_s": 0.1,
    "stages": [1, 2],
    "path_length": 2,
    "microbatches_per_data_node": 2,
    "memory": 2,
}
# Ask, promise, ask, accepted, decided; then a report, and the word that all are ready.
DECIDING, OPENING = 5, 2
MOST_ROUND_TRIPS = 6


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network(3)
    yield network
    network.close()


def test_a_run_goes_on_without_a_lost_host_in_few_round_trips(network: Network, tmp_path: Path):
    config = write_config(
        tmp_path,
        plan={"case": CASE, "method": "balanced"},
        train={"steps": STEPS},
        validation={"every": STEPS, "sequences": 4},
        trace="every 2",
        replan={"budget_s": 0},
        run_dir=str(tmp_path / "run"),
    )
    hosts = [Host(config, index, network, []) for index in range(3)]

    def is_lost(trainer: Trainer, step: int) -> None:
        if step == 2:
            network.lose(2)
            raise Lost

    told: dict[int, tuple[int, list[str]]] = {}

    def counts(trainer: Trainer, step: int) -> None:
        own = hosts[trainer.membership.index].membership
        if trainer.host.count == 2:
            told.setdefault(own.index, (own.depth, [*own.puts]))

    hosts[2].after_step = is_lost
    for host in hosts[:2]:
        host.after_step = counts
    train(hosts, PATIENCE_S)
    assert [host.trainer.steps_done for host in hosts[:2]] == [STEPS, STEPS]
    assert {depth for depth, _ in told.values()} == {OPENING}, told
    assert DECIDING + OPENING <= 2 * MOST_ROUND_TRIPS


def test_hosts_decide_on_the_next_generation_in_few_messages():
    first = Generation(1, (0, 1, 2), (7, 7, 7), 0, 4, placement=((0,), (1, 2)))

    def serves(placement: Any, host: int) -> frozenset[int]:
        return frozenset(stage for stage, hosts in enumerate(placement) if host in hosts)

    rules = Rules((0, 1, 2), lambda *_: True, lambda placement, *_: placement, dict, serves=serves)
    states = {host: first_state(host, rules, first, 0) for host in (0, 1, 2)}
    for host in (0, 1):
        states[host], _ = advance(states[host], Presence(2, is_there=False))
    states[0], effects = advance(states[0], Tick())
    depth, under_way = 0, [(0, effect) for effect in effects]
    entered: dict[int, int] = {}
    while under_way:
        depth += 1
        arriving, under_way = under_way, []
        for source, effect in arriving:
            if isinstance(effect, Send) and effect.target != 2:
                target = effect.target
                states[target], more = advance(states[target], Received(source, effect.message))
                under_way += [(target, one) for one in more]
                if any(isinstance(one, Enter) for one in more):
                    entered[target] = depth
    assert max(entered.values()) == DECIDING
    assert entered.keys() == {0, 1}
