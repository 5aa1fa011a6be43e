"""Join offer of this host to a machine that asks to join a run.

It consists of the free places as this host sees them, the pause of each place whose hosts were lost
soon after they joined, and the files of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from skippipe_jax.clock import SYSTEM_CLOCK, Clock
from skippipe_jax.connections.hello import Hello
from skippipe_jax.connections.join_offer import File, JoinOffer, Place, describe_files
from skippipe_jax.connections.join_server import Pauses
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.storage.joined_folder import contents_of, file_stamps


class JoinOffers:
    """Source of the places and files of a run that its `JoinServer` offers.

    Attributes:
        text: the fingerprint of the text that the run reads, once a host has reported it.
    """

    def __init__(self, folder: Path, hosts: int, clock: Clock = SYSTEM_CLOCK):
        """Offer places in the run of `folder`, which started with `hosts` hosts."""
        self._hosts = hosts
        self.text: str | None = None
        self._folder, self._clock = folder, clock
        self._serves: Callable[[int], tuple[int, ...]] = lambda host: ()
        self._pauses = Pauses()
        self._generation: Generation | None = None
        self._stamps: object = None
        self._files: tuple[tuple[File, ...], list[bytes]] = (), []

    def entered(
        self, generation: Generation, serves: Callable[[int], tuple[int, ...]], text: str | None
    ) -> None:
        """Record the hosts of the new generation, and the fingerprint of its text if one reads it.

        `serves` returns the stages that a host serves, or would serve if it joined.
        """
        processes = dict(zip(generation.members, generation.processes, strict=True))
        self._pauses.entered(processes, self._clock.now())
        self._generation, self._serves = generation, serves
        self.text = self.text if text is None else text

    def offer(
        self, own: Hello, addresses: dict[int, str], free: Collection[int]
    ) -> tuple[JoinOffer, list[bytes]]:
        """Return the offer of the host `own`, and the contents of its files.

        `free` are the ids of lost hosts.

        Raises:
            InputError: if the files cannot be read.
        """
        (files, contents), generation = self.files(), self._generation
        assert generation is not None, "was entered"
        run = own.host, own.hosts, addresses
        offered = tuple(self.places(free)), files, self.text
        standing = generation.members, generation.placement
        return JoinOffer(*run, *offered, own.extra_hosts, *standing), contents

    def places(self, free: Collection[int]) -> list[Place]:
        """List the free places at which a host would serve a stage.

        Empty while a lost host is still a member: its place is about to be free. Without extra
        places while an original host is neither a member nor lost: it is rejoining, or this host is
        the last to detect its loss.
        """
        generation, now_s = self._generation, self._clock.now()
        if generation is None or set(free).intersection(generation.members):
            return []
        if not {*generation.members, *free}.issuperset(range(self._hosts)):
            free = [host for host in free if host < self._hosts]
        return [
            Place(host, stages, self._pauses.pause_s(host, now_s))
            for host in sorted(free)
            if (stages := self._serves(host))
        ]

    def files(self) -> tuple[tuple[File, ...], list[bytes]]:
        """Return the files of the run that joiners need, and their contents.

        They are read again if they have changed.

        Raises:
            InputError: if they cannot be read.
        """
        stamps = file_stamps(self._folder)
        if self._stamps != stamps:
            contents = contents_of(self._folder)
            self._files, self._stamps = (describe_files(contents), [*contents.values()]), stamps
        return self._files
