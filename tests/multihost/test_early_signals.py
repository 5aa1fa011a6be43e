"""SIGTERM and SIGINT to a host that does not train yet: it ends by a line and a code of its own."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest
from skippipe_sched.errors import TEMPORARY_EXIT_CODE

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
def test_a_host_that_settles_the_run_with_others_tells_them(processes: Processes, tmp_path: Path):
    patient = ("--set", "cluster.heartbeat_timeout_s=300")
    searches = ("--set", "plan.method=joint", "--set", "plan.budget_s=1000")
    processes.start_hosts(2, *TRAIN, "--config", "config.yaml", *patient, *searches)
    processes.wait_until(lambda: "planning" in processes.output(0), PATIENCE_S)
    # Nothing shows that the other one has come to where it waits for the plans.
    time.sleep(2.0)
    [line] = lines(processes, 1, signal.SIGTERM)
    # It may still be on the way from the others to its run, of which it tells nothing then.
    told = line.removesuffix(" Restart without --resume; run contains no run yet.")
    assert told == "SIGTERM: interrupted at once."
    assert processes.exit_code(0, PATIENCE_S) == TEMPORARY_EXIT_CODE
    assert f"{processes.name(1)} was interrupted (SIGTERM)." in processes.output(0)
    assert "Traceback" not in processes.output(0)
    assert not (tmp_path / "run").exists()


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
