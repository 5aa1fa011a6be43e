"""SIGTERM and SIGINT to a host that does not train yet: it ends by a line and a code of its own."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from tests.commands.examples import write_inputs
from tests.harness.ports import free_port
from tests.harness.processes import Processes

TRAIN, JOIN = ("-m", "skippipe_jax.train"), ("-m", "skippipe_jax", "join")
PATIENCE_S = 180.0
BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in a folder with a configuration that can be trained."""
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)


def lines(processes: Processes, host: int, number: signal.Signals) -> list[str]:
    """What a host says that a signal ends, which comes now."""
    processes.processes[host].send_signal(number)
    assert processes.exit_code(host, PATIENCE_S) == 128 + number, processes.output(host)
    return processes.output(host).splitlines()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


@BOTH
def test_a_host_that_waits_for_the_others(processes: Processes, number: signal.Signals):
    port = free_port()
    place = ("--coordinator", f"127.0.0.1:{port}", "--hosts", "2", "--host-id", "0")
    processes.start(*TRAIN, "--config", "config.yaml", *place)
    processes.wait_until(lambda: answers(port), PATIENCE_S)
    [line] = lines(processes, 0, number)
    assert line.removeprefix("SIGTERM: ").startswith("interrupted; ")
    assert line.startswith("SIGTERM") == (number == signal.SIGTERM)


@pytest.mark.nightly
@BOTH
def test_a_newcomer_that_asks(processes: Processes, number: signal.Signals):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE_S)
        processes.start(*JOIN, f"127.0.0.1:{silent.getsockname()[1]}")
        connection, _ = silent.accept()
        with connection:
            connection.recv(1)
            [line] = lines(processes, 0, number)
    assert line.removeprefix("SIGTERM: ") == "interrupted; the run continues without this host"
    assert line.startswith("SIGTERM") == (number == signal.SIGTERM)
