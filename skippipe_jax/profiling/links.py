"""Measurement of latency and bandwidth between all hosts, over the links that training uses.

One host requests a number of bytes, and the other answers with a marker followed by the bytes. The
time from request to marker is a round trip, and the time from marker to bytes is that of the bytes
on the link: two independent measurements by one clock.

In each round every host measures the link from one other host and serves another, so that no host
sends to two hosts or receives from two at a time. A pair measures its two directions in turn.

Then each host sends to several hosts at once, and receives from several at once. If that is slower
than their links add up to, the links share the connection of the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from skippipe_jax.connections.threads import DaemonThreads
from skippipe_jax.errors import PeerTimeout
from skippipe_jax.program.compiler import Hop
from skippipe_jax.runtime.transport import HostLink

ROUND_TRIPS = 5
SMALLEST_BYTES, LARGEST_BYTES, LARGEST_GROWTH = 8 * 2**10, 64 * 2**20, 8
# A transfer of half of `TRANSFER_S` is long enough. The last transfers of all links together take
# at most `ALL_TRANSFERS_S`.
TRANSFER_S, ALL_TRANSFERS_S = 1.0, 60.0
# An activation is also sent, unless it takes more than this multiple of a transfer's time.
LONGEST_ACTIVATION = 4.0
# Bytes that a host passes to its network at once, so that they may also arrive at once.
BURST_BYTES = 64 * 2**10
# Relative difference within which two rates confirm each other, and most repetitions to reach it.
AGREEMENT, MOST_REPETITIONS = 0.05, 3
COPIES = 10
# Other hosts in the test of a connection, and repetitions: a busy host may delay a transfer.
MOST_PARTNERS, CONNECTION_TESTS = 3, 2
# Seconds of all tests of connections, if they run one after another, and of one at least; the
# fastest link that is tested so long; and how many times as fast it may be as another.
ALL_TESTS_S, LEAST_TEST_S = 20.0, 0.25
FASTEST_TESTED, UNEQUAL = LARGEST_BYTES / LEAST_TEST_S, 4.0
# Links share a connection if together they reach less than this share of their bandwidths.
SHARED_BELOW = 0.8

NO_MORE = -1
CHECK_S = 0.5
AT_ONCE = threading.Barrier(1)


@dataclass(frozen=True)
class MeasuredTransfer:
    """Bytes of a transfer, and seconds from the arrival of its marker to that of its bytes."""

    bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds


@dataclass(frozen=True)
class MeasuredLink:
    """Link from one host to another: an array takes about `latency_s + bytes / bandwidth`.

    `bandwidth` is in bytes per second. `overhead_s` is the time of an activation beyond its bytes
    at this bandwidth; None if an activation would have taken too long to send.
    """

    source: int
    target: int
    latency_s: float
    bandwidth: float
    overhead_s: float | None
    round_trips_s: Sequence[float]
    transfers: Sequence[MeasuredTransfer]


@dataclass(frozen=True)
class SimultaneousTransfer:
    """One of the transfers that test the connection of host `tested`, its source or its target.

    `seconds` has the time of each repetition, from the first marker until all bytes are there.
    """

    source: int
    target: int
    tested: int
    bytes: int
    seconds: Sequence[float]


class ConnectionTest(NamedTuple):
    """Test of a host's connection by simultaneous transfers to its partners, or from them."""

    tested: int
    partners: tuple[int, ...]
    sends: bool

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Source and target of each transfer."""
        return [
            (self.tested, other) if self.sends else (other, self.tested) for other in self.partners
        ]


class LinkMeasurement:
    """Measurement of a host's links and connection; all hosts call its methods together."""

    def __init__(
        self,
        host: int,
        links: Mapping[int, HostLink],
        device: jax.Device,
        deadline_s: float,
        say: Callable[[str], None],
    ):
        """Prepare; `links[h]` leads to another host h, where hosts take the place of nodes.

        Arrays are on `device`. `say` receives messages about the progress. The methods raise
        `PeerTimeout` if another host has not answered within `deadline_s` seconds.
        """
        self._host, self._deadline_s, self._say = host, deadline_s, say
        self._probes = {other: _LinkProbe(host, other, own, device) for other, own in links.items()}
        self._round_trips: dict[int, list[float]] = {}

    def measure_links(self, activation_bytes: int) -> list[MeasuredLink]:
        """Measure the links from all other hosts to this one."""
        measured: list[MeasuredLink] = []
        others = len(self._probes)
        transfer_s = min(TRANSFER_S, ALL_TRANSFERS_S / max(1, others))

        def measure_latency(probe: _LinkProbe) -> None:
            # The first round trip, which opens the connection, is discarded.
            _, *trips = (probe.ask(0)[0] for _ in range(1 + ROUND_TRIPS))
            self._round_trips[probe.other] = trips
            probe.request(NO_MORE)

        def measure_bandwidth(probe: _LinkProbe) -> None:
            trips = self._round_trips[probe.other]
            measured.append(_measure(probe, trips, activation_bytes, transfer_s))
            probe.request(NO_MORE)
            self._say(f"measured the bandwidth from {len(measured)} of {others} hosts")

        # All latencies first, while the network is idle.
        for measure in (measure_latency, measure_bandwidth):
            for source, target in measuring_rounds(self._host, others + 1):
                jobs: dict[_LinkProbe, Callable[[_LinkProbe], None]] = {}
                if source is not None:
                    jobs[self._probes[source]] = measure
                if target is not None:
                    jobs[self._probes[target]] = _LinkProbe.serve
                _run(jobs, self._deadline_s)
        return measured

    def test_connections(
        self, bandwidth: Float[np.ndarray, "source target"], networks: Sequence[str]
    ) -> list[SimultaneousTransfer]:
        """Run all `connection_tests`, after `measure_links`; return what this host received."""
        received: list[SimultaneousTransfer] = []
        tests = connection_tests(bandwidth, networks)
        seconds = max(LEAST_TEST_S, min(TRANSFER_S, ALL_TESTS_S / max(1, len(tests))))
        for number, test in enumerate(tests):
            if self._host in (test.tested, *test.partners):
                received += self._run_test(test, transfer_sizes(test, bandwidth, seconds))
                self._say(f"tested {number + 1} of {len(tests)} connections")
        return received

    def _run_test(
        self, test: ConnectionTest, sizes: Mapping[tuple[int, int], int]
    ) -> list[SimultaneousTransfer]:
        sources = [source for source, target in test.pairs if target == self._host]
        round_trip_s = {source: min(self._round_trips[source]) for source in sources}
        # All transfers of the tested host begin together.
        barrier = threading.Barrier(len(test.partners) if test.tested == self._host else 1)
        times: dict[int, list[tuple[float, float]]] = {source: [] for source in sources}

        def ask(probe: _LinkProbe) -> None:
            for _ in range(CONNECTION_TESTS):
                barrier.wait()
                # So that the markers of near and distant hosts arrive together.
                time.sleep(max(round_trip_s.values()) - round_trip_s[probe.other])
                start = time.perf_counter()
                until_marker, after_marker = probe.ask(sizes[probe.other, self._host])
                marked = start + until_marker
                times[probe.other].append((marked, marked + after_marker))
            probe.request(NO_MORE)

        jobs: dict[_LinkProbe, Callable[[_LinkProbe], None]] = {}
        for source, target in test.pairs:
            if target == self._host:
                jobs[self._probes[source]] = ask
            elif source == self._host:
                jobs[self._probes[target]] = partial(_LinkProbe.serve, barrier=barrier)
        _run(jobs, self._deadline_s)
        begins = [
            min(marked for marked, _ in markers) for markers in zip(*times.values(), strict=True)
        ]
        return [
            SimultaneousTransfer(
                source,
                self._host,
                test.tested,
                sizes[source, self._host],
                [end - begin for (_, end), begin in zip(own, begins, strict=True)],
            )
            for source, own in times.items()
        ]


