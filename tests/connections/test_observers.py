"""What an observer is told over real connections, by whom, and that it changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from skippipe_sched.errors import TemporaryError

from skippipe_jax.cli.main import main
from skippipe_jax.connections import asking
from skippipe_jax.connections.addresses import join_address
from skippipe_jax.connections.asking import NoListener, observe
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys, Secret, make_secret
from skippipe_jax.connections.status import MOST_LINKS, RunStatus
from tests.connections.meshes import (
    KEYS,
    STATUS,
    Host,
    address_of,
    assert_all_connected,
    gathered,
)
from tests.harness.ports import free_port


@pytest.fixture(autouse=True)
def _versions_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts have no jax of the observer's version, which is no matter."""
    monkeypatch.setattr(asking, "versions", lambda: {"skippipe-jax": None, "jax": "2.0"})


@pytest.mark.parametrize("keys", [LOOPBACK_ONLY, KEYS])
async def test_any_host_tells_an_observer_the_status_and_counts_no_host_more(keys: Keys):
    async with gathered(2, keys=keys) as hosts:
        for host in hosts:
            for _ in range(3):
                assert await observe([address_of(host)], keys) == (address_of(host), STATUS)
        await assert_all_connected(hosts)
        for host in hosts:
            assert host.lost == []
            assert host.mesh.directory.others == [1 - host.mesh.directory.hello.host]


async def test_of_several_addresses_the_first_is_asked_at_which_a_host_answers():
    closed = f"127.0.0.1:{free_port()}"
    with pytest.raises(NoListener, match=rf"status = '{closed}': connection refused"):
        await observe([closed])
    async with gathered(2) as (first, _):
        assert (await observe([closed, address_of(first)]))[0] == address_of(first)


async def test_what_is_no_host_of_a_run_is_told_from_one():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = join_address(*server.sockets[0].getsockname()[:2])
    with pytest.raises(TemporaryError, match="no host of a run answered at this") as caught:
        await observe([address])
    assert not isinstance(caught.value, NoListener)
    server.close()


CONTENT = msgspec.to_builtins(STATUS)


@pytest.mark.parametrize(
    "change",
    [
        {"host": -1},
        {"phase": "asleep"},
        {"hosts": [{"host": 0}]},
        {"stages": [[1 << 40]]},
        {"links": CONTENT["links"] * MOST_LINKS},
    ],
)
def test_a_status_with_anything_out_of_range_is_none(change: dict[str, Any]):
    assert msgspec.convert(CONTENT, RunStatus) == STATUS
    with pytest.raises(ValueError, match=r"Expected|Invalid|missing|Object"):
        msgspec.convert(CONTENT | change, RunStatus)


@contextmanager
def listening(
    keys: Keys = LOOPBACK_ONLY, status: Callable[[], RunStatus] = lambda: STATUS
) -> Iterator[str]:
    """The address of a host in a thread of its own."""
    loop, host = asyncio.new_event_loop(), Host(0, 2, keys=keys, status=status)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(host.listen(), loop).result()
    yield address_of(host)
    loop.call_soon_threadsafe(host.end)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_command_shows_the_status_to_those_alone_that_have_the_secret(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    for name in ("own", "other"):
        make_secret(tmp_path / name)
    secret = Secret("cluster.secret", "own", (tmp_path / "own").read_text().strip())
    with listening(Keys(secret)) as address:
        own = ["status", address, "--set", f"cluster.secret={tmp_path / 'own'}"]
        assert main([*own, "--json"]) == 0
        assert msgspec.json.decode(capfd.readouterr().out, type=RunStatus) == STATUS
        assert main(own) == 0
        assert "run runs/a: training (reported by host 0)" in capfd.readouterr().out
        assert main([*own[:-1], f"cluster.secret={tmp_path / 'other'}"]) == 2
        told = capfd.readouterr()
        assert (told.out, "different secret" in told.err) == ("", True)
        assert main(own[:2]) == 2
        told = capfd.readouterr().err
        assert "requires a secret, and this host has none. Use --set cluster.secret=FILE" in told
        assert main(["status", "10.77.0.1:8476"]) == 2
        told = capfd.readouterr().err
        assert "required for non-loopback address 10.77.0.1" in told
        assert "--set cluster.secret=FILE" in told
        assert "keygen" not in told, "a secret that is made now is not the run's"
        assert main([*own, "--watch", "soon"]) == 2
        assert "error: --watch = 'soon': must be a time" in capfd.readouterr().err
    assert main(own) == 75
    assert "connection refused: no process listens" in capfd.readouterr().err


def test_a_run_is_watched_until_ctrl_c(capfd: pytest.CaptureFixture[str]):
    asked: list[int] = []

    def status() -> RunStatus:
        asked.append(len(asked))
        if len(asked) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return STATUS

    with listening(status=status) as address:
        assert main(["status", address, "--json", "--watch", "0.05"]) == 130
    told = capfd.readouterr()
    first = [msgspec.json.decode(line, type=RunStatus) for line in told.out.splitlines()[:2]]
    assert first == [STATUS, STATUS]
    assert told.err == "interrupted; the run continues\n"
