"""Ballots: whoever dies and whichever link is cut, those that are enough go on."""

from __future__ import annotations

import pytest

from tests.consensus.exploration import explore

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