def connection_tests(
    bandwidth: Float[np.ndarray, "source target"], networks: Sequence[str]
) -> list[ConnectionTest]:
    """List a test of each host's connection in each direction, in the order of all hosts.

    Partners are the hosts with the fastest links, one of each other network: within a network,
    such as the processes of one machine, links use no connection. A link that is much faster than
    all others, as to a host in the same building, is left out, and so are links too fast to be
    tested. A host with a single partner is not tested.
    """
    tests: list[ConnectionTest] = []
    for sends in (True, False):
        for tested, rates in enumerate(bandwidth if sends else bandwidth.T):
            fastest: dict[str, int] = {}
            for other in sorted(range(len(rates)), key=lambda other: -rates[other]):
                if networks[other] != networks[tested] and rates[other] <= FASTEST_TESTED:
                    fastest.setdefault(networks[other], other)
            others = [*fastest.values()]
            while len(others) > 1 and rates[others[0]] > UNEQUAL * rates[others[1]]:
                del others[0]
            others = [other for other in others if UNEQUAL * rates[other] >= rates[others[0]]]
            if len(others) > 1:
                tests.append(ConnectionTest(tested, tuple(others[:MOST_PARTNERS]), sends))
    # Groups whose tests share no network run at the same time, as each host keeps to this order.
    groups: list[tuple[set[str], list[ConnectionTest]]] = []
    for test in tests:
        used = {networks[host] for host in (test.tested, *test.partners)}
        for busy, group in groups:
            if not busy & used:
                busy |= used
                group.append(test)
                break
        else:
            groups.append((used, [test]))
    return [test for _, group in groups for test in group]


