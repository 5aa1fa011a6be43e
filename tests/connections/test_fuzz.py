"""What listens is sent bytes and messages of all kinds: nothing grows, hangs or ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skippipe_jax.connections import links
from skippipe_jax.connections.hello import PROTOCOL
from tests.connections.meshes import (
    RUN,
    Host,
    assert_all_connected,
    descriptors,
    hello_of,
    line,
    stranger,
    until,
    without_third,
)
from tests.connections.test_join_server import JSON, Run
from tests.harness.json_values import damaged

# Host 2 is lost in the tests, so that strangers may come in its place.
HELLOS = st.sampled_from(
    [
        hello_of(2, 3, comes_back=True),
        hello_of(2, 3, comes_back=True, start=1000),
        hello_of(2, 3),
        hello_of(1, 3, comes_back=True),
        hello_of(2, 4, comes_back=True),
    ]
)
MESSAGES = st.sampled_from(
    [
        ["put", "key", "value"],
        ["beat"],
        ["farewell"],
        ["where", 1],
        ["listens", 1, "127.0.0.1:9"],
        ["verdict", 0, "is lost", 2],
        ["control", ["Heartbeat", 1, 5, [0, -1]]],
        ["clock", 1.0],
        ["welcome", {"host": 2, "name": "", "start": 0, "addresses": {}}],
        ["refused", 2, "a", "b", "c", "d"],
        ["jax"],
        ["join", 1, 3, "host 1"],
        ["joiner", PROTOCOL, dict(RUN.versions)],
        ["observer", PROTOCOL, {}],
        ["file", 0],
        ["take", 3],
        ["give", 5],
    ]
)


LINES = st.one_of(
    st.binary(max_size=60),
    st.binary(max_size=60).map(lambda content: content + b"\n"),
    JSON.map(line),
    damaged(HELLOS, JSON).map(lambda hello: line([hello])),
    MESSAGES.map(line),
    damaged(MESSAGES, JSON).map(line),
    st.sampled_from([b"+\n", b"+[1,\n2]\n", b"[" * 5000 + b"\n", b"\xff\xfe\n", b"\x00" * 40]),
)
JOINER = line(["joiner", PROTOCOL, dict(RUN.versions)])
GREETING = st.just(b"") | HELLOS.map(lambda hello: line([hello])) | st.just(JOINER)


def run_quietly(meeting: Coroutine[Any, Any, None]) -> None:
    """Run it where strangers are closed sooner, and not told of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "HELLO_S", 5.0)
        patch.setattr("skippipe_jax.log.info", lambda text: None)
        asyncio.run(meeting)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Errors that no task has taken are those that end a host."""
    loop, errors = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    yield
    assert errors == []


async def send(host: Host, content: bytes, chance: random.Random) -> None:
    """Send it in pieces, and end the connection in one way or another."""
    try:
        link = await stranger(host)
        cut = chance.randrange(len(content) + 1)
        for piece in (content[:cut], content[cut:]):
            link.writer.write(piece)
            await link.writer.drain()
        if chance.random() < 0.5:
            link.writer.write_eof()
            await asyncio.wait_for(link.reader.read(), 5.0)
        elif chance.random() < 0.5:
            link.writer.transport.abort()
        link.writer.close()
    except ConnectionError:
        return  # The host has ended it, as it may.


@given(
    st.lists(st.tuples(GREETING, st.lists(LINES, max_size=5)), min_size=1, max_size=20),
    st.randoms(use_true_random=False),
)
@settings(max_examples=20)
def test_nothing_that_is_sent_to_a_host_grows_hangs_or_ends(
    contents: list[tuple[bytes, list[bytes]]], chance: random.Random
):
    async def meet() -> None:
        with nothing_left():
            async with without_third() as (first, second):
                first.join_server.make_offer = second.join_server.make_offer = Run()
                before, tasks = descriptors(), len(asyncio.all_tasks())
                # Where no chance is left to draw, hypothesis raises: no coroutine may wait then.
                targets = [chance.choice((first, second)) for _ in contents]
                sending = (
                    send(target, greeting + b"".join(lines), chance)
                    for target, (greeting, lines) in zip(targets, contents, strict=True)
                )
                await asyncio.wait_for(asyncio.gather(*sending), 20.0)
                await assert_all_connected([first, second], "still")
                # A call may be under way to where host 2 was said to be, at each of the two.
                await until(lambda: len(asyncio.all_tasks()) <= tasks + 4)
                await until(lambda: descriptors() <= before + 4)
                # And the right one can come back.
                again = Host(2, 3)
                await until(lambda: 2 not in first.mesh._links or 2 in first.mesh.missed)
                assert await again.rejoin(first)
                await assert_all_connected([first, second, again], "again")
                again.end()

    run_quietly(meet())
