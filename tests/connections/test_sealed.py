"""The door of a run that has a secret: hosts that have it come in, and others learn nothing."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.connections import host_listener, links
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys, _context, derived
from skippipe_jax.connections.links import (
    HANDSHAKE,
    LINE_BYTES,
    Link,
    open_link,
    reach,
)
from tests.connections.meshes import (
    KEYS,
    OTHER_KEYS,
    PATIENCE_S,
    Host,
    assert_all_connected,
    descriptors,
    first_flight,
    gathered,
    hello_of,
    line,
    stranger,
    until,
    without_third,
)
from tests.connections.test_fuzz import LINES, nothing_left, run_quietly

NEVER_S = 1e6
HELLO = line([hello_of(2, 3, comes_back=True)])


def anonymous() -> ssl.SSLContext:
    """For who has no certificate, and takes any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def of_another_run() -> ssl.SSLContext:
    """For who has the keys of another run, and takes any certificate."""
    key, certificate = derived("b" * 40)
    context = _context(ssl.PROTOCOL_TLS_CLIENT, key, certificate, certificate)
    context.verify_mode = ssl.CERT_NONE
    return context


async def test_hosts_that_have_the_secret_meet_and_come_back():
    before = descriptors()
    async with gathered(3, keys=KEYS) as (first, second, third):
        await assert_all_connected([first, second, third])
        # A message of several lines, with all that JSON may hold.
        value = '"\\\u20ac\U0001f600' * (links.MESSAGE_CHARACTERS // 4)
        first.mesh.send(2, "put", "key", value)
        await until(lambda: (0, ["put", "key", value]) in third.received)
        third.end()
        await until(lambda: first.mesh.missed == second.mesh.missed == {2})
        again = Host(2, 3, keys=KEYS)
        assert await again.rejoin(first)
        await assert_all_connected([first, second, again], "again")
        again.end()
    await until(lambda: descriptors() <= before)


@pytest.mark.parametrize(
    ("there", "here", "told_here", "told_there"),
    [
        (KEYS, OTHER_KEYS, "different secret", "it does not have the secret of this run"),
        (KEYS, LOOPBACK_ONLY, "requires a secret, and this", "it has no secret, and this run has"),
        (LOOPBACK_ONLY, KEYS, "does not use TLS", "it has a secret, and this run has"),
    ],
    ids=["another secret", "no secret", "a secret where there is none"],
)
async def test_a_host_with_other_keys_is_told_so_once_on_both_sides(
    there: Keys, here: Keys, told_here: str, told_there: str, capfd: pytest.CaptureFixture[str]
):
    first, second = Host(0, 2, keys=there), Host(1, 2, keys=there)
    gathering = await first.gather()
    for _ in range(3):
        foreign = Host(1, 2, keys=here)
        with pytest.raises(InputError) as caught:
            await foreign.join(first)
        assert type(caught.value) is InputError
        assert caught.value.field == "cluster.secret"
        assert told_here in caught.value.problem
    assert not gathering.done()
    # In its place comes the right one.
    await asyncio.gather(gathering, second.join(first))
    await assert_all_connected([first, second])
    # Neither does it come back to the run.
    again = await Host(1, 2, keys=here).listen()

    async def comes_back() -> None:
        await again.mesh.rejoin(await open_link(first.address, keys=here))

    with pytest.raises(InputError, match=told_here):
        await comes_back()
    assert first.mesh._links.keys() == {1}
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith("host 0 rejected a connection from ('127.0.0.1', ")
    assert told_there in told


# Time, and how many at once.


async def test_strangers_at_one_address_take_the_place_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
):
    """A host whose handshake takes long, since it is far, is not put out for them."""
    monkeypatch.setattr(links, "HELLO_S", NEVER_S)
    first = await Host(0, 2, keys=KEYS).listen()
    far = Link(
        *await asyncio.open_connection(
            *first.address, limit=LINE_BYTES, local_addr=("127.0.0.2", 0)
        )
    )
    near = [await stranger(first) for _ in range(2 * host_listener.MAX_UNIDENTIFIED)]
    for link in near[: host_listener.MAX_UNIDENTIFIED]:
        assert await link.reader.read() == b""
    assert KEYS.calling is not None
    await far.start_tls(KEYS.calling)
    far.write(line([hello_of(1, 2)]))
    await until(lambda: 1 in first.mesh._links)
    for link in (far, *near):
        link.writer.close()