def transfer_sizes(
    test: ConnectionTest, bandwidth: Float[np.ndarray, "source target"], seconds: float
) -> dict[tuple[int, int], int]:
    """Return the bytes of a test's transfers, which end together if nothing is shared.

    That is after `seconds`, or earlier on links so fast that the bytes would be too many.
    """
    rates = {pair: float(bandwidth[pair]) for pair in test.pairs}
    seconds = min(seconds, LARGEST_BYTES / max(rates.values()))
    return {pair: max(SMALLEST_BYTES, int(rate * seconds)) for pair, rate in rates.items()}


def connection_rates(
    links: Sequence[MeasuredLink], transfers: Sequence[SimultaneousTransfer], hosts: int
) -> Float[np.ndarray, "hosts 2"]:
    """Return what each host sends and receives at most over a shared connection [bytes/s].

    It is infinite where links do not share a connection.
    """
    bandwidth = {(link.source, link.target): link.bandwidth for link in links}
    rates = np.full((hosts, 2), np.inf)
    tests: dict[tuple[int, int], list[SimultaneousTransfer]] = {}
    for transfer in transfers:
        tests.setdefault((transfer.tested, int(transfer.target == transfer.tested)), []).append(
            transfer
        )
    for test, own in tests.items():
        seconds = min(map(max, zip(*(transfer.seconds for transfer in own), strict=True)))
        rate = sum(transfer.bytes for transfer in own) / seconds
        if rate < SHARED_BELOW * sum(bandwidth[each.source, each.target] for each in own):
            rates[test] = rate
    return rates


def measuring_rounds(host: int, hosts: int) -> Iterator[tuple[int | None, int | None]]:
    """Yield for each round the host whose link `host` measures, and the host that it serves."""
    for distance in range(1, hosts):
        source, target = (host - distance) % hosts, (host + distance) % hosts
        if source != target:
            yield source, target
        elif host < source:
            yield source, None
            yield None, source
        else:
            yield None, source
            yield source, None


def measure_copy(devices: Sequence[jax.Device], size: int) -> tuple[float, float]:
    """Time copies of a byte and of `size` bytes from the first device to the last [s].

    Returns the least of several attempts; close to 0 if they are the same device.
    """

    def copy_s(size: int) -> float:
        array = jax.device_put(np.zeros(size, np.uint8), devices[0]).block_until_ready()
        seconds = []
        for _ in range(COPIES):
            start = time.perf_counter()
            jax.device_put(array, devices[-1]).block_until_ready()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    return copy_s(1), copy_s(size)


