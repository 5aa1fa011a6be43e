"""Client for machines that are not hosts of a run: requests its status, or a place in it.

A file that has been received completely is not requested again from any host. So a joiner that
was disconnected continues where it was, and one that waits for a place requests only the places.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.connections.addresses import parse_address
from skippipe_jax.connections.hello import PROTOCOL, refusal_in, versions
from skippipe_jax.connections.join_offer import File, JoinOffer
from skippipe_jax.connections.join_server import ASKS_S, JOINER, JOINING, OBSERVED, OBSERVER
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys
from skippipe_jax.connections.link_probe import MeasuredLink, measured
from skippipe_jax.connections.links import (
    HELLO_S,
    INVALID_MESSAGE,
    REQUIRES_SECRET,
    Link,
    open_link,
)
from skippipe_jax.connections.status import RunStatus
from skippipe_jax.connections.waiting import why_unreachable

T = TypeVar("T")

GIVE_ANOTHER = "Use the address of a host of the run, as listed in its membership.jsonl"

GIVE_SECRET = (
    "Use --set cluster.secret=FILE with the secret of the run, or --set cluster.insecure=true if "
    "the run has no secret and the network is trusted"
)


class NoListener(TemporaryError):
    """Connection refused by the machines at all of the addresses: nothing listens there."""


async def first_answer(
    addresses: Sequence[str], ask: Callable[[str], Awaitable[T]]
) -> tuple[str, T]:
    """Ask at one address after another; return the first one that answers, and its answer.

    Raises:
        InputError: if a host refuses this machine permanently.
        NoListener: if the machines at all of these addresses refuse a connection.
        TemporaryError: if no host answers.
    """
    errors: list[TemporaryError] = []
    for address in dict.fromkeys(addresses):
        try:
            return address, await ask(address)
        except TemporaryError as error:
            errors.append(error)
    raise next((error for error in errors if not isinstance(error, NoListener)), errors[0])


_REQUESTS = {
    JOINER: (JOINING, "offer", (), ASKS_S),
    OBSERVER: ("status", "status", OBSERVED, HELLO_S),
}
"""By kind of guest: field of errors, kind of the answer, packages whose versions are sent (all, if
empty), and seconds until the answer."""


async def _ask(who: str, address: str, keys: Keys, then: Callable[[Link, Any], Awaitable[T]]) -> T:
    """Send a request to a host, and return the result of `then(link, content)` for its answer.

    `who` is `JOINER` or `OBSERVER`. `then` gets the connection and the content of the answer, and
    raises `ValueError` if this or a later answer is not valid.

    Raises:
        InputError: if the host refuses this machine permanently.
        NoListener: if the machine there refuses the connection.
        TemporaryError: if no host answers in time, or an answer is not valid.
    """
    field, kind, parts, timeout_s = _REQUESTS[who]
    where = parse_address("ADDRESS", address)
    try:
        link = await open_link(where, keys=keys)
    except ConnectionRefusedError as error:
        problem = "connection refused: no process listens at this address"
        raise NoListener(field, address, problem, GIVE_ANOTHER) from error
    except OSError as error:
        raise _unanswered(field, address, why_unreachable(error)) from error
    except InputError as error:
        raise _with_own_remedy(error, keys) from error
    try:
        link.send(who, PROTOCOL, {part: versions()[part] for part in parts or versions()})
        message = await link.heard(timeout_s)
        if (refusal := refusal_in(message)) is not None:
            raise refusal
        match message:
            case [name, content] if name == kind:
                return await then(link, content)
            case None if link.ending == REQUIRES_SECRET:
                raise _with_own_remedy(keys.is_one_sided(where), keys)
        raise ValueError(link.ending if message is None else INVALID_MESSAGE)
    except InputError:
        raise
    except (ValueError, OSError) as error:
        raise _unanswered(field, address, str(error)) from error
    finally:
        link.writer.close()


def _unanswered(field: str, address: str, why: str) -> TemporaryError:
    problem = f"no host of a run answered at this address ({why})"
    return TemporaryError(field, address, problem, GIVE_ANOTHER)


def _with_own_remedy(error: InputError, keys: Keys) -> InputError:
    """Return an error with the remedy for a missing secret, if this machine has none."""
    if keys.has_secret:
        return error
    return InputError(error.field, error.value, error.problem, GIVE_SECRET)


async def observe(addresses: Sequence[str], keys: Keys = LOOPBACK_ONLY) -> tuple[str, RunStatus]:
    """Request the status of a run; return the first address that answers, and the status.

    Raises:
        InputError: if a host refuses this machine permanently.
        NoListener: if the machines at all of these addresses refuse a connection.
        TemporaryError: if no host answers.
    """

    async def parse(_: Link, content: Any) -> RunStatus:
        return msgspec.convert(content, RunStatus)

    return await first_answer(addresses, lambda address: _ask(OBSERVER, address, keys, parse))


class JoinClient:
    """Client of a joiner, with the files that it has received so far.

    Attributes:
        contents: complete files, by name; they may be set before.
        fetched: number of bytes received.
    """

    def __init__(self, keys: Keys = LOOPBACK_ONLY):
        """Start without files; `keys` are those of the run."""
        self._keys = keys
        self.contents: dict[str, bytes] = {}
        self.fetched = 0

    async def ask(
        self, addresses: Sequence[str], wanted: Collection[str] | None = None
    ) -> tuple[str, JoinOffer]:
        """Request a join offer and its files; return the first address that answers, and it.

        Fetches the `wanted` files, by default all of the join offer, and drops `contents` that the
        join offer does not list.

        Raises:
            InputError: if a host refuses this machine permanently.
            NoListener: if the machines at all of these addresses refuse a connection.
            TemporaryError: if no host answers, or its answers are not valid.
        """

        async def fetch(link: Link, content: Any) -> JoinOffer:
            offer = JoinOffer.parse(content)
            await self._fetch(link, offer.files, wanted)
            return offer

        return await first_answer(
            addresses, lambda address: _ask(JOINER, address, self._keys, fetch)
        )

    async def ways(self, addresses: Mapping[int, str], most_s: float) -> dict[int, MeasuredLink]:
        """Measure the links to the hosts that answer, for about `most_s` seconds in total."""
        ways: dict[int, MeasuredLink] = {}

        async def measure(link: Link, _: Any) -> MeasuredLink:
            return await measured(link, most_s / len(addresses))

        for host, address in addresses.items():
            with suppress(TemporaryError):  # A lost host; others will detect it soon.
                ways[host] = await _ask(JOINER, address, self._keys, measure)
        return ways

    async def _fetch(
        self, link: Link, files: Sequence[File], wanted: Collection[str] | None
    ) -> None:
        for number, file in enumerate(files):
            if wanted is not None and file.name not in wanted:
                continue
            content = self.contents.get(file.name)
            if content is None or not file.is_of(content):
                # Stored at once, so that it is kept if the connection breaks.
                self.contents[file.name] = await self._content(link, number, file)
        names = {file.name for file in files}
        self.contents = {name: own for name, own in self.contents.items() if name in names}

    async def _content(self, link: Link, number: int, file: File) -> bytes:
        link.send("file", number)
        content = await link.exactly(file.size, ASKS_S)
        if content is None:
            raise ValueError(f"{file.name} was not received completely ({link.ending})")
        self.fetched += len(content)
        if not file.is_of(content):
            raise ValueError(f"{file.name} does not match its announced digest")
        return content
