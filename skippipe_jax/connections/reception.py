"""Attends to newcomers, which ask for a place in the run, and observers, which ask for its status.

They come by the port on which this host listens for the others, as any host of the run does. A few
newcomers are attended to at a time, each for as long as it goes on asking: who comes as one too
many takes the place of the one that has been there for longest, which asks again. Observers are
answered at once.

Whoever takes a place stops all others for as long as its state takes to come. So a place that is
lost again within a minute of being taken is held back: for a second, then for two, four and so on,
up to a minute; one that is kept for longer begins anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.connections.directory import Directory
from skippipe_jax.connections.hello import PROTOCOL, Hello, other_protocol, texts
from skippipe_jax.connections.invitation import Files, Invitation, Place
from skippipe_jax.connections.links import HELLO_S, Link
from skippipe_jax.connections.status import RunStatus
from skippipe_jax.connections.threads import DaemonThreads
from skippipe_jax.connections.ways import MOST_BYTES, MOST_QUESTIONS, answer

QUICKLY_S = 60.0
LONGEST_S = 60.0


class Pauses:
    """The places of a run as one host sees them taken and lost; times by any one clock, in seconds.

    A host that has been there for a while knows more of that than one that has just come.
    """

    def __init__(self):
        """Nobody is there yet."""
        self._processes: Mapping[int, int] | None = None
        self._taken_s: dict[int, float] = {}
        self._times: dict[int, int] = {}
        self._until_s: dict[int, float] = {}

    def entered(self, processes: Mapping[int, int], now_s: float) -> None:
        """Note the hosts that there are now, and their processes; the first ones took no place."""
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
        # No power of two that floats do not have.
        self._until_s[host] = now_s + min(LONGEST_S, 2.0 ** min(times - 1, 10))

    def pause_s(self, host: int, now_s: float) -> float:
        """Return how long the place of a host is held back from now on."""
        return max(0.0, self._until_s.get(host, now_s) - now_s)


MOST_NEWCOMERS = 16
"""So many are attended to at a time."""

ASKS_S = 60.0
"""So long one may take for a piece of a file, and to ask for the next."""

JOINING = "join"
"""The field by which newcomers are refused."""

NEWCOMER, OBSERVER = "newcomer", "observer"
GUESTS = {NEWCOMER: "a newcomer", OBSERVER: "an observer"}
"""How each of them begins what it says, and what it is called in a line that a host prints."""

RUN_ENDED = "the run has ended: it is trained, or was stopped"
"""Why newcomers are refused as the hosts part."""

OBSERVED = ("skippipe-jax",)
"""The packages of which an observer needs the version of the run: it computes nothing."""


class Inviting(Protocol):
    """What the run knows of the places and files that it has for newcomers."""

    @property
    def text(self) -> str | None:
        """The fingerprint of the text that the run reads, if it is known here."""
        ...

    @property
    def standing(self) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """The hosts that train now, and the nodes of each stage."""
        ...

    def places(self, free: Collection[int]) -> Sequence[Place]:
        """List those free places that the run does not wait for."""
        ...

    def files(self) -> Files:
        """Return what newcomers need; it is read, so this may take a while."""
        ...


class Reception:
    """Tells newcomers of a run, once it goes on without lost hosts, and observers at any time.

    Attributes:
        inviting: what the run has for newcomers; None before that.
        has_ended: whether the run is at its end, and takes nobody in any more.
    """

    def __init__(self, status: Callable[[], RunStatus]):
        """Invite nobody yet; `status` makes what observers are told."""
        self.inviting: Inviting | None = None
        self.has_ended = False
        self._status = status
        self._there: dict[Link, None] = {}

    async def attend(
        self, directory: Directory, away: Collection[int], link: Link, said: Sequence[Any]
    ) -> InputError | None:
        """Attend to a newcomer as long as it asks, or say why it is refused.

        It has `said` which protocol it speaks, and its versions. `directory` says who this host is
        and where all listen, and `away` who is gone, silent or has left.
        """
        inviting, refusal = self.inviting, _unlike(NEWCOMER, said, directory.hello)
        if refusal is None and inviting is None:
            problem = "no run has begun here that goes on without lost hosts"
            refusal = TemporaryError(JOINING, directory.hello.name, problem, "Ask again later")
        elif refusal is None and self.has_ended:
            remedy = "Join again once it is resumed"
            refusal = TemporaryError(JOINING, directory.hello.name, RUN_ENDED, remedy)
        if refusal is not None or inviting is None:
            return refusal
        if len(self._there) == MOST_NEWCOMERS:
            longest = next(iter(self._there))
            del self._there[longest]
            longest.break_off("others ask as well")
        self._there[link] = None
        try:
            return await _give(inviting, directory, away, link)
        finally:
            self._there.pop(link, None)

    def show(self, own: Hello, link: Link, said: Sequence[Any]) -> InputError | None:
        """Tell an observer the status of the run, or say why it is refused.

        It has `said` the same as newcomers do.
        """
        refusal = _unlike(OBSERVER, said, own, OBSERVED)
        if refusal is None:
            link.break_when_silent(HELLO_S)
            link.send("status", self._status().to_json())
        return refusal


async def _give(
    inviting: Inviting, directory: Directory, away: Collection[int], link: Link
) -> InputError | None:
    try:
        loop = asyncio.get_running_loop()
        files = await loop.run_in_executor(DaemonThreads(), inviting.files)
    except InputError as error:  # Its folder is there again later, or other hosts have it.
        return TemporaryError(error.field, error.value, error.problem, error.remedy)
    own = directory.hello
    places = tuple(inviting.places({*directory.never_taken, *away}))
    addresses = directory.addresses | {own.host: own.address}
    text = inviting.text
    members, placement = inviting.standing
    told = Invitation(
        own.host,
        own.hosts,
        addresses,
        places,
        files.told,
        text,
        own.spare,
        members,
        placement,
    )
    link.send("invitation", told.to_json())
    for _ in range(sum(file.pieces for file in files.told) + MOST_QUESTIONS):
        match await link.heard(ASKS_S):
            case ["piece", file, number]:
                try:
                    piece = files.piece(file, number)
                except ValueError:
                    return None
                link.send("piece", file, number, piece)
                await link.drained(ASKS_S)
            case ["take" | "give" as way, int(size)] if 0 <= size <= MOST_BYTES:
                if not await answer(link, way, size):
                    return None
            case _:
                return None


def _unlike(
    who: str, said: Sequence[Any], own: Hello, packages: Collection[str] | None = None
) -> InputError | None:
    """Explain why a newcomer or observer does not understand this host, by what it has said.

    The versions of these `packages` have to be alike, by default of all that either names.
    """
    match said:
        case [protocol, _] if protocol != PROTOCOL:
            return other_protocol(protocol, own.host)
        case [_, dict(given)]:
            try:
                theirs = texts(given)
            except ValueError:
                theirs = {}
            versions = own.run.versions
            for part in sorted(packages or versions.keys() | theirs.keys()):
                if versions.get(part) != theirs.get(part):
                    problem = f"that is the {who}'s, and host {own.host} has "
                    return InputError(
                        f"the version of {part}",
                        theirs.get(part),
                        f"{problem}{versions.get(part)!r}",
                        "Install the same version on all hosts",
                    )
            return None
    return InputError(who, None, f"that is no {who}", "Install the same version on all hosts")
