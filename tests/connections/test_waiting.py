"""What a host says that waits for others."""

from __future__ import annotations

import asyncio
import errno
import socket
from dataclasses import replace
from typing import Any

import pytest
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.connections import waiting
from skippipe_jax.connections.links import reach
from skippipe_jax.connections.waiting import telling, why_unreachable
from tests.connections.meshes import RUN, Host, until


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts say at once what they wait for."""
    monkeypatch.setattr(waiting, "FIRST_S", 0.01)
    monkeypatch.setattr(waiting, "EACH_S", 0.01)


class Printed:
    """What was printed on stderr."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.lines: list[str] = []
        monkeypatch.setattr(waiting.log, "info", self.lines.append)

    async def says(self, line: str) -> None:
        """Return once this is printed twice from now on."""
        self.lines.clear()
        await until(lambda: self.lines.count(line) > 1)


@pytest.mark.usefixtures("quickly")
async def test_host_0_says_again_and_again_for_which_hosts_it_waits(
    monkeypatch: pytest.MonkeyPatch,
):
    printed = Printed(monkeypatch)
    first = Host(0, 3, connect_timeout_s=290.0)
    gathering = await first.gather()
    await printed.says("waiting for hosts 1, 2 (0 of 2 connected), 290 s left")
    # A host that is refused has not come.
    foreign = Host(1, 3, replace(RUN, identity={**RUN.identity, "model": "other"}))
    with pytest.raises(InputError):
        await foreign.join(first)
    await printed.says("waiting for hosts 1, 2 (0 of 2 connected), 290 s left")
    second, third = Host(1, 3, connect_timeout_s=200.0), Host(2, 3)
    joining = asyncio.create_task(second.join(first))
    await printed.says("waiting for host 2 (1 of 2 connected), 290 s left")
    where = "{}:{}".format(*first.address)
    connected = f"connected to host 0 at {where}"
    await printed.says(f"{connected}; waiting for the other hosts, 200 s left")
    await asyncio.gather(gathering, joining, third.join(first))
    printed.lines.clear()
    await asyncio.sleep(0.05)
    assert printed.lines == [], "nobody waits any more"


@pytest.mark.usefixtures("quickly")
async def test_a_host_says_why_it_does_not_reach_host_0(monkeypatch: pytest.MonkeyPatch):
    printed = Printed(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()[:2]

    calling = asyncio.create_task(reach(address, 290.0))
    where = "{}:{}".format(*address)
    await printed.says(f"{where}: connection refused; retrying for 290 s")
    calling.cancel()
    with pytest.raises(TemporaryError, match=r"no connection within 0 s \(last error: conn"):
        await reach(address, 0.0)


async def test_hosts_that_do_not_come_are_named_to_all_that_did():
    first, second = Host(0, 4, connect_timeout_s=0.5), Host(1, 4)
    gathering = await first.gather()
    with pytest.raises(InputError, match="--hosts = 3: host 0 was started with --hosts 4"):
        await Host(2, 3).join(first)
    late = await asyncio.gather(gathering, second.join(first), return_exceptions=True)
    assert [type(error) for error in late] == [TemporaryError, TemporaryError]
    for error in late:
        assert "hosts 2, 3 did not connect within cluster.connect_timeout_s = 0.5 s" in str(error)


def test_who_waits_for_a_moment_says_nothing(capsys: pytest.CaptureFixture[str]):
    with telling(lambda left_s: "waits", 60.0):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), "connection refused"),
        (OSError(errno.EHOSTUNREACH, "Connect call failed"), "no route to host"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "name or service not"),
        (TimeoutError(), "no answer"),
        (OSError("Multiple exceptions: one, other"), "Multiple exceptions: one, other"),
    ],
)
def test_why_a_host_is_not_reached_is_said_in_words(error: Any, said: str):
    assert why_unreachable(error).startswith(said)
