"""Client for machines that are not hosts of a run: requests its status, or a place in it.

A file that has been received completely is not requested again from any host. So a joiner that
was disconnected continues where it was, and one that waits for a place requests only the places.
"""

from __future__ import annotations

from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

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


@asynccontextmanager
async def asking(
    field: str,
    address: str,
    keys: Keys,
    question: tuple[str, Mapping[str, str]],
    answer: tuple[str, Callable[[Any], T]],
    timeout_s: float,
) -> AsyncIterator[tuple[Link, T]]:
    """Connect to a host, send a question, and yield the connection and the parsed answer.

    `question` is the kind of guest that this machine is, and its versions. `answer` is the kind of
    the expected message, and the function that parses its content. Errors have the field `field`.
    Errors of the block are not changed; `valid_answers` is for those of later answers.

    Raises:
        InputError: if the host refuses this machine permanently.
        NoListener: if the machine there refuses the connection.
        TemporaryError: if no host answers within `timeout_s`, or the answer is not valid.
    """
    try:
        link = await open_link(parse_address("ADDRESS", address), keys=keys)
    except ConnectionRefusedError as error:
        problem = "connection refused: no process listens at this address"
        raise NoListener(field, address, problem, GIVE_ANOTHER) from error
    except OSError as error:
        raise _unanswered(field, address, why_unreachable(error)) from error
    except InputError as error:
        raise _with_own_remedy(error, keys) from error
    (who, versions), (kind, read) = question, answer
    try:
        with valid_answers(field, address):
            link.send(who, PROTOCOL, dict(versions))
            message = await link.heard(timeout_s)
            if (refusal := refusal_in(message)) is not None:
                raise refusal
            match message:
                case [name, content] if name == kind:
                    parsed = read(content)
                case None if link.ending == REQUIRES_SECRET:
                    error = keys.is_one_sided(parse_address("ADDRESS", address))
                    raise _with_own_remedy(error, keys)
                case _:
                    raise ValueError(link.ending if message is None else INVALID_MESSAGE)
        yield link, parsed
    finally:
        link.writer.close()


@contextmanager
def valid_answers(field: str, address: str) -> Iterator[None]:
    """Raise errors of a host's answers in a block as `TemporaryError`; others are not changed."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, OSError) as error:
        raise _unanswered(field, address, str(error)) from error


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
    question = OBSERVER, {part: versions()[part] for part in OBSERVED}
    answer = "status", RunStatus.parse

    async def ask(address: str) -> RunStatus:
        async with asking("status", address, keys, question, answer, HELLO_S) as (_, status):
            return status

    return await first_answer(addresses, ask)


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

        async def ask(address: str) -> JoinOffer:
            async with self._invited(address) as (link, offer):
                with valid_answers(JOINING, address):
                    await self._fetch(link, offer.files, wanted)
            return offer

        return await first_answer(addresses, ask)

    async def ways(self, addresses: Mapping[int, str], most_s: float) -> dict[int, MeasuredLink]:
        """Measure the links to the hosts that answer, for about `most_s` seconds in total."""
        ways: dict[int, MeasuredLink] = {}
        for host, address in addresses.items():
            with suppress(TemporaryError):  # A lost host; others will detect it soon.
                async with self._invited(address) as (link, _):
                    with valid_answers(JOINING, address):
                        ways[host] = await measured(link, most_s / len(addresses))
        return ways

    def _invited(self, address: str) -> AbstractAsyncContextManager[tuple[Link, JoinOffer]]:
        question, answer = (JOINER, versions()), ("offer", JoinOffer.parse)
        return asking(JOINING, address, self._keys, question, answer, ASKS_S)

    async def _fetch(
        self, link: Link, files: Sequence[File], wanted: Collection[str] | None
    ) -> None:
        for place, file in enumerate(files):
            if wanted is not None and file.name not in wanted:
                continue
            content = self.contents.get(file.name)
            if content is None or not file.is_of(content):
                # Stored at once, so that it is kept if the connection breaks.
                self.contents[file.name] = await self._content(link, place, file)
        names = {file.name for file in files}
        self.contents = {name: own for name, own in self.contents.items() if name in names}

    async def _content(self, link: Link, place: int, file: File) -> bytes:
        link.send("file", place)
        content = await link.exactly(file.size, ASKS_S)
        if content is None:
            raise ValueError(f"{file.name} was not received completely ({link.ending})")
        self.fetched += len(content)
        if not file.is_of(content):
            raise ValueError(f"{file.name} does not match its announced digest")
        return content