class _LinkProbe:
    """One end of a measured link, which either sends requests for bytes or answers them."""

    def __init__(self, host: int, other: int, link: HostLink, device: jax.Device):
        self.host = host
        self.other = other
        self.link = link
        self.device = device
        self.sent = 0
        self.received = 0
        self.waiting: tuple[str, float] | None = None
        """Object and start (of `time.time`) of the current wait."""

    def request(self, size: int) -> None:
        self._send(jax.device_put(np.array([size], np.int32), self.device))

    def ask(self, size: int) -> tuple[float, float]:
        """Request bytes; return the seconds to the marker, and from the marker to the bytes."""
        marker = self._receive(1, np.int32)
        payload = self._receive(size, np.uint8) if size else marker
        start = time.perf_counter()
        self.request(size)
        self._wait("an answer", marker)
        marked = time.perf_counter()
        self._wait(f"{size} bytes", payload)
        return marked - start, time.perf_counter() - marked

    def serve(self, barrier: threading.Barrier = AT_ONCE) -> None:
        """Answer requests until `NO_MORE`; markers and bytes pass `barrier` before they leave."""
        marker = jax.device_put(np.zeros(1, np.int32), self.device)
        payload = marker
        while True:
            request = self._receive(1, np.int32)
            self._wait("a request", request)
            size = int(request[0])
            if size == NO_MORE:
                return
            # Made once, as a repetition begins at once; random, so that no network can compress it.
            if size != payload.nbytes:
                random = np.frombuffer(np.random.default_rng().bytes(size), np.uint8)
                payload = jax.device_put(random, self.device).block_until_ready()
            barrier.wait()
            self._send(marker)
            if size:
                barrier.wait()
                self._send(payload)

    def check(self, deadline_s: float) -> None:
        """Raise `PeerTimeout` if the current wait exceeds the deadline."""
        waiting = self.waiting
        if waiting is not None and time.time() - waiting[1] > deadline_s:
            since = time.strftime("%H:%M:%S", time.localtime(waiting[1]))
            raise PeerTimeout(
                f"link measurement: timed out waiting for {waiting[0]} from host {self.other} "
                f"(network.deadline_s = {deadline_s:g} s, since {since})"
            )

    def _send(self, array: jax.Array) -> None:
        hop = Hop("probe", self.host, self.other)
        self.link.send(hop, self.sent, array)
        self.sent += 1

    def _receive(self, size: int, dtype: type) -> jax.Array:
        hop = Hop("probe", self.other, self.host)
        like = jax.ShapeDtypeStruct((size,), dtype)
        # The first request opens the connection, which waits if the other host has failed.
        self.waiting = "a connection", time.time()
        array = self.link.receive(hop, self.received, like)
        self.waiting = None
        self.received += 1
        return array

    def _wait(self, what: str, array: jax.Array) -> None:
        self.waiting = what, time.time()
        array.block_until_ready()
        self.waiting = None


def _run(jobs: Mapping[_LinkProbe, Callable[[_LinkProbe], None]], deadline_s: float) -> None:
    """Run all jobs in parallel, and check their waits against the deadline."""
    # A wait may never end, so the threads must not keep the process alive.
    running = {DaemonThreads().submit(job, probe) for probe, job in jobs.items()}
    while running:
        done, running = wait(running, CHECK_S, FIRST_COMPLETED)
        for future in done:
            future.result()
        if not done:
            for probe in jobs:
                probe.check(deadline_s)


