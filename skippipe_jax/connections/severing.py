"""Cutting connections that this process has, whoever opened them and whatever waits on them."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from contextlib import suppress

import psutil


def sever(addresses: Collection[tuple[str, int]]) -> None:
    """Cut all connections of this process that begin or end at one of these addresses.

    What waits for something by them fails at once, as if the other side had ended. What listens
    there listens on.
    """
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and {tuple(connection.laddr), tuple(connection.raddr)} & {*addresses}:
            # It may be closed at any moment, and its number be that of something else.
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as found:
                if {found.getsockname()[:2], found.getpeername()[:2]} & {*addresses}:
                    found.shutdown(socket.SHUT_RDWR)