async def test_a_host_that_is_called_and_does_not_go_on_is_given_up_in_time():
    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # It says nothing until the other end is closed.
        writer.close()

    server = await asyncio.start_server(attend, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()[:2]
    before = descriptors()
    with pytest.raises(TemporaryError, match=r"no connection within 0\.1 s"):
        await reach(address, 0.1, KEYS)
    await until(lambda: descriptors() <= before)
    server.close()


async def test_another_program_at_the_address_is_not_taken_for_a_host():
    async def attend(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        writer.close()

    server = await asyncio.start_server(attend, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()[:2]
    with pytest.raises(InputError) as caught:
        await reach(address, PATIENCE_S, KEYS)
    assert "another program" in caught.value.problem
    server.close()


@pytest.mark.parametrize("cut", [0, 100])
async def test_a_connection_that_is_cut_in_the_handshake_is_tried_again(cut: int):
    """By a network, or by a host that ends just then."""
    first, second = Host(0, 2, keys=KEYS), Host(1, 2, keys=KEYS)
    gathering = await first.gather()
    cuts = 0

    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal cuts
        cuts += 1
        far = await stranger(first)
        if cuts == 1:
            far.writer.write(await reader.read(LINE_BYTES))
            writer.write((await far.reader.readexactly(cut)) if cut else b"")
            await writer.drain()
            far.writer.transport.abort()
            return writer.close()

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError):
                while data := await source.read(LINE_BYTES):
                    target.write(data)
            target.close()

        await asyncio.gather(pump(reader, far.writer), pump(far.reader, writer))

    server = await asyncio.start_server(attend, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()[:2]
    await second.listen()
    link = await reach(address, PATIENCE_S, KEYS)
    await asyncio.gather(gathering, second.mesh.join(address, link))
    assert cuts == 2
    await assert_all_connected([first, second])
    server.close()


# Who does not have the secret.


async def all_answers(link: Link) -> bytes:
    with suppress(ConnectionError):
        return await asyncio.wait_for(link.reader.read(), PATIENCE_S)
    return b""


def holds_records_only(answer: bytes) -> bool:
    """Whether it is what TLS says, whole or in part, and nothing else."""
    while len(answer) >= 5:
        # The version is one that the other end has asked for.
        kind, size = answer[0], int.from_bytes(answer[3:5])
        if kind not in (20, 21, 22, 23):
            return False
        answer = answer[5 + size :]
    return True


async def heard_after(link: Link, context: ssl.SSLContext, said: bytes) -> bytes:
    """What the other end says behind a whole handshake."""
    await link.start_tls(context)
    link.write(said)
    heard = b""
    with suppress(ssl.SSLError, ConnectionError):
        while data := await asyncio.wait_for(link.read(), PATIENCE_S):
            heard += data
    return heard


@asynccontextmanager
async def unmoved() -> AsyncIterator[Host]:
    """A host of two that are there and one that is lost, to which nothing happens meanwhile."""
    async with without_third(KEYS) as (first, second):
        with nothing_left():
            before, tasks = descriptors(), len(asyncio.all_tasks())
            received = len(first.received)
            yield first
            assert len(first.received) == received
            assert first.mesh._links.keys() == {1}
            assert first.mesh.missed == {2}
            assert first.mesh.directory.addresses[2] != "127.0.0.1:9"
            # A call may be under way to where host 2 was said to be, at each of the two.
            await until(lambda: len(asyncio.all_tasks()) <= tasks + 4)
            await until(lambda: descriptors() <= before + 4)
        await assert_all_connected([first, second], "still")


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=400),
            st.binary(max_size=400).map(lambda content: HANDSHAKE + b"\x03\x01" + content),
            st.lists(LINES, max_size=3).map(b"".join),
            st.just(HELLO),
            st.tuples(st.integers(0, 300), st.integers(0, 255)).map(
                lambda change: damaged(first_flight(), *change)
            ),
        ),
        min_size=1,
        max_size=10,
    )
)
@settings(max_examples=20)
def test_strangers_get_nothing_but_a_handshake_and_change_nothing(contents: list[bytes]):
    async def send(host: Host, content: bytes) -> None:
        try:
            link = await stranger(host)
            link.writer.write(content)
            link.writer.write_eof()
            answer = await all_answers(link)
            link.writer.close()
        except ConnectionError:
            return
        assert holds_records_only(answer), answer

    async def meet() -> None:
        async with unmoved() as host:
            await asyncio.gather(*(send(host, content) for content in contents))

    run_quietly(meet())


def damaged(flight: bytes, place: int, byte: int) -> bytes:
    """A handshake in which one byte is another."""
    place %= len(flight)
    return flight[:place] + bytes([byte]) + flight[place + 1 :]


@pytest.mark.parametrize("who", [anonymous, of_another_run])
async def test_a_whole_handshake_and_a_hello_without_the_secret_are_worth_nothing(
    who: Callable[[], ssl.SSLContext],
):
    async with unmoved() as host:
        link = await stranger(host)
        assert await heard_after(link, who(), HELLO) == b""
        link.writer.close()
