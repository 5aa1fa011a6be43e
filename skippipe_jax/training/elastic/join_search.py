"""Search of a machine without the run folder for a place in a run: see `joining`.

It asks a host for the run's files and free places, writes the files to its own folder, and takes
the first place that it can serve: a place without stage 0 needs no text. Without a place, it waits.
"""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from skippipe_sched.errors import InputError, TemporaryError, raise_terminated

from skippipe_jax import log
from skippipe_jax.clock import SYSTEM_CLOCK, Clock
from skippipe_jax.config import Config, parse_config
from skippipe_jax.config.parsing import CONFIG
from skippipe_jax.config.resume import identity, settings
from skippipe_jax.connections.asking import JoinClient, NoListener
from skippipe_jax.connections.hello import RunIdentity
from skippipe_jax.connections.join_offer import JoinOffer, Place
from skippipe_jax.connections.join_server import JOINING, LONGEST_S, RUN_ENDED
from skippipe_jax.connections.keys import Keys
from skippipe_jax.connections.link_probe import MeasuredLink
from skippipe_jax.connections.waiting import telling
from skippipe_jax.storage.joined_folder import configurations, earlier_join, keep, run_dir_of
from skippipe_jax.storage.run_lock import RunLock

T = TypeVar("T")

FIND_S = 30.0
"""Seconds until the search for a host that answers is given up."""

AGAIN_S = 2.0
"""Seconds between two requests of a waiting joiner."""

MEASURE_S = 4.0
"""Seconds for which the links to all hosts are measured."""

ALL_GONE = "no host of the run listens any more: the run has ended, or all of its hosts failed"

FULL = "the run is full: no failed host, and all extra hosts of join.places in use"

FindText = Callable[[Config], str]
"""Function that returns the fingerprint of the local text, or raises `InputError` without text."""


