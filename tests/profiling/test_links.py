"""What is made of transfers over one link, and of simultaneous ones over a connection."""

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippipe_jax.profiling import links

# Seconds of a link of 52 kB/s, on which some bytes pass at once after a rest.
AN_ACTIVATION, ITS_SECONDS = 101376, 1.927


class Way:
    """That link; `late_s` is how late the host notices the first marker before an activation."""

    other, host = 1, 0

    def __init__(self, late_s: float = 0.0):
        self.late_s = late_s

    def ask(self, size: int) -> tuple[float, float]:
        quick = 8192 / 0.143 if size == links.SMALLEST_BYTES else 59.26e3
        if size != AN_ACTIVATION:
            return 0.0, size / quick
        late_s, self.late_s = self.late_s, 0.0
        return late_s, ITS_SECONDS - late_s


def test_small_transfers_that_agree_do_not_say_how_quick_a_link_is():
    way = cast(Any, Way())
    link = links._measure(way, [0.0], AN_ACTIVATION, links.TRANSFER_S)
    assert link.bandwidth == pytest.approx(AN_ACTIVATION / ITS_SECONDS)
    assert link.overhead_s == pytest.approx(0.0, abs=1e-9)


def test_an_activation_whose_marker_was_noticed_late_is_sent_again():
    way = cast(Any, Way(late_s=0.6))
    link = links._measure(way, [0.0], AN_ACTIVATION, links.TRANSFER_S)
    assert link.bandwidth == pytest.approx(AN_ACTIVATION / ITS_SECONDS)
    assert link.overhead_s == pytest.approx(0.0, abs=1e-9)


NETWORKS = st.lists(st.integers(0, 5), min_size=1, max_size=9).map(lambda own: [*map(str, own)])


@given(NETWORKS, st.integers(0, 2**32 - 1))
def test_a_connection_is_tested_by_its_fastest_links_to_distinct_networks(
    networks: list[str], seed: int
):
    bandwidth = np.random.default_rng(seed).uniform(1e6, 4e6, 2 * (len(networks),))
    tests = links.connection_tests(bandwidth, networks)
    is_tested = len(set(networks)) > 2
    expected = [(host, sends) for host in range(len(networks)) for sends in (False, True)]
    assert sorted((test.tested, test.sends) for test in tests) == (expected if is_tested else [])
    for test in tests:
        names = [networks[host] for host in (test.tested, *test.partners)]
        assert len(set(names)) == len(names) == 1 + min(3, len(set(networks)) - 1)
        rates = bandwidth[test.tested] if test.sends else bandwidth[:, test.tested]
        slowest = min(rates[partner] for partner in test.partners)
        for other, network in enumerate(networks):
            assert rates[other] <= slowest or network in names
        assert all(test.tested == pair[not test.sends] for pair in test.pairs)


def test_a_much_faster_link_and_much_slower_ones_are_left_out_of_a_test():
    bandwidth = np.full((5, 5), 1e5)
    bandwidth[0] = [0, 1e9, 1e8, 2e7, 8e6]
    networks = [*"abcde"]
    [sends] = [
        test for test in links.connection_tests(bandwidth, networks) if test[::2] == (0, True)
    ]
    assert sends.partners == (3, 4)
    bandwidth[0, 4] = 1e6
    tests = links.connection_tests(bandwidth, networks)
    assert not any(test[::2] == (0, True) for test in tests)


def test_transfers_of_links_with_different_rates_end_together():
    bandwidth = np.array([[0, 1e6, 4e6], [0, 0, 0], [0, 0, 0]])
    test = links.ConnectionTest(0, (1, 2), sends=True)
    sizes = links.transfer_sizes(test, bandwidth, 0.5)
    assert sizes == {(0, 1): 500_000, (0, 2): 2_000_000}
    sizes = links.transfer_sizes(test, 1000 * bandwidth, 0.5)
    assert sizes == {(0, 1): links.LARGEST_BYTES // 4, (0, 2): links.LARGEST_BYTES}


@pytest.mark.parametrize(
    ("sent_s", "received_s", "expected"),
    [
        # Of two repetitions the faster one counts, and in it the slower transfer.
        ((1.1, 1.2), (1.0, 1.0), [np.inf, np.inf]),
        ((5.0, 1.2), (5.0, 1.1), [np.inf, np.inf]),
        ((3.1, 2.5), (2.0, 2.4), [5e6 / 2.5, np.inf]),
    ],
)
def test_links_that_are_slower_together_share_a_connection(
    sent_s: tuple[float, float], received_s: tuple[float, float], expected: list[float]
):
    measured = [
        links.MeasuredLink(source, target, 0.0, rate, None, [], [])
        for source, target, rate in [(0, 1, 1e6), (0, 2, 4e6), (1, 0, 2e6), (2, 0, 2e6)]
    ]
    transfers = [
        links.SimultaneousTransfer(0, 1, 0, 1_000_000, sent_s),
        links.SimultaneousTransfer(0, 2, 0, 4_000_000, received_s),
        links.SimultaneousTransfer(1, 0, 0, 2_000_000, (1.0, 1.0)),
        links.SimultaneousTransfer(2, 0, 0, 2_000_000, (1.0, 1.1)),
    ]
    rates = links.connection_rates(measured, transfers, 3)
    np.testing.assert_allclose(rates, [expected, [np.inf] * 2, [np.inf] * 2])
