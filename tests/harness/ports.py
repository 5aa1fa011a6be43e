"""Ports for the hosts that a test starts, in order, from a part that no other process of tests has.

A host binds its port itself, after the test has chosen it. So no two workers, and no two checkouts
on one machine, may choose from the same ports.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import socket
import tempfile
from collections.abc import Iterator
from typing import IO

from skippipe_jax.local.hosts import PORTS

PARTS = 16
# Below those that Linux gives away, like `PORTS` above them.
BLOCKS = range(20_000, 20_000 + PARTS * 512, 32)
_locked: list[IO[bytes]] = []


def free_port() -> int:
    """Return a port of loopback on which nobody listens."""
    return next(port for port in _own_ports() if not _is_taken(port))


def free_block() -> int:
    """Return the first of 32 ports of loopback on which nobody listens."""
    return next(
        first for first in _own_blocks() if not any(map(_is_taken, range(first, first + 32)))
    )


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@functools.cache
def _own_ports() -> Iterator[int]:
    size = len(PORTS) // PARTS
    return itertools.cycle(PORTS[_own_part() * size :][:size])


@functools.cache
def _own_blocks() -> Iterator[int]:
    size = len(BLOCKS) // PARTS
    return itertools.cycle(BLOCKS[_own_part() * size :][:size])


@functools.cache
def _own_part() -> int:
    """Lock a part for as long as this process lives; return its number."""
    folder = os.path.join(tempfile.gettempdir(), f"skippipe_jax_ports_of_{os.getuid()}")
    os.makedirs(folder, exist_ok=True)
    for part in range(PARTS):
        file = open(os.path.join(folder, str(part)), "wb")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
        else:
            _locked.append(file)
            return part
    raise RuntimeError(f"more than {PARTS} processes run tests on this machine")
