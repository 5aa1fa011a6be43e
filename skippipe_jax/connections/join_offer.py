"""Join offers: messages from a host of a run to machines that want to join it.

A joiner sends `["joiner", protocol, versions]` and receives a `JoinOffer`: the free places,
the addresses of all hosts, and the files that it needs, each with its size and digest. It then
requests the files piece by piece: the answer to `["piece", file, number]` is
`["piece", file, number, content]`. The content is in base64, so that the limits of messages
between hosts hold for it too.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from skippipe_jax.connections.addresses import require_numeric
from skippipe_jax.connections.hello import (
    HostCount,
    HostNumber,
    ShortText,
    number,
    printable,
    require_below,
)

PIECE_BYTES = 1 << 19
"""Maximum size of a piece of a file, before base64 makes it a third longer."""

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

    @property
    def pieces(self) -> int:
        """Number of pieces in which it is sent."""
        return -(-self.size // PIECE_BYTES)

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
        spare: maximum number of extra hosts.
        members: hosts that train now.
        placement: nodes of each stage, numbered as in the run's original plan.
    """

    host: HostNumber
    hosts: HostCount
    addresses: dict[HostNumber, ShortText]
    places: tuple[Place, ...]
    files: Annotated[tuple[File, ...], Meta(max_length=MOST_FILES)]
    text: ShortText | None
    spare: HostCount = 0
    members: tuple[HostNumber, ...] = ()
    placement: tuple[Nodes, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the content of the message."""
        return msgspec.to_builtins(self, str_keys=True)

    @classmethod
    def parse(cls, raw: Any) -> JoinOffer:
        """Parse and validate a join offer.

        Raises:
            ValueError: if it is not a valid join offer.
        """
        offer = msgspec.convert(raw, cls, str_keys=True)
        places = (place.host for place in offer.places)
        require_below(
            offer.hosts + offer.spare, offer.host, *offer.addresses, *places, *offer.members
        )
        for address in offer.addresses.values():
            require_numeric(address)
        if sum(file.size for file in offer.files) > MOST_BYTES:
            raise ValueError(f"the files exceed {MOST_BYTES} bytes")
        names = {file.name for file in offer.files}
        if len(names) < len(offer.files):
            raise ValueError("two files have the same name")
        if any(name != printable(name) for name in names):
            raise ValueError("the name of a file is not printable")
        return offer


class Files:
    """Files that joiners fetch.

    Attributes:
        told: their descriptions, as a join offer has them.
    """

    def __init__(self, contents: Mapping[str, bytes]):
        """Hold files with these names and contents."""
        self.told = tuple(File.of(name, content) for name, content in contents.items())
        self._contents: Sequence[bytes] = [*contents.values()]

    def piece(self, file: Any, piece: Any) -> str:
        """Return a piece of a file in base64.

        Raises:
            ValueError: if there is no such piece.
        """
        content = self._contents[number(file, len(self._contents))]
        start = number(piece, self.told[file].pieces) * PIECE_BYTES
        return base64.b64encode(content[start : start + PIECE_BYTES]).decode()


def decode_piece(raw: Any) -> bytes:
    """Decode the piece of a file in a message.

    Raises:
        ValueError: if it is not a valid piece.
    """
    if type(raw) is not str or len(raw) > 2 * PIECE_BYTES:
        raise ValueError("a chunk of a file is not valid")
    try:
        return base64.b64decode(raw, validate=True)
    except binascii.Error as error:
        raise ValueError("a chunk of a file is not valid") from error
