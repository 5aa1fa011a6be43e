"""Sockets that listen, as hosts and services have them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.connections.addresses import listening_socket
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
