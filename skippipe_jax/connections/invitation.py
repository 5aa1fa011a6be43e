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
from dataclasses import dataclass
from typing import Any

from skippipe_jax.connections import checked
from skippipe_jax.connections.addresses import require_numeric

PIECE_BYTES = 1 << 19
"""The longest piece of a file, which base64 makes a third longer."""

MOST_BYTES = 1 << 28
MOST_FILES = 1 << 12
"""What all files of a run take together at most, and how many there may be."""

MOST_HOSTS = 1 << 16
MOST_STAGES = 1 << 12
MOST_NODES = 1 << 17
LONGEST_PAUSE_S = 3600

_DIGEST_LETTERS = hashlib.sha256().digest_size * 2


@dataclass(frozen=True)
class File:
    """A file of the run, by its name in the folder of the run.

    Attributes:
        name: relative, with slashes.
        size: in bytes.
        digest: its sha256.
    """

    name: str
    size: int
    digest: str

    @classmethod
    def of(cls, name: str, content: bytes) -> File:
        """The file of this content."""
        return cls(name, len(content), hashlib.sha256(content).hexdigest())

    @property
    def pieces(self) -> int:
        """In how many pieces it comes."""
        return -(-self.size // PIECE_BYTES)

    def is_of(self, content: bytes) -> bool:
        """Whether this is its content."""
        return File.of(self.name, content) == self


@dataclass(frozen=True)
class Place:
    """That of a host that is lost, or one more.

    Attributes:
        host: its number.
        stages: those that it serves, or would.
        pause_s: how long whoever takes its place has to wait before, as it was lost soon after
            others had taken it.
    """

    host: int
    stages: tuple[int, ...]
    pause_s: float = 0.0


@dataclass(frozen=True)
class Invitation:
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

    host: int
    hosts: int
    addresses: Mapping[int, str]
    places: tuple[Place, ...]
    files: tuple[File, ...]
    text: str | None
    spare: int = 0
    members: tuple[int, ...] = ()
    placement: tuple[tuple[int, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As it is told."""
        return {
            "host": self.host,
            "hosts": self.hosts,
            "addresses": {str(host): address for host, address in self.addresses.items()},
            "places": [[place.host, [*place.stages], place.pause_s] for place in self.places],
            "files": [[file.name, file.size, file.digest] for file in self.files],
            "text": self.text,
            "spare": self.spare,
            "members": [*self.members],
            "placement": [[*nodes] for nodes in self.placement],
        }

    @classmethod
    def parse(cls, given: Any) -> Invitation:
        """The invitation in a message.

        Raises:
            ValueError: if it is none.
        """
        match given:
            case {
                "host": host,
                "hosts": hosts,
                "addresses": dict(addresses),
                "places": list(places),
                "files": list(files),
                "text": text,
                "spare": spare,
                "members": list(members),
                "placement": list(placement),
            } if len(files) <= MOST_FILES:
                hosts = checked.number(hosts, MOST_HOSTS)
                spare = checked.number(spare, MOST_HOSTS)
                most = hosts + spare
                told = cls(
                    checked.number(host, most),
                    hosts,
                    {
                        checked.number(int(checked.text(other)), most): require_numeric(
                            checked.text(at)
                        )
                        for other, at in addresses.items()
                    },
                    tuple(_place(place, most) for place in places),
                    tuple(map(_file, files)),
                    None if text is None else checked.text(text),
                    spare,
                    tuple(checked.number(member, most) for member in members),
                    tuple(map(_nodes, placement)),
                )
                if sum(file.size for file in told.files) > MOST_BYTES:
                    raise ValueError("has too much to give")
                if len({file.name for file in told.files}) < len(told.files):
                    raise ValueError("has two files of one name")
                return told
        raise ValueError("is no invitation")


class Files:
    """The files that are given to newcomers.

    Attributes:
        told: what is told of them.
    """

    def __init__(self, contents: Mapping[str, bytes]):
        """Those of these names and contents."""
        self.told = tuple(File.of(name, content) for name, content in contents.items())
        self._contents: Sequence[bytes] = [*contents.values()]

    def piece(self, file: Any, number: Any) -> str:
        """A piece of a file, as it is told.

        Raises:
            ValueError: if there is no such piece.
        """
        content = self._contents[checked.number(file, len(self._contents))]
        start = checked.number(number, self.told[file].pieces) * PIECE_BYTES
        return base64.b64encode(content[start : start + PIECE_BYTES]).decode()


def piece_told(given: Any) -> bytes:
    """The piece of a file in a message.

    Raises:
        ValueError: if it is none.
    """
    if type(given) is not str or len(given) > 2 * PIECE_BYTES:
        raise ValueError("is no piece of a file")
    try:
        return base64.b64decode(given, validate=True)
    except binascii.Error as error:
        raise ValueError("is no piece of a file") from error


def _nodes(given: Any) -> tuple[int, ...]:
    if type(given) is not list:
        raise ValueError("has something else where the nodes of a stage belong")
    return tuple(checked.number(node, MOST_NODES) for node in given)


def _place(given: Any, most: int) -> Place:
    match given:
        case [host, list(stages), int(pause_s) | float(pause_s)] if len(stages) <= MOST_STAGES:
            if not 0 <= pause_s <= LONGEST_PAUSE_S:
                raise ValueError("has a pause that nobody could keep")
            own = tuple(checked.number(stage, MOST_STAGES) for stage in stages)
            return Place(checked.number(host, most), own, float(pause_s))
    raise ValueError("has something else where a place belongs")


def _file(given: Any) -> File:
    match given:
        case [name, size, str(digest)] if len(digest) == _DIGEST_LETTERS:
            return File(checked.name(name), checked.number(size, MOST_BYTES + 1), digest)
    raise ValueError("has something else where a file belongs")
