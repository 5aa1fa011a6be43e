"""Cutting connections that this process has, whoever opened them and whatever waits on them."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection
from contextlib import suppress


def sever(addresses: Collection[tuple[str, int]]) -> None:
    """Cut all connections of this process that begin or end at one of these addresses.

    What waits for something by them fails at once, as if the other side had ended. What listens
    there listens on.
    """
    for descriptor in map(int, os.listdir("/dev/fd")):  # on Linux and macOS alike
        # It may be closed at any moment, and its number be that of something else.
        with suppress(OSError):
            # A copy of a file's descriptor would let go of the file's locks as it is closed.
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as found:
                if found.type != socket.SOCK_STREAM:
                    continue
                if {found.getsockname()[:2], found.getpeername()[:2]} & {*addresses}:
                    found.shutdown(socket.SHUT_RDWR)
