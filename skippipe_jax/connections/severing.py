"""Shutdown of open connections of this process, including those of libraries."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection
from contextlib import suppress


def sever(addresses: Collection[tuple[str, int]]) -> None:
    """Shut down all TCP connections of this process from or to one of these addresses.

    Operations that wait on them fail at once, as if the peer had closed. Listening sockets stay
    open.
    """
    for descriptor in map(int, os.listdir("/dev/fd")):  # on Linux and macOS alike
        # Another thread may close a descriptor, and reuse its number, at any moment.
        with suppress(OSError):
            # Closing a copy of a file's descriptor would release the file's locks.
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.type != socket.SOCK_STREAM:
                    continue
                if {connection.getsockname()[:2], connection.getpeername()[:2]} & {*addresses}:
                    connection.shutdown(socket.SHUT_RDWR)
