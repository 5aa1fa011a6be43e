"""Connections of this process are cut by the addresses at their ends, and no others."""

from __future__ import annotations

import importlib
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from skippipe_jax.connections import severing


def test_connections_at_an_address_are_cut_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By what every installation has: psutil comes with the extra `test` alone."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    sever = importlib.reload(severing).sever
    with ExitStack() as held:

        def connected(server: socket.socket) -> tuple[socket.socket, socket.socket]:
            near = held.enter_context(socket.create_connection(server.getsockname(), 10.0))
            far = held.enter_context(server.accept()[0])
            far.settimeout(10.0)
            return near, far

        cut, kept = (held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2))
        others = (
            held.enter_context(socket.socketpair()[0]),
            held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)),
        )
        file = held.enter_context((tmp_path / "file").open("w"))
        of_cut, of_kept = connected(cut), connected(kept)
        sever([cut.getsockname()])
        assert [end.recv(1) for end in of_cut] == [b"", b""]
        of_kept[0].sendall(b"x")
        assert of_kept[1].recv(1) == b"x"
        connected(cut)  # What listens there listens on.
        file.write("whole")
        assert all(other.fileno() >= 0 for other in others)
        # An address may be that at which a connection begins, too.
        sever([of_kept[0].getsockname()])
        assert [end.recv(1) for end in of_kept] == [b"", b""]