class JoinSearch:
    """Joiner that searches for a place in a run.

    Attributes:
        folder: its own folder, with the files of the run.
        config: its configuration, with that folder; unset before `fetch`.
        run: the identity and settings of the run.
        offer: the last answer of a host.
        asked: the address of that host.
    """

    config: Config
    run: RunIdentity
    folder: Path
    offer: JoinOffer
    asked: str

    def __init__(
        self,
        addresses: Sequence[str],
        run_dir: Path | None,
        overrides: Sequence[str],
        find_text: FindText,
        clock: Clock = SYSTEM_CLOCK,
    ):
        """Store the addresses and the folder `run_dir`, by default named after the run's own.

        `overrides` are the settings of this host, and `find_text` finds the local text.

        Raises:
            InputError: if the folder is the original folder of a run.
        """
        self._start_addresses, self._known_addresses = [*addresses], list[str]()
        self._run_dir, self._overrides = run_dir, overrides
        self._find_text, self._clock = find_text, clock
        self._pauses, self._refused_s = 0, 0.0
        self._text: tuple[str | None, str] | None = None
        # The `cluster` overrides are needed before the configuration of the run is received.
        cluster_overrides = [override for override in overrides if override.startswith("cluster.")]
        self._join_client = JoinClient(Keys.of(parse_config({}, cluster_overrides).cluster))
        if run_dir is not None:
            self._load_known(run_dir)

    def fetch(self) -> AbstractContextManager[object]:
        """Fetch the files of the run; return the lock on the folder, to be closed at the end.

        Raises:
            InputError: if the folder belongs to another run, or this host is refused.
            TemporaryError: if no host answers with a run, or another process has the folder.
        """
        self._ask(FIND_S, [CONFIG])
        name = run_dir_of(self._join_client.contents)
        self.folder = self._run_dir or Path(Path(name).name)
        if self._run_dir is None:
            self._load_known(self.folder)
        lock = RunLock(self.folder)
        try:
            lock.acquire()
        except TemporaryError as error:
            remedy = "Set another folder with --run-dir, or wait until that host exits"
            problem = "another host that has joined uses this folder"
            raise TemporaryError("--run-dir", str(self.folder), problem, remedy) from error
        self._ask(FIND_S)
        fetched = self._join_client.fetched
        keep(self.folder, self._join_client.contents, self._known_addresses)
        theirs, self.config = configurations(self.folder, self._overrides)
        self.run = RunIdentity(identity(theirs), settings(theirs))
        peer = f"host {self.offer.host} of {self.offer.hosts} at {self.asked}"
        files = f"{len(self.offer.files)} files in {self.folder}"
        log.output(f"connected to {peer}, run {name}; {files}, {fetched:,} bytes downloaded")
        return lock

    def place(self) -> Place:
        """Wait for the first free place that this host can serve.

        Raises:
            TemporaryError: if there is no such place for ``cluster.rejoin_s``.
        """
        since_s, logged = self._clock.now(), ""
        while True:
            place, why = self._choice()
            if place is not None and not place.pause_s:
                return place
            if place is not None:
                why = (
                    f"host {place.host} failed right after its last join; retrying in "
                    f"{math.ceil(place.pause_s)} s"
                )
            remaining_s = self._remaining_s(since_s, why)
            if why != logged:
                log.output(
                    why if place is not None else f"{why}; waiting up to {remaining_s:.0f} s"
                )
                logged = why
            wait_s = AGAIN_S if place is None else place.pause_s
            self._clock.sleep(min(wait_s, remaining_s))
            self._ask(remaining_s)

    def wait(self, why: str) -> None:
        """Wait before asking again as joining does not pay off, with exponential back-off.

        Raises:
            TemporaryError: if it has not paid off for ``cluster.rejoin_s``.
        """
        if not self._pauses:
            self._refused_s = self._clock.now()
        remaining_s = self._remaining_s(self._refused_s, why)
        pause_s = min(LONGEST_S, AGAIN_S * 2**self._pauses, remaining_s)
        self._pauses += 1
        log.output(f"{why}; retrying in {math.ceil(pause_s)} s")
        self._clock.sleep(pause_s)
        self._ask(FIND_S)

    def _remaining_s(self, since_s: float, why: str) -> float:
        """Return the seconds that are left to be admitted; raise `TemporaryError` if none are."""
        patience_s = self.config.cluster.rejoin_s
        remaining_s = since_s + patience_s - self._clock.now()
        if remaining_s <= 0:
            problem = f"not admitted within cluster.rejoin_s = {patience_s:g} s: {why}"
            raise TemporaryError(JOINING, self.asked, problem, "Join again later")
        return remaining_s

    def ways(self) -> dict[int, MeasuredLink]:
        """Measure latency and bandwidth to the hosts that train and answer."""
        offer, since_s = self.offer, self._clock.now()
        addresses = {host: at for host, at in offer.addresses.items() if host in offer.members}
        ways = _run_interruptibly(self._join_client.ways(addresses, MEASURE_S))
        rates = sorted(rate for way in ways.values() for rate in (way.to, way.back))
        if rates:
            log.output(
                f"measured links to {len(ways)} hosts in {self._clock.now() - since_s:.1f} s: "
                f"{rates[0] / 1e6:,.3g} to {rates[-1] / 1e6:,.3g} MB/s"
            )
        return ways

    def is_free(self, place: Place) -> bool:
        """Ask the hosts again; return whether a place is still free and no better one is.

        A place of the original hosts that this host can serve is better than an extra one.
        """
        self._ask(FIND_S)
        first, initial_hosts = self._choice()[0], self.offer.hosts
        if place.host >= initial_hosts and first is not None and first.host < initial_hosts:
            return False
        return place.host in {other.host for other in self.offer.places}

    @property
    def addresses(self) -> list[str]:
        """Addresses of the hosts of the run; the one that answered comes first."""
        return [self.asked, *self._known_addresses]

    def _choice(self) -> tuple[Place | None, str]:
        """Choose the place with the shortest pause, or return None with the reason."""
        initial_hosts = self.offer.hosts  # No extra place is used while one of these is lost.
        places = sorted(
            self.offer.places,
            key=lambda place: (place.host >= initial_hosts, place.pause_s, place.host),
        )
        if not places:
            return None, FULL
        without_text = [place for place in places if 0 not in place.stages]
        first = places[0]
        if 0 in first.stages and (why := self._text_problem()) is not None:
            if not without_text:
                lost = ", ".join(str(place.host) for place in places)
                return None, f"only hosts with the data stage are needed (host {lost}), but {why}"
            return without_text[0], ""
        return first, ""

    def _text_problem(self) -> str | None:
        """Explain why this host cannot read the text of the run; None if it can."""
        if self._text is None:
            try:
                self._text = self._find_text(self.config), ""
            except InputError as error:
                why = f"this host cannot read the training text: {error}"
                self._text = None, why.removesuffix(".")
        fingerprint, why = self._text
        if fingerprint is None:
            return why
        if self.offer.text not in (None, fingerprint):
            return "this host has another training text"
        return None

    def _ask(self, patience_s: float, wanted: Collection[str] | None = None) -> None:
        """Ask for all files, or those in `wanted`, until a host answers.

        Raises:
            InputError: if this host is refused permanently.
            TemporaryError: if no host answers within `patience_s`; at once if no host listens at
                the given addresses and no others are known, or if the run has ended.
        """
        since_s, why = self._clock.now(), "no answer"
        addresses = [*self._start_addresses, *self._known_addresses]
        where = ", ".join(dict.fromkeys(addresses))
        with telling(lambda left_s: f"{where}: {why}; retrying for {left_s:.0f} s", patience_s):
            while True:
                try:
                    asked = _run_interruptibly(self._join_client.ask(addresses, wanted))
                    break
                except TemporaryError as error:
                    why = error.problem
                    # A known host may come back; an address that never answered may be wrong.
                    is_nobody = isinstance(error, NoListener)
                    is_final = why == RUN_ENDED or (is_nobody and not self._known_addresses)
                    if not is_final and self._clock.now() - since_s <= patience_s:
                        self._clock.sleep(AGAIN_S)
                    elif is_nobody and self._known_addresses:
                        raise TemporaryError(JOINING, where, ALL_GONE, error.remedy) from error
                    else:
                        raise
        self.asked, self.offer = asked
        self._known_addresses = [*dict.fromkeys(self.offer.addresses.values())]

    def _load_known(self, folder: Path) -> None:
        contents, addresses = earlier_join(folder)
        self._join_client.contents = contents | self._join_client.contents
        self._known_addresses += addresses


def _run_interruptibly(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine by `asyncio.run`, and let SIGTERM cancel it as SIGINT does.

    Raised directly, the exception could end up in a task whose result is never awaited.
    """

    async def cancelable() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "runs"
        signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(task.cancel))
        try:
            return await coroutine
        finally:
            signal.signal(signal.SIGTERM, raise_terminated)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not raise_terminated:
        return asyncio.run(coroutine)
    try:
        return asyncio.run(cancelable())
    except asyncio.CancelledError:
        raise_terminated()
