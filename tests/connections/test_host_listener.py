"""Who comes in by the port of a host, and who does not."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.connections import host_listener, links
from skippipe_jax.connections.hello import PROTOCOL, Hello, RunIdentity, Welcome
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys
from skippipe_jax.connections.links import INVALID_MESSAGE, reach
from tests.connections.meshes import (
    KEYS,
    PATIENCE_S,
    RUN,
    Host,
    answer_to,
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

# Nothing here waits for that long.
NEVER_S = 1e6


def changed(**parts: Any) -> dict[str, Any]:
    """A hello in which some parts are something else."""
    return hello_of(2, 3) | parts


NO_HELLOS = [
    changed(host=-1),
    changed(host=3, hosts=3),
    changed(host=True),
    changed(host=2, hosts=1 << 70),
    changed(process=1 << 48),
    changed(name="x" * 5000),
    changed(address="vienna:80"),
    changed(address="127.0.0.1:65536"),
    changed(address="127.0.0.1:" + "9" * 5000),
    changed(address="fe80::1%..:80"),
    changed(address="\ud800:80"),
    changed(run={"identity": {"run_dir": 3}, "settings": {}, "versions": {}}),
    changed(run={"identity": {str(n): "" for n in range(1025)}, "settings": {}, "versions": {}}),
    {"protocol": PROTOCOL, "host": 2, "hosts": 3},
]


@pytest.mark.parametrize("hello", NO_HELLOS, ids=range(len(NO_HELLOS)))
def test_a_hello_with_anything_out_of_range_is_none(hello: dict[str, Any]):
    with pytest.raises(ValueError):  # noqa: PT011
        Hello.parse(hello)


@pytest.mark.parametrize(
    ("run", "named"),
    [
        (replace(RUN, identity={**RUN.identity, "run_dir": "runs/b"}), "run_dir = 'runs/b'"),
        (replace(RUN, identity={**RUN.identity, "model": "other"}), "model = 'other'"),
        (replace(RUN, identity={}), "model = None"),
        (replace(RUN, versions={"jax": "0.9"}), "jax version = '0.9'"),
        (replace(RUN, versions={}), "jax version = None"),
    ],
)
async def test_a_host_of_another_run_or_version_is_refused_and_both_sides_name_it(
    run: RunIdentity, named: str, capfd: pytest.CaptureFixture[str]
):
    first, foreign, second = Host(0, 2), Host(1, 2, run), Host(1, 2)
    gathering = await first.gather()
    with pytest.raises(InputError) as caught:
        await foreign.join(first)
    assert type(caught.value) is InputError
    assert str(caught.value).startswith(f"{named}: host 1 has this, and host 0 has ")
    assert not gathering.done()
    # In its place comes the right one.
    await asyncio.gather(gathering, second.join(first))
    await assert_all_connected([first, second])
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith("host 0 rejected host 1 from ")
    assert named in told


async def test_settings_are_compared_with_a_host_that_comes_back():
    """While hosts gather, all of them end for it; it is compared later."""
    other = replace(RUN, settings={"train": "other"})
    async with without_third() as (first, second):
        with pytest.raises(InputError, match="train = 'other': host 2 has this, and host 0"):
            await Host(2, 3, other).rejoin(first)
        again = Host(2, 3)
        assert await again.rejoin(first)
        await assert_all_connected([first, second, again], "again")
    hosts = [Host(0, 2), Host(1, 2, other)]
    await asyncio.gather(await hosts[0].gather(), hosts[1].join(hosts[0]))


@pytest.mark.parametrize("where", ["another run", "a run that begins"])
async def test_who_comes_back_is_told_where_it_cannot(where: str):
    """There it looks on, or begins with the others."""
    run = replace(RUN, identity={"run_dir": "runs/b"}) if where == "another run" else RUN
    there, again = Host(0, 2, run), Host(1, 2)
    await there.listen()
    assert not await again.rejoin(there)


async def test_who_looks_for_the_run_is_no_part_of_it_before_it_is_taken_in():
    """Two that are started again would else wait for one another, and never for those that are."""
    there, again = Host(0, 3), Host(1, 3)
    await there.listen()
    there.mesh.directory.come_back()
    assert not await again.rejoin(there)
    there.mesh.directory.is_outside = False
    assert await again.mesh.rejoin(await reach(there.address, PATIENCE_S))


async def test_a_host_that_is_left_of_an_earlier_start_is_not_taken_for_one_of_this():
    async with gathered(2) as (_, second):
        # Host 0 was started again, where the others look for it.
        first = Host(0, 2)
        gathering = await first.gather()
        hello = second.mesh.directory.hello
        [refused] = await answer_to(first, line([hello.to_json()]))
        assert refused[:3] == ["refused", TemporaryError.exit_code, "--host-id"]
        assert "belongs to an earlier start" in refused[4]
        gathering.cancel()


@pytest.mark.parametrize(
    "first_line",
    [["join", 1, 2, "host 1 of the first protocol"], [{"protocol": 2}], [{"protocol": 10**30}]],
)
async def test_another_protocol_is_answered_in_words_that_all_understand(
    first_line: Any, capfd: pytest.CaptureFixture[str]
):
    first = await Host(0, 2).listen()
    [answer] = await answer_to(first, line(first_line))
    theirs = 1 if first_line[0] == "join" else first_line[0]["protocol"]
    assert answer[:4] == ["refused", 2, "protocol version", theirs]
    assert answer[4] == f"host 0 has version {PROTOCOL}"
    assert f"host 0 has version {PROTOCOL}" in capfd.readouterr().err


EVERYBODY = {"0": "127.0.0.1:1", "1": "127.0.0.1:2", "2": "127.0.0.1:3"}
WELCOME = msgspec.to_builtins(Welcome(0, "host 0", 1000, {}, 1000, 0)) | {"addresses": EVERYBODY}


@pytest.mark.parametrize(
    "part",
    [
        {"host": 7},
        {"addresses": EVERYBODY | {"3": "127.0.0.1:4"}},
        {"addresses": EVERYBODY | {"x": "127.0.0.1:4"}},
        {"addresses": EVERYBODY | {"1": "vienna:80"}},
        {"name": 7},
        {"start": None},
    ],
)
def test_a_welcome_with_anything_out_of_range_is_none(part: dict[str, Any]):
    assert Welcome.parse(WELCOME, 3)
    with pytest.raises(ValueError):  # noqa: PT011
        Welcome.parse(WELCOME | part, 3)


@pytest.mark.parametrize("part", [{"addresses": {}}, {"host": 1}, {"start": None}])
async def test_who_is_not_welcomed_by_host_0_ends(part: dict[str, Any]):
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(line(["welcome", WELCOME | part]))
        await reader.read()  # The other end is closed.
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()[:2]
    host = await Host(2, 3).listen()
    before = descriptors()
    with pytest.raises(TemporaryError):
        await host.mesh.join(address, await reach(address, PATIENCE_S))
    await until(lambda: descriptors() == before)
    server.close()


@pytest.mark.parametrize(
    ("keys", "said"), [(LOOPBACK_ONLY, b""), (KEYS, first_flight())], ids=["in clear", "over TLS"]
)
async def test_strangers_that_do_not_go_on_keep_no_host_out(
    keys: Keys, said: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(links, "HELLO_S", NEVER_S)
    before = descriptors()
    first, second = Host(0, 2, keys=keys), Host(1, 2, keys=keys)
    gathering = await first.gather()
    waiting = [await stranger(first) for _ in range(3 * host_listener.MAX_UNIDENTIFIED)]
    for link in waiting:
        link.writer.write(said)
    for link in waiting[: 2 * host_listener.MAX_UNIDENTIFIED]:
        with suppress(ConnectionError):
            await link.reader.read()  # The oldest are closed.
        link.writer.close()
    assert not any(link.reader.at_eof() for link in waiting[2 * host_listener.MAX_UNIDENTIFIED :])
    await asyncio.gather(gathering, second.join(first))
    await assert_all_connected([first, second])
    assert len(first.mesh._door._unidentified) <= host_listener.MAX_UNIDENTIFIED
    for link in waiting:
        link.writer.transport.abort()
    Host.end_all()
    await until(lambda: descriptors() <= before)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        *((LOOPBACK_ONLY, said) for said in (b"", b'[{"protocol":')),
        *((KEYS, first_flight()[:size]) for size in (0, 1, 100)),
        (KEYS, first_flight()),
    ],
    ids=range(6),
)
async def test_a_stranger_that_does_not_go_on_is_closed_in_time(
    keys: Keys, said: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(links, "HELLO_S", 0.05 if keys is LOOPBACK_ONLY else 0.5)
    link = await stranger(await Host(0, 2, keys=keys).listen())
    link.writer.write(said)
    answer = await asyncio.wait_for(link.reader.read(), PATIENCE_S)
    assert bool(answer) == (len(said) > 100), "a whole first flight is answered by one"
    link.writer.close()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="another protocol"),
        pytest.param(b"[" * 60_000 + b"\n", id="nested"),
        pytest.param(b"+" + b"x" * 60_000 + b"\n", id="of several lines"),
        pytest.param(b"x" * 300_000, id="too long"),
        pytest.param(line(["put", "key", "value"]), id="a value"),
        pytest.param(line(["jax"]), id="JAX, which is not there"),
        pytest.param(line([changed(host=-1)]), id="a hello out of range"),
        pytest.param(line(changed()), id="a hello in no list"),
    ],
)
async def test_what_strangers_send_is_not_answered(content: bytes):
    """Nor does it leave or change anything: see `test_fuzz`."""
    assert await answer_to(await Host(0, 2).listen(), content) == []


async def test_strangers_are_refused_without_a_word_in_the_end(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host_listener, "MAX_LOGGED_REJECTIONS", 5)
    first = await Host(0, 2).listen()
    for _ in range(20):
        assert await answer_to(first, b"noise\n") == []
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 6
    assert told[-1] == "host 0: further rejections are not logged"


async def test_what_a_stranger_calls_itself_does_nothing_to_a_terminal(
    capfd: pytest.CaptureFixture[str],
):
    first = await Host(0, 2).listen()
    name = "\x1b[2Jhost 1\nhost 0 is well \ud800\x9b"
    hello = changed(host=1, hosts=2, name=name, run=hello_of(1, 2)["run"] | {"identity": {}})
    [refused] = await answer_to(first, line([hello]))
    assert refused[0] == "refused"
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert told.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"noise\n",
        b"[[[[[[[[1]]]]]]]]\n",
        b"null\n",
        b'["what"]\n',
    ],
    ids=range(4),
)
async def test_who_sends_what_no_host_sends_is_lost(nonsense: bytes):
    async with gathered(2, outlives=False) as hosts:
        hosts[1].mesh._links[0].writer.write(nonsense)
        await until(lambda: bool(hosts[0].lost))
        assert hosts[0].lost == [(1, INVALID_MESSAGE)]


async def test_a_host_that_takes_nothing_in_holds_up_so_much_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(links, "MOST_WAITING", 1 << 20)
    async with gathered(2) as (first, _):
        link = first.mesh._links[1]
        for _ in range(400):  # Without a pause, in which it could be sent.
            first.mesh.send(1, "put", "key", "x" * (1 << 16))
            assert link.writer.transport.get_write_buffer_size() < 2 << 20
        assert link.ending == "it stopped reading messages"


async def test_a_message_is_as_long_as_it_has_to_be():
    """So long as that of a host with thousands of stages, and no longer than any."""
    async with gathered(2) as (first, second):
        totals = [n / 7 for n in range(16_000)]
        first.mesh.send(1, "control", ["Contribution", 1, 1, totals])
        value = '"\\\u20ac\U0001f600' * (links.MESSAGE_CHARACTERS // 4)
        first.mesh.send(1, "put", "key", value)
        await until(lambda: len(second.received) == 2)
        assert second.received[0][1] == ["control", ["Contribution", 1, 1, totals]]
        assert second.received[1][1] == ["put", "key", value]
        assert len(json.dumps(value)) > links.LINE_BYTES

        second.mesh.directory.outlives = False
        first.mesh.send(1, "put", "key", "x" * (links.MESSAGE_BYTES + links.LINE_BYTES))
        await until(lambda: bool(second.lost))
        assert second.lost == [(0, INVALID_MESSAGE)]


async def test_a_farewell_in_the_place_of_another_keeps_it_out_no_longer_than_the_connection():
    async with without_third() as (first, second):
        before = descriptors()
        content = line([hello_of(2, 3, comes_back=True)]) + line(["farewell"])
        link = await stranger(first)
        link.writer.write(content)
        await link.reader.readline()
        link.writer.close()
        await until(lambda: 2 not in first.mesh._links and descriptors() <= before)
        again = Host(2, 3)
        assert await again.rejoin(first)
        await assert_all_connected([first, second, again], "again")


@pytest.mark.parametrize("outlives", [True, False])
async def test_hosts_part_and_nobody_is_lost(outlives: bool):
    before = descriptors()
    async with gathered(3, outlives=outlives) as hosts:
        await asyncio.gather(*(host.mesh.part(10.0) for host in hosts))
        assert [host.lost for host in hosts] == [[], [], []]
        await until(lambda: descriptors() <= before)
