"""Sockets that listen, as hosts and services have them, and connections that are cut."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.connections.addresses import listening_socket, sever
from skippipe_jax.serving.server import listen


@pytest.mark.parametrize(
    "made", [lambda: listening_socket("127.0.0.1", 0), lambda: listen("127.0.0.1", 0, ())]
)
def test_connections_send_each_message_at_once(made: Callable[[], socket.socket]):
    async def ends() -> list[int]:
        attended: asyncio.Future[asyncio.StreamWriter] = asyncio.Future()
        given = made()
        async with await asyncio.start_server(
            lambda _, writer: attended.set_result(writer), sock=given
        ):
            _, called = await asyncio.open_connection(*given.getsockname())
            writers = called, await attended
            found = [
                own.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                for own in writers
            ]
            for own in writers:
                own.close()
            return found

    assert asyncio.run(ends()) == [1, 1]


def test_an_address_that_is_not_of_this_host_is_refused_by_the_key_that_gives_it():
    problem = r"cluster\.bind_address = '192\.0\.2\.1:1': this host cannot listen on this address"
    with pytest.raises(InputError, match=problem):
        listening_socket("192.0.2.1", 1, "cluster.bind_address")


def test_connections_at_an_address_are_cut_and_no_others(tmp_path: Path):
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
