"""Offers of the hosts of a run to joiners, and checks of a joiner on what it receives."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.connections import join_server
from skippipe_jax.connections.addresses import join_address
from skippipe_jax.connections.asking import JoinClient, NoListener
from skippipe_jax.connections.hello import PROTOCOL, Hello
from skippipe_jax.connections.join_offer import (
    MOST_BYTES,
    JoinOffer,
    Place,
    describe_files,
)
from skippipe_jax.connections.join_server import FILE_CHUNK_BYTES, REQUESTERS, Pauses
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys
from skippipe_jax.connections.link_probe import SIZES
from tests.connections.meshes import (
    RUN,
    Host,
    address_of,
    answer_to,
    gathered,
    line,
    stranger,
    until,
    without_third,
)
from tests.harness.json_values import json_values
from tests.harness.ports import free_port

CONTENTS = {
    "config.yaml": b"seed: 0\n",
    "tokenizer/tokenizer.model": random.Random(0).randbytes(2 * FILE_CHUNK_BYTES + 1),
    "plan.json": b"",
}


class Run:
    """Places and files for joiners; host 2 is lost."""

    def __init__(self, contents: Mapping[str, bytes] = CONTENTS, text: str | None = "0123"):
        self.files, self.contents = describe_files(contents), [*contents.values()]
        self.text, self.read = text, 0

    def __call__(
        self, own: Hello, addresses: dict[int, str], free: Collection[int]
    ) -> tuple[JoinOffer, list[bytes]]:
        self.read += 1
        places = tuple(Place(host, (0, host), 0.5) for host in sorted(free))
        offer = JoinOffer(own.host, own.hosts, addresses, places, self.files, self.text)
        standing = {"members": (0, 1), "placement": ((0, 2), (1,))}
        return msgspec.structs.replace(offer, **standing), self.contents


@asynccontextmanager
async def listening(keys: Keys = LOOPBACK_ONLY) -> AsyncIterator[Host]:
    """A host that has met no other yet."""
    host = await Host(0, 2, keys=keys).listen()
    yield host
    host.end()


async def test_a_newcomer_is_told_which_places_are_free_and_given_all_files():
    async with without_third() as (first, second):
        second.join_server.make_offer = Run()
        asking = JoinClient()
        asked, told = await asking.ask([address_of(second)])
        assert (asked, told.host, told.hosts) == (address_of(second), 1, 3)
        assert told.addresses[0] == address_of(first)
        assert told.addresses[1] == address_of(second)
        assert told.places == (Place(2, (0, 2), 0.5),)
        assert told.text == "0123"
        assert (told.members, told.placement) == ((0, 1), ((0, 2), (1,)))
        assert asking.contents == CONTENTS
        assert asking.fetched == sum(map(len, CONTENTS.values()))


async def test_the_place_of_a_host_that_was_told_to_leave_is_free():
    async with gathered(3) as (_, second, third):
        second.join_server.make_offer = Run()
        asking = JoinClient()
        _, told = await asking.ask([address_of(second)])
        assert not told.places
        await third.mesh.part(0.1)
        async with asyncio.timeout(10.0):
            while not told.places:
                _, told = await asking.ask([address_of(second)])
        assert told.places == (Place(2, (0, 2), 0.5),)
        assert not second.mesh.missed


async def test_what_has_come_whole_is_not_asked_for_again_and_the_rest_is_whoever_is_asked():
    async with gathered(2) as (first, second):
        asking = JoinClient()
        first.join_server.make_offer = Run({"config.yaml": b"1", "plan.json": b"2"})
        await asking.ask([address_of(first)], wanted=["config.yaml"])
        assert (asking.contents, asking.fetched) == ({"config.yaml": b"1"}, 1)
        second.join_server.make_offer = Run({"config.yaml": b"1", "plans/a.json": b"345"})
        await asking.ask([address_of(second)])
        assert asking.contents == {"config.yaml": b"1", "plans/a.json": b"345"}
        assert asking.fetched == 4
        second.join_server.make_offer = Run({"config.yaml": b"67"})
        await asking.ask([address_of(second)])
        assert (asking.contents, asking.fetched) == ({"config.yaml": b"67"}, 6)


async def test_what_came_otherwise_than_it_was_told_does_not_count():
    async with gathered(2) as (first, second):
        run = Run({"config.yaml": b"1", "plan.json": b"2"})
        run.contents[1] = b"3"
        first.join_server.make_offer = run
        asking = JoinClient()
        with pytest.raises(TemporaryError, match=r"plan\.json does not match its anno"):
            await asking.ask([address_of(first)])
        assert asking.contents == {"config.yaml": b"1"}
        second.join_server.make_offer = Run({"config.yaml": b"1", "plan.json": b"2"})
        asked, _ = await asking.ask([address_of(first), address_of(second)])
        assert asked == address_of(second)
        assert asking.contents == {"config.yaml": b"1", "plan.json": b"2"}


async def test_where_no_host_tells_of_a_run_a_newcomer_may_ask_again():
    """It is told that nobody listens only if that is so at all addresses."""
    closed = f"127.0.0.1:{free_port()}"
    problem = rf"join = '{closed}': connection refused: no process listens at "
    with pytest.raises(NoListener, match=problem):
        await JoinClient().ask([closed, closed])
    async with listening() as host:
        with pytest.raises(TemporaryError, match="the run has not started, or is not") as caught:
            await JoinClient().ask([closed, address_of(host)])
        assert not isinstance(caught.value, NoListener)
        host.join_server.make_offer, host.join_server.has_ended = Run(), True
        with pytest.raises(TemporaryError, match="the run has ended: it finished, or"):
            await JoinClient().ask([address_of(host)])


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (["joiner", PROTOCOL + 1, {"jax": "1.0"}], f"protocol version = {PROTOCOL + 1}: host 0"),
        (["joiner", PROTOCOL, {"jax": "0.9"}], "jax version = '0.9': the joiner has this, and"),
        (["joiner", PROTOCOL, {}], "jax version = None: the joiner has this, and host 0 has '1.0'"),
        (["joiner", PROTOCOL, {"jax": 1}], "jax version = None"),
        (["joiner", PROTOCOL], "joiner = None: is not a valid request of a joiner"),
        (["joiner", PROTOCOL, 3], "joiner = None: is not a valid request of a joiner"),
        (["observer", PROTOCOL + 1, {}], f"protocol version = {PROTOCOL + 1}: host 0 has"),
        (
            ["observer", PROTOCOL, {"skippipe-jax": "0.1"}],
            "skippipe-jax version = '0.1': the observer has this, and host 0 has None",
        ),
        (["observer", PROTOCOL], "observer = None: is not a valid request of an observer"),
    ],
)
async def test_a_guest_of_another_version_is_refused_and_both_sides_name_it(
    said: list[Any], named: str, capfd: pytest.CaptureFixture[str]
):
    async with listening() as first:
        first.join_server.make_offer = run = Run()
        [answer] = await answer_to(first, line(said))
        assert answer[:2] == ["refused", InputError.exit_code]
        assert run.read == 0
    told = capfd.readouterr().err
    assert told.startswith(f"host 0 rejected {REQUESTERS[said[0]]} from ")
    assert named in told
    assert told.count("\n") == 1


async def test_one_newcomer_too_many_takes_the_place_of_the_one_that_asks_for_longest(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(join_server, "MAX_JOINERS", 2)
    async with listening() as first:
        first.join_server.make_offer = Run()
        asking = []
        for _ in range(3):
            link = await stranger(first)
            link.send("joiner", PROTOCOL, dict(RUN.versions))
            assert (await link.receive())[0] == "offer"
            asking.append(link)
        assert await asking[0].receive() is None
        for link in asking[1:]:
            link.send("file", 0)
            assert await link.exactly(8) == CONTENTS["config.yaml"]
            link.writer.close()
        await until(lambda: not first.join_server._served)


@pytest.mark.parametrize(
    "asked",
    [
        *(["file", 3], ["file", -1], ["file"]),
        *(["give", -1], ["give", SIZES[-1] + 1], ["give", "1"], ["take"], ["take", 1.0]),
    ],
)
async def test_who_asks_for_what_there_is_not_is_told_no_more_than_the_invitation(asked: list[Any]):
    async with listening() as first:
        first.join_server.make_offer = Run()
        hello = line(["joiner", PROTOCOL, dict(RUN.versions)])
        [told] = await answer_to(first, hello + line(asked))
        assert told[0] == "offer"


INVITATION = JoinOffer(
    1, 3, {0: "127.0.0.1:9"}, (Place(2, (1,), 0.5),), describe_files({"plan.json": b"1"}), None
)


CONTENT = msgspec.to_builtins(INVITATION, str_keys=True)


def changed(**parts: Any) -> dict[str, Any]:
    return CONTENT | parts


NO_INVITATIONS = [
    [],
    changed(host=3),
    changed(addresses={"3": "127.0.0.1:9"}),
    changed(addresses={"0": "vienna:9"}),
    changed(places=[[3, [], 0]]),
    changed(places=[[2, [], 1e9]]),
    changed(places=[[2, [], float("nan")]]),
    changed(files=[["plan.json", 1, "0" * 63]]),
    changed(files=[["a", MOST_BYTES, "0" * 64], ["b", 1, "0" * 64]]),
    changed(files=[["a", 1, "0" * 64]] * 2),
    changed(files=[["\n", 1, "0" * 64]]),
    changed(members=[3]),
    changed(placement=[[-1]]),
]


@pytest.mark.parametrize("told", NO_INVITATIONS, ids=range(len(NO_INVITATIONS)))
def test_an_invitation_with_anything_out_of_range_is_none(told: Any):
    with pytest.raises(ValueError):  # noqa: PT011
        JoinOffer.parse(told)


JSON = json_values(st.sampled_from(["127.0.0.1:9", "\ud800"]))


@given(st.dictionaries(st.sampled_from([*CONTENT]), JSON))
@settings(max_examples=40)
def test_what_is_no_invitation_is_a_value_error_and_nothing_else(parts: dict[str, Any]):
    try:
        told = JoinOffer.parse(changed(**parts))
    except ValueError:
        return
    assert JoinOffer.parse(json.loads(json.dumps(msgspec.to_builtins(told, str_keys=True)))) == told


ANSWERS = st.lists(
    st.one_of(
        JSON.map(line),
        st.binary(max_size=40),
        st.builds(lambda parts: line(["offer", changed(**parts)]), st.just({})),
        st.sampled_from([b"1", b"2"]),
        st.just(line(["refused", 2, "a", "b", "c", "d"])),
    ),
    max_size=4,
)


@given(ANSWERS)
@settings(max_examples=60)
def test_whatever_answers_a_newcomer_it_believes_nothing_but_what_was_told(answers: list[bytes]):
    async def live() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.writelines(answers)
            writer.write_eof()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            asking = JoinClient()
            try:
                await asking.ask([join_address(*server.sockets[0].getsockname())])
            except InputError:
                assert asking.contents == {}
            else:
                assert asking.contents == {"plan.json": b"1"}

    asyncio.run(live())


def test_a_place_that_is_lost_soon_again_is_held_back_for_longer_each_time():
    pauses = Pauses()
    pauses.entered({0: 10, 1: 11, 2: 12}, 0.0)
    pauses.entered({0: 10, 1: 11}, 1.0)
    assert pauses.pause_s(2, 1.0) == 0.0, "it was there from the beginning"
    now_s, found = 1.0, []
    for process in range(20, 29):
        pauses.entered({0: 10, 1: 11, 2: process}, now_s)
        now_s += 30.0
        pauses.entered({0: 10, 1: 11}, now_s)
        found.append(pauses.pause_s(2, now_s))
        assert pauses.pause_s(2, now_s + 0.5) == found[-1] - 0.5
    assert found == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert pauses.pause_s(1, now_s) == 0.0
    # Who stays begins anew.
    pauses.entered({0: 10, 1: 11, 2: 30}, now_s)
    pauses.entered({0: 10, 1: 11}, now_s + 61.0)
    assert pauses.pause_s(2, now_s + 61.0) == 0.0
    # A process that is another was lost, although its host is there.
    pauses.entered({0: 10, 1: 11, 2: 31}, 1000.0)
    pauses.entered({0: 10, 1: 11, 2: 32}, 1001.0)
    pauses.entered({0: 10, 1: 11}, 1002.0)
    assert pauses.pause_s(2, 1002.0) == 2.0
