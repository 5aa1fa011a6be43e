"""What a host of a run tells those who would like to be hosts of it, too.

A newcomer asks before it is a host: it says `["newcomer", protocol, versions]` and is told an
`Invitation`: which places are free, where all hosts listen, and which files it needs, each with its
size and digest. Then it asks for the files, piece by piece: `["piece", file, number]` is answered
by `["piece", file, number, content]`, in base64, so that every message is as small as all others
between hosts.
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
"""The longest piece of a file, which base64 makes a third longer."""

MOST_BYTES = 1 << 28
MOST_FILES = 1 << 12
"""What all files of a run take together at most, and how many there may be."""

MOST_STAGES = 1 << 12
MOST_NODES = 1 << 17
LONGEST_PAUSE_S = 3600

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Nodes = tuple[Annotated[int, Meta(ge=0, lt=MOST_NODES)], ...]
Stages = Annotated[
    tuple[Annotated[int, Meta(ge=0, lt=MOST_STAGES)], ...], Meta(max_length=MOST_STAGES)
]


class File(msgspec.Struct, frozen=True, array_like=True):
    """A file of the run, by its name in the folder of the run.

    Attributes:
        name: relative, with slashes.
        size: in bytes.
        digest: its sha256.
    """

    name: ShortText
    size: Annotated[int, Meta(ge=0, le=MOST_BYTES)]
    digest: Digest

    @classmethod
    def of(cls, name: str, content: bytes) -> File:
        """Describe the file of this content."""
        return cls(name, len(content), hashlib.sha256(content).hexdigest())

    @property
    def pieces(self) -> int:
        """In how many pieces it comes."""
        return -(-self.size // PIECE_BYTES)

    def is_of(self, content: bytes) -> bool:
        """Tell whether this is its content."""
        return File.of(self.name, content) == self


class Place(msgspec.Struct, frozen=True, array_like=True):
    """That of a host that is lost, or one more.

    Attributes:
        host: its number.
        stages: those that it serves, or would.
        pause_s: how long whoever takes its place has to wait before, as it was lost soon after
            others had taken it.
    """

    host: HostNumber
    stages: Stages
    pause_s: Annotated[float, Meta(ge=0, le=LONGEST_PAUSE_S)] = 0.0


class Invitation(msgspec.Struct, frozen=True):
    """What a newcomer is told.

    Attributes:
        host: which of the hosts tells it.
        hosts: how many the run began with; places from this number on are for more.
        addresses: where those listen of which it knows it.
        places: those that are free.
        files: what a newcomer needs.
        text: the fingerprint of the text that the run reads, if that host knows it.
        spare: how many more there may be.
        members: those that train now.
        placement: the nodes of each stage, by the numbers of the run's own plan.
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
        """Return this as it is sent."""
        return msgspec.to_builtins(self, str_keys=True)

    @classmethod
    def parse(cls, given: Any) -> Invitation:
        """Read the invitation in a message.

        Raises:
            ValueError: if it is none.
        """
        told = msgspec.convert(given, cls, str_keys=True)
        places = (place.host for place in told.places)
        require_below(told.hosts + told.spare, told.host, *told.addresses, *places, *told.members)
        for address in told.addresses.values():
            require_numeric(address)
        if sum(file.size for file in told.files) > MOST_BYTES:
            raise ValueError("has too much to give")
        names = {file.name for file in told.files}
        if len(names) < len(told.files):
            raise ValueError("has two files of one name")
        if any(name != printable(name) for name in names):
            raise ValueError("has a file whose name cannot be printed")
        return told


class Files:
    """The files that are given to newcomers.

    Attributes:
        told: what is told of them.
    """

    def __init__(self, contents: Mapping[str, bytes]):
        """Keep files of these names and contents."""
        self.told = tuple(File.of(name, content) for name, content in contents.items())
        self._contents: Sequence[bytes] = [*contents.values()]

    def piece(self, file: Any, piece: Any) -> str:
        """Return a piece of a file, as it is sent.

        Raises:
            ValueError: if there is no such piece.
        """
        content = self._contents[number(file, len(self._contents))]
        start = number(piece, self.told[file].pieces) * PIECE_BYTES
        return base64.b64encode(content[start : start + PIECE_BYTES]).decode()


def piece_told(given: Any) -> bytes:
    """Read the piece of a file in a message.

    Raises:
        ValueError: if it is none.
    """
    if type(given) is not str or len(given) > 2 * PIECE_BYTES:
        raise ValueError("is no piece of a file")
    try:
        return base64.b64decode(given, validate=True)
    except binascii.Error as error:
        raise ValueError("is no piece of a file") from error
