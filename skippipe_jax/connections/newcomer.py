"""Asks the hosts of a run which place a newcomer could take, and fetches what it needs for it.

What has come whole is not asked for again, whichever host is asked next: so a newcomer that was cut
off goes on where it was, and one that waits for a place asks for nothing but the places.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress

from skippipe_sched.errors import TemporaryError

from skippipe_jax.connections.asking import asking, first_answer, heard
from skippipe_jax.connections.hello import versions
from skippipe_jax.connections.invitation import File, Invitation, piece_told
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys
from skippipe_jax.connections.links import Link
from skippipe_jax.connections.reception import ASKS_S, JOINING, NEWCOMER
from skippipe_jax.connections.ways import Way, measured


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

        async def ask(address: str) -> Invitation:
            async with self._invited(address) as (link, invitation):
                await self._fetch(link, invitation.files, wanted)
            return invitation

        return await first_answer(addresses, ask)

    async def ways(self, addresses: Mapping[int, str], most_s: float) -> dict[int, Way]:
        """Measure the ways to hosts that answer there, for so many seconds together."""
        ways: dict[int, Way] = {}
        for host, address in addresses.items():
            with suppress(TemporaryError):  # It may be lost, and others know of it soon.
                async with self._invited(address) as (link, _):
                    ways[host] = await measured(link, most_s / len(addresses))
        return ways

    def _invited(self, address: str) -> AbstractAsyncContextManager[tuple[Link, Invitation]]:
        question, answer = (NEWCOMER, versions()), ("invitation", Invitation.parse)
        return asking(JOINING, address, self._keys, question, answer, ASKS_S)

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
            match await heard(link, ASKS_S):
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
