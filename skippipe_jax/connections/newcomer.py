"""Asks the hosts of a run which place a newcomer could take, and fetches what it needs for it.

What has come whole is not asked for again, whichever host is asked next: so a newcomer that was cut
off goes on where it was, and one that waits for a place asks for nothing but the places.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.connections.addresses import parse_address
from skippipe_jax.connections.hello import PROTOCOL, refusal_in, versions
from skippipe_jax.connections.invitation import File, Invitation, piece_told
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys
from skippipe_jax.connections.links import SENT_NONSENSE, WANTS_SECRET, Link, open_link
from skippipe_jax.connections.reception import ASKS_S, JOINING
from skippipe_jax.connections.ways import Way, measured

GIVE_ANOTHER = "Give an address at which a host of the run listens: its membership.jsonl has them"


class NobodyListens(TemporaryError):
    """At none of the addresses anything listens, as the machines there say themselves."""


class Newcomer:
    """What a newcomer has been told, and given so far.

    Attributes:
        contents: the files that have come whole, or were there before, by name.
        fetched: how many bytes have come.
    """

    def __init__(self, keys: Keys = LOOPBACK_ONLY):
        """Begin with nothing, as a host with the keys of the run or without."""
        self._keys = keys
        self.contents: dict[str, bytes] = {}
        self.fetched = 0

    async def ask(
        self, addresses: Sequence[str], wanted: Collection[str] | None = None
    ) -> tuple[str, Invitation]:
        """Ask at these addresses; return the first at which a host answers, and its answer.

        All the files are there then, and no others; or those that are `wanted`, of these names.

        Raises:
            InputError: if a host refuses this one for good.
            NobodyListens: if the machines at all of these addresses refuse a connection.
            TemporaryError: if none answers, or what comes is not what was told.
        """
        errors: list[TemporaryError] = []
        for address in dict.fromkeys(addresses):
            try:
                return address, await self._ask(address, wanted)
            except TemporaryError as error:
                errors.append(error)
        raise next((error for error in errors if not isinstance(error, NobodyListens)), errors[0])

    async def ways(self, addresses: Mapping[int, str], most_s: float) -> dict[int, Way]:
        """Measure the ways to hosts that answer there, for so many seconds together."""
        ways: dict[int, Way] = {}
        for host, address in addresses.items():
            with suppress(TemporaryError):  # It may be lost, and others know of it soon.
                async with self._invited(address) as (link, _):
                    ways[host] = await measured(link, most_s / len(addresses))
        return ways

    async def _ask(self, address: str, wanted: Collection[str] | None) -> Invitation:
        async with self._invited(address) as (link, invitation):
            await self._fetch(link, invitation.files, wanted)
        return invitation

    @asynccontextmanager
    async def _invited(self, address: str) -> AsyncIterator[tuple[Link, Invitation]]:
        try:
            link = await open_link(parse_address("ADDRESS", address), keys=self._keys)
        except ConnectionRefusedError as error:
            problem = "nobody listens there: the connection was refused"
            raise NobodyListens(JOINING, address, problem, GIVE_ANOTHER) from error
        except (OSError, TimeoutError) as error:
            raise _unanswered(address, str(error) or "no answer") from error
        try:
            link.send("newcomer", PROTOCOL, dict(versions()))
            yield link, await self._invitation(link, address)
        except InputError:
            raise
        except (ValueError, OSError) as error:
            raise _unanswered(address, str(error)) from error
        finally:
            link.writer.close()

    async def _invitation(self, link: Link, address: str) -> Invitation:
        answer = await _heard(link)
        if (refusal := refusal_in(answer)) is not None:
            raise refusal
        match answer:
            case ["invitation", told]:
                return Invitation.parse(told)
            case None if link.ending == WANTS_SECRET:
                raise self._keys.is_one_sided(parse_address("ADDRESS", address))
        raise ValueError(link.ending if answer is None else SENT_NONSENSE)

    async def _fetch(
        self, link: Link, files: Sequence[File], wanted: Collection[str] | None
    ) -> None:
        for place, file in enumerate(files):
            if wanted is not None and file.name not in wanted:
                continue
            content = self.contents.get(file.name)
            if content is None or not file.is_of(content):
                # It stays, whatever becomes of the rest.
                self.contents[file.name] = await self._content(link, place, file)
        there = {file.name for file in files}
        self.contents = {name: own for name, own in self.contents.items() if name in there}

    async def _content(self, link: Link, place: int, file: File) -> bytes:
        content = bytearray()
        for number in range(file.pieces):
            link.send("piece", place, number)
            match await _heard(link):
                case ["piece", of_file, of_number, piece] if (of_file, of_number) == (
                    place,
                    number,
                ):
                    content += piece_told(piece)
                case _:
                    raise ValueError(f"a piece of {file.name} did not come ({link.ending})")
        self.fetched += len(content)
        if not file.is_of(bytes(content)):
            raise ValueError(f"{file.name} came otherwise than it was told")
        return bytes(content)


async def _heard(link: Link) -> Any:
    try:
        return await asyncio.wait_for(link.receive(), ASKS_S)
    except TimeoutError:
        link.ending = f"nothing came for {ASKS_S:g} s"
        return None


def _unanswered(address: str, why: str) -> TemporaryError:
    return TemporaryError(
        JOINING,
        address,
        f"no host of a run answers there as newcomers are answered ({why})",
        GIVE_ANOTHER,
    )
