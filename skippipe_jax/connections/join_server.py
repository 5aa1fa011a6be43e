"""Server for joiners, which request a place in the run, and observers, which request its status.

They connect to the port on which this host listens for other hosts; every host serves them. A host
serves at most `MAX_JOINERS` joiners at a time, each as long as it sends requests. One more
replaces the one that has been served for longest, which asks again. Observers are answered at once.

When a joiner takes a place, training stops until its state is transferred. So a place that is
lost within a minute of being taken is held back with exponential back-off: for one second, then
two, four, up to a minute. A place that is kept for longer resets this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.connections.directory import Directory
from skippipe_jax.connections.hello import PROTOCOL, Hello, Texts, other_protocol
from skippipe_jax.connections.join_offer import JoinOffer
from skippipe_jax.connections.link_probe import MOST_QUESTIONS, SIZES, answer_probe
from skippipe_jax.connections.links import HELLO_S, Link
from skippipe_jax.connections.status import RunStatus
from skippipe_jax.connections.threads import DaemonThreads

QUICKLY_S = 60.0
LONGEST_S = 60.0


class Pauses:
    """Back-off for places that are lost soon after they are taken; times are in seconds.

    All times are by one clock, whichever. Each host counts only what it has seen since it joined.
    """

    def __init__(self):
        """Start before the first generation."""
        self._processes: Mapping[int, int] | None = None
        self._taken_s: dict[int, float] = {}
        self._times: dict[int, int] = {}
        self._until_s: dict[int, float] = {}

    def entered(self, processes: Mapping[int, int], now_s: float) -> None:
        """Record the present hosts and their processes; those of the first call took no place."""
        before = processes if self._processes is None else self._processes
        for host, process in before.items():
            if processes.get(host) != process:
                self._lost(host, now_s)
        for host, process in processes.items():
            if before.get(host) != process:
                self._taken_s[host] = now_s
        self._processes = dict(processes)

    def _lost(self, host: int, now_s: float) -> None:
        taken_s = self._taken_s.pop(host, None)
        if taken_s is None or now_s - taken_s > QUICKLY_S:
            self._times.pop(host, None)
            return
        times = self._times[host] = self._times.get(host, 0) + 1
        # The exponent is capped against overflow.
        self._until_s[host] = now_s + min(LONGEST_S, 2.0 ** min(times - 1, 10))

    def pause_s(self, host: int, now_s: float) -> float:
        """Return for how many seconds from `now_s` the place of a host is held back."""
        return max(0.0, self._until_s.get(host, now_s) - now_s)


MAX_JOINERS = 16
"""Maximum number of joiners that are served at a time."""

ASKS_S = 60.0
"""Seconds that a joiner may take to read `FILE_CHUNK_BYTES` of a file, and to request the next."""

FILE_CHUNK_BYTES = 1 << 19

JOINING = "join"
"""Field of the errors by which joiners are refused."""

JOINER, OBSERVER = "joiner", "observer"
REQUESTERS = {JOINER: "a joiner", OBSERVER: "an observer"}
"""First word of a guest's first message, and the guest's name in log messages."""

RUN_ENDED = "the run has ended: it finished, or was stopped"
"""Reason for refusing joiners at the end of a run."""

OBSERVED = ("skippipe-jax",)
"""Packages of which an observer needs the run's version; not JAX, as it computes nothing."""


MakeOffer = Callable[[Hello, dict[int, str], Collection[int]], tuple[JoinOffer, Sequence[bytes]]]
"""Function (own hello, addresses of all hosts, ids of free places) -> join offer, and the contents
of its files in their order.

It runs in a thread of its own, as it may block on storage."""


class JoinServer:
    """Server for joiners, once the run is elastic, and for observers at any time.

    Attributes:
        make_offer: makes the offers for joiners; None while the run accepts none.
        has_ended: True if the run is ending and accepts no more joiners.
    """

    def __init__(self, status: Callable[[], RunStatus]):
        """Start without offers for joiners; `status` returns the status for observers."""
        self.make_offer: MakeOffer | None = None
        self.has_ended = False
        self._status = status
        self._served: dict[Link, None] = {}

    async def serve(
        self,
        who: str,
        directory: Directory,
        away: Collection[int],
        link: Link,
        request: Sequence[Any],
    ) -> InputError | None:
        """Serve a joiner as long as it sends requests, or answer an observer.

        Returns why it is refused, or None. `who` is `JOINER` or `OBSERVER`; `request` is its
        protocol version and its package versions. `directory` has this host's hello and all
        addresses. `away` are the hosts that are gone, silent or have left.
        """
        own, packages = directory.hello, OBSERVED if who == OBSERVER else ()
        if (refusal := _version_refusal(who, request, own, packages)) is not None:
            return refusal
        if who == OBSERVER:
            link.break_when_silent(HELLO_S)
            return link.send("status", self._status())
        if self.make_offer is None:
            problem = "the run has not started, or is not elastic (cluster.runtime: distributed)"
            return TemporaryError(JOINING, own.name, problem, "Retry later")
        if self.has_ended:
            return TemporaryError(JOINING, own.name, RUN_ENDED, "Join again after it is resumed")
        if len(self._served) == MAX_JOINERS:
            longest = next(iter(self._served))
            del self._served[longest]
            longest.break_off("a newer request replaced it")
        self._served[link] = None
        try:
            return await _serve_joiner(self.make_offer, directory, away, link)
        finally:
            self._served.pop(link, None)


async def _serve_joiner(
    make_offer: MakeOffer, directory: Directory, away: Collection[int], link: Link
) -> InputError | None:
    own, free = directory.hello, {*directory.unused_ids, *away}
    given = own, directory.addresses | {own.host: own.address}, free
    loop = asyncio.get_running_loop()
    try:
        offer, contents = await loop.run_in_executor(DaemonThreads(), make_offer, *given)
    except InputError as error:  # The run directory may return, or other hosts have it.
        return TemporaryError(error.field, error.value, error.problem, error.remedy)
    link.send("offer", offer)
    for _ in range(len(contents) + MOST_QUESTIONS):
        match await link.heard(ASKS_S):
            case ["file", int(number)] if 0 <= number < len(contents):
                content = contents[number]
                for start in range(0, len(content), FILE_CHUNK_BYTES):
                    link.write(content[start : start + FILE_CHUNK_BYTES])
                    if not await link.drained(ASKS_S):
                        return None
            case ["take" | "give" as direction, int(size)] if 0 <= size <= SIZES[-1]:
                if not await answer_probe(link, direction, size):
                    return None
            case _:
                return None


def _version_refusal(
    who: str, request: Sequence[Any], own: Hello, packages: Collection[str]
) -> InputError | None:
    """Return the error if a joiner or observer has another protocol or version, else None.

    The versions of `packages` are compared; if empty, of all packages that either side names.
    """
    match request:
        case [protocol, _] if protocol != PROTOCOL:
            return other_protocol(protocol, own.host)
        case [_, dict(raw)]:
            try:
                theirs = msgspec.convert(raw, Texts)
            except ValueError:
                theirs = {}
            versions = own.run.versions
            for part in sorted(packages or versions.keys() | theirs.keys()):
                if versions.get(part) != theirs.get(part):
                    problem = f"the {who} has this, and host {own.host} has {versions.get(part)!r}"
                    remedy = "Install the same version on all hosts"
                    return InputError(f"{part} version", theirs.get(part), problem, remedy)
            return None
    problem = f"is not a valid request of {REQUESTERS[who]}"
    return InputError(who, None, problem, "Install the same version on all hosts")