def _measure(
    probe: _LinkProbe, round_trips_s: Sequence[float], activation_bytes: int, transfer_s: float
) -> MeasuredLink:
    """Measure a link by transfers of growing size until one takes long enough, then an activation.

    The largest transfer is repeated until two rates agree; small ones can agree on a rate that is
    too high, as queues let some bytes pass at once after an idle time. An activation that does not
    agree with them is repeated as well, since a busy host that handles the marker late measures too
    short a time.
    """
    round_trip_s = min(round_trips_s)
    size, transfers = SMALLEST_BYTES, [_transfer(probe, SMALLEST_BYTES, round_trip_s)]
    # At least two: queues let some bytes of the first one pass at once after an idle time.
    while len(transfers) == 1 or (
        transfers[-1].seconds < transfer_s / 2 and transfers[-1].bytes < LARGEST_BYTES
    ):
        wanted = int(min(transfers[-1].rate * transfer_s, LARGEST_GROWTH * size))
        size = min(LARGEST_BYTES, max(SMALLEST_BYTES, wanted))
        transfers.append(_transfer(probe, size, round_trip_s))
    sends_activation = activation_bytes / transfers[-1].rate <= LONGEST_ACTIVATION * transfer_s
    if sends_activation:
        transfers.append(_transfer(probe, activation_bytes, round_trip_s))
        size = max(size, activation_bytes)
    for _ in range(MOST_REPETITIONS):
        if _agreeing(transfers[1:]):
            break
        transfers.append(_transfer(probe, size, round_trip_s))
    bandwidth = _robust_estimate(transfers[1:]).rate
    overhead_s = None
    if sends_activation:
        overhead_s = _least_overhead_s(transfers, activation_bytes, bandwidth)
        for _ in range(MOST_REPETITIONS):
            if abs(overhead_s) < AGREEMENT * activation_bytes / bandwidth:
                break
            transfers.append(_transfer(probe, activation_bytes, round_trip_s))
            overhead_s = _least_overhead_s(transfers, activation_bytes, bandwidth)
    return MeasuredLink(
        source=probe.other,
        target=probe.host,
        latency_s=round_trip_s / 2,
        bandwidth=bandwidth,
        overhead_s=overhead_s,
        round_trips_s=round_trips_s,
        transfers=transfers,
    )


def _transfer(probe: _LinkProbe, size: int, round_trip_s: float) -> MeasuredTransfer:
    until_marker, after_marker = probe.ask(size)
    if size <= BURST_BYTES:
        # The marker may have been delayed to the bytes: then count its delay as theirs.
        after_marker = max(after_marker, until_marker + after_marker - round_trip_s)
    return MeasuredTransfer(size, after_marker)


def _least_overhead_s(transfers: Sequence[MeasuredTransfer], size: int, bandwidth: float) -> float:
    """Return the overhead of `size`-byte transfers at a bandwidth that is closest to zero [s]."""
    overheads_s = [
        transfer.seconds - size / bandwidth for transfer in transfers if transfer.bytes == size
    ]
    return min(overheads_s, key=abs)


def _robust_estimate(transfers: Sequence[MeasuredTransfer]) -> MeasuredTransfer:
    """Return the largest transfer that another one confirms, or the median of the large ones."""
    agreeing = _agreeing(transfers)
    if agreeing:
        return agreeing[0]
    by_rate = sorted(_large(transfers), key=lambda transfer: transfer.rate)
    return by_rate[len(by_rate) // 2]


def _agreeing(transfers: Sequence[MeasuredTransfer]) -> list[MeasuredTransfer]:
    """Return the large transfers whose rate another one confirms, the largest first.

    On a busy host any transfer may be delayed, or seem faster as the previous one was delayed.
    """
    large = _large(transfers)
    return [
        one
        for one in large
        if any(abs(other.rate / one.rate - 1) < AGREEMENT for other in large if other is not one)
    ]


def _large(transfers: Sequence[MeasuredTransfer]) -> list[MeasuredTransfer]:
    """Return transfers of at least a quarter of the largest size, by size, then by speed."""
    most = max(transfer.bytes for transfer in transfers)
    large = [transfer for transfer in transfers if 4 * transfer.bytes >= most]
    return sorted(large, key=lambda transfer: (-transfer.bytes, transfer.seconds))
