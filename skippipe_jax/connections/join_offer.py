"""Join offers: messages from a host of a run to machines that want to join it.

A joiner sends `["joiner", protocol, versions]` and receives a `JoinOffer`: the free places,
the addresses of all hosts, and the files that it needs, each with its size and digest. It then
requests one file after another: the answer to `["file", number]` is the content, as raw bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from skippipe_jax.connections.addresses import require_numeric
from skippipe_jax.connections.hello import (
    HostCount,
    HostNumber,
    ShortText,
    ascii_text,
    require_below,
)

MOST_BYTES = 1 << 28
MOST_FILES = 1 << 12
"""Maximum total size, and maximum number, of the files of a run."""

MOST_STAGES = 1 << 12
MOST_NODES = 1 << 17
LONGEST_PAUSE_S = 3600

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Nodes = tuple[Annotated[int, Meta(ge=0, lt=MOST_NODES)], ...]
Stages = Annotated[
    tuple[Annotated[int, Meta(ge=0, lt=MOST_STAGES)], ...], Meta(max_length=MOST_STAGES)
]


class File(msgspec.Struct, frozen=True, array_like=True):
    """File in the run directory.

    Attributes:
        name: path relative to the run directory, with slashes.
        size: size in bytes.
        digest: sha256 of its content.
    """

    name: ShortText
    size: Annotated[int, Meta(ge=0, le=MOST_BYTES)]
    digest: Digest

    @classmethod
    def of(cls, name: str, content: bytes) -> File:
        """Return the description of a file with this name and content."""
        return cls(name, len(content), hashlib.sha256(content).hexdigest())

    def is_of(self, content: bytes) -> bool:
        """Return True if this is the content of the file."""
        return File.of(self.name, content) == self


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Host id that a joiner may take: that of a lost host, or of an extra host.

    Attributes:
        host: the host id.
        stages: stages that this host serves, or would serve.
        pause_s: seconds that a joiner has to wait before it takes the id, because earlier
            joiners were lost soon after they took it.
    """

    host: HostNumber
    stages: Stages
    pause_s: Annotated[float, Meta(ge=0, le=LONGEST_PAUSE_S)] = 0.0


class JoinOffer(msgspec.Struct, frozen=True):
    """Join offer that a joiner receives.

    Attributes:
        host: id of the sender.
        hosts: number of hosts that the run started with; extra hosts have ids from this on.
        addresses: listening addresses of the hosts that the sender has.
        places: free places.
        files: files that a joiner needs.
        text: fingerprint of the training text, if the sender has it.
        extra_hosts: maximum number of extra hosts.
        members: hosts that train now.
        placement: nodes of each stage, numbered as in the run's original plan.
    """

    host: HostNumber
    hosts: HostCount
    addresses: dict[HostNumber, ShortText]
    places: tuple[Place, ...]
    files: Annotated[tuple[File, ...], Meta(max_length=MOST_FILES)]
    text: ShortText | None
    extra_hosts: HostCount = 0
    members: tuple[HostNumber, ...] = ()
    placement: tuple[Nodes, ...] = ()

    @classmethod
    def parse(cls, raw: Any) -> JoinOffer:
        """Parse and validate a join offer.

        Raises:
            ValueError: if it is not a valid join offer.
        """
        offer = msgspec.convert(raw, cls, str_keys=True)
        places = (place.host for place in offer.places)
        require_below(
            offer.hosts + offer.extra_hosts, offer.host, *offer.addresses, *places, *offer.members
        )
        for address in offer.addresses.values():
            require_numeric(address)
        if sum(file.size for file in offer.files) > MOST_BYTES:
            raise ValueError(f"the files exceed {MOST_BYTES} bytes")
        names = {file.name for file in offer.files}
        if len(names) < len(offer.files):
            raise ValueError("two files have the same name")
        if any(name != ascii_text(name) for name in names):
            raise ValueError("the name of a file is not printable")
        return offer


def describe_files(contents: Mapping[str, bytes]) -> tuple[File, ...]:
    """Return the descriptions of files with these names and contents."""
    return tuple(File.of(name, content) for name, content in contents.items())
