"""Ballots: whoever dies and whichever link is cut, those that are enough go on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from skippipe_jax.consensus.decisions import advance, first_state
from skippipe_jax.consensus.generations import (
    Accepted,
    Ask,
    Generation,
    Promise,
    Proposal,
    Received,
    Send,
    Standing,
    Tick,
)
from skippipe_jax.consensus.next_generation import next_generation
from tests.consensus.exploration import RULES, explore

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


def test_a_proposal_whose_acceptors_are_lost_asks_those_that_are_cut_off_no_more():
    """Host 4 could not be reached when host 0 proposed. Then host 3 is lost before it accepts."""
    rules = replace(RULES, host_of=(0, 1, 2, 3, 4), stages=2)
    last = Generation(1, (0, 1, 2, 3, 4), (7,) * 5, 0, 4, placement=((0, 1, 2), (3, 4)))
    chosen = replace(last, number=2, members=(0, 2, 3), processes=(7,) * 3)
    promises = {host: Promise(2, (1, 0), Standing(4), None) for host in (0, 2, 3)}
    state = structs.replace(
        first_state(0, rules, last, 0),
        promised=(1, 0),
        highest=(1, 0),
        accepted=((1, 0), chosen),
        suspected=frozenset({1, 3}),
        proposal=Proposal((1, 0), frozenset({4}), promises, chosen, frozenset({0, 2})),
    )
    state, effects = advance(state, Tick())
    assert Send(4, Ask(2, (2, 0), None)) in effects
    for host, accepted in ((2, ((1, 0), chosen)), (4, None)):
        answer = Promise(2, (2, 0), Standing(4), accepted)
        state, effects = advance(state, Received(host, answer))
    assert Send(4, Ask(2, (2, 0), chosen)) in effects, "some may have been told of it"
    for host in (2, 4):
        state, effects = advance(state, Received(host, Accepted(2, (2, 0))))
    assert state.generation == chosen


def test_all_read_the_checkpoint_again_where_some_have_gone_back_further():
    """Host 0 was the first to hear that the newest one is damaged, and then host 2 is lost."""
    rules = replace(RULES, host_of=(0, 1, 2), stages=2)
    last = Generation(2, (0, 1, 2), (7,) * 3, 0, 6, placement=((0, 2), (1,)), is_rewound=True)
    state = structs.replace(first_state(0, rules, last, 6), suspected=frozenset({2}))
    promises = {
        0: Promise(3, (1, 0), Standing(3, saved=3, holds=(0,)), None),
        1: Promise(3, (1, 0), Standing(6, saved=6, holds=(1,)), None),
    }
    following = next_generation(state, promises)
    assert (following.is_rewound, following.step) == (True, 6)
