"""Hosts are real processes: they join, end together, and name the one that is lost."""

import contextlib
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from skippipe_sched.errors import INPUT_ERROR_EXIT_CODE, InputError, TemporaryError

from skippipe_jax.cluster.agreement import barrier
from skippipe_jax.cluster.ending import LOST_HOST_EXIT_CODE
from skippipe_jax.cluster.joining import connect
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import ClusterConfig, Config
from skippipe_jax.config.cluster import JoinConfig
from skippipe_jax.connections.addresses import BIND_VARIABLE, reachable_address
from skippipe_jax.connections.keys import SECRET_VARIABLE
from skippipe_jax.consensus.generations import Generation
from tests.harness.ports import free_block, free_port
from tests.harness.processes import Processes
from tests.harness.training_runs import settings, write_config

WORKER = Path(__file__).with_name("cluster_worker.py")
# Longer than a host is silent that waits for a busy processor.
HEARTBEAT_TIMEOUT_S = 8.0
START_S = 60.0
# What the end of a process takes once it is known that it has to end.
SLACK_S = 20.0
# Where nobody is to be lost, however busy the machine is.
PATIENT = ("--heartbeat-timeout-s", "300")


def wait_until_summing(processes: Processes) -> None:
    hosts = range(len(processes.processes))
    processes.wait_until(
        lambda: all("summing" in processes.output(host) for host in hosts), START_S
    )


def enter(cluster: ClusterConfig, *arguments: Any, **options: Any) -> None:
    """Join and do nothing, where already joining must fail."""
    with connect(Config(cluster=cluster, join=JoinConfig(places=0)), *arguments, **options):
        pass


def assert_stopped_by(processes: Processes, host: int, verdict: str, timeout_s: float) -> None:
    """The host has ended by one message with the verdict, and by nothing else."""
    assert processes.exit_code(host, timeout_s) == LOST_HOST_EXIT_CODE, processes.output(host)
    output = processes.output(host)
    assert output.count("exits with code 75. Resume from step ") == 1, output
    assert verdict in output
    assert "Traceback" not in output
    assert "Check failure" not in output


@pytest.mark.nightly
@pytest.mark.alone
def test_hosts_that_end_well_are_not_lost(processes: Processes):
    # Long enough that silence would be noticed, and the last host stays behind the others.
    run = ("--runtime", "distributed", "--seconds", "1")
    processes.really = True
    processes.start_hosts(4, WORKER, *run, last=("--linger-s", "4"))
    for host in range(4):
        assert processes.exit_code(host, START_S) == 0, processes.output(host)
        assert "ended well" in processes.output(host)
        assert "failed" not in processes.output(host)


@pytest.mark.parametrize(
    ("runtime", "victim", "blow"),
    [
        ("distributed", 2, signal.SIGKILL),
        pytest.param("independent", 0, signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param("distributed", 0, signal.SIGSTOP, marks=pytest.mark.nightly),
    ],
)
def test_survivors_name_the_lost_host(
    processes: Processes, runtime: str, victim: int, blow: signal.Signals
):
    timeout = ("--heartbeat-timeout-s", str(HEARTBEAT_TIMEOUT_S))
    processes.start_hosts(3, WORKER, "--runtime", runtime, *timeout)
    wait_until_summing(processes)
    processes.processes[victim].send_signal(blow)
    struck = time.monotonic()
    verdict = f"{processes.name(victim)} failed: "
    for host in {0, 1, 2} - {victim}:
        remaining = HEARTBEAT_TIMEOUT_S + SLACK_S - (time.monotonic() - struck)
        assert_stopped_by(processes, host, verdict, remaining)
    if blow == signal.SIGSTOP:
        processes.processes[victim].send_signal(signal.SIGCONT)
        assert_stopped_by(processes, victim, verdict, HEARTBEAT_TIMEOUT_S + SLACK_S)


@pytest.mark.nightly
def test_a_host_that_was_stopped_knows_it_though_nobody_is_left_to_say_so(processes: Processes):
    processes.start_hosts(2, WORKER, "--runtime", "independent", "--heartbeat-timeout-s", "5")
    wait_until_summing(processes)
    processes.processes[1].send_signal(signal.SIGSTOP)
    processes.processes[0].kill()
    time.sleep(6)
    processes.processes[1].send_signal(signal.SIGCONT)
    assert_stopped_by(processes, 1, f"{processes.name(1)} failed: its connection", SLACK_S)


def test_others_stop_for_a_host_that_fails_and_say_why(processes: Processes):
    # With this timeout, only the host's own word can be what stops the others.
    processes.start_hosts(3, WORKER, *PATIENT, last=("--fail-at", "5"))
    assert processes.exit_code(2, START_S) == 1
    assert "ValueError: the data ran out" in processes.output(2)
    for host in (0, 1):
        assert_stopped_by(
            processes, host, f"{processes.name(2)} failed: ValueError: the data ran out", SLACK_S
        )


@pytest.mark.nightly
def test_hosts_with_the_secret_meet_and_others_are_refused_in_one_line_on_both_sides(
    processes: Processes,
):
    """All that host 0 listens for goes through it, JAX's coordination service as well."""
    address = f"127.0.0.1:{free_port()}"
    command = (WORKER, "--runtime", "distributed", "--coordinator", address, "--hosts", "2")
    right = {SECRET_VARIABLE: "theSecretThatBothHostsOfThisRunHave"}
    wrong = {SECRET_VARIABLE: "theSecretThatNoHostOfThisRunHasEver"}
    command = (*command, *PATIENT, "--seconds", "0.5", "--host-id")
    for host, secret in zip("011", [right, wrong, {}], strict=True):
        processes.start(*command, host, **secret)
    expected = [
        f"error: {SECRET_VARIABLE} = '(not shown)': TLS handshake with {address} failed: "
        "different secret. Give all hosts of the run the same secret.\n",
        f"error: cluster.secret = None: {address} requires a secret, and this host has "
        "none. Give this host the secret file of its run.\n",
    ]
    for host in (1, 2):
        assert processes.exit_code(host, START_S) == INPUT_ERROR_EXIT_CODE
        assert processes.output(host) == expected[host - 1]
    processes.start(*command, "1", **right)
    assert [processes.exit_code(host, START_S) for host in (0, 3)] == [0, 0], processes.outputs()
    assert "host 1 of 2, one JAX" in processes.output(3)
    refused = [
        line for line in processes.output(0).splitlines() if "rejected a connection from" in line
    ]
    assert len(refused) == 2
    assert sum("it does not have the secret of this run" in line for line in refused) == 1
    assert sum("it has no secret, and this run has one" in line for line in refused) == 1
    assert right[SECRET_VARIABLE] not in processes.outputs()


def listens_on(processes: Processes, host: int) -> list[tuple[str, int]]:
    """The addresses and ports on which a host waits for connections."""
    connections = psutil.Process(processes.processes[host].pid).net_connections("tcp")
    return [(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]


@pytest.mark.nightly
def test_each_host_listens_on_its_own_address_and_ports(processes: Processes):
    coordinator, port = free_port(), free_block()
    for host in range(3):
        arguments = ["--coordinator", f"127.0.0.1:{coordinator}", "--hosts", "3"]
        arguments += ["--host-id", str(host), "--transfer-port", str(port)]
        arguments += ["--runtime", "distributed"]
        # All of 127.0.0.0/8 is this machine.
        processes.start(WORKER, *arguments, *PATIENT, **{BIND_VARIABLE: f"127.0.0.{host + 1}"})
    wait_until_summing(processes)
    for host in range(3):
        found = listens_on(processes, host)
        # Two of each transfer server, one of the collectives of one JAX, and that for other hosts.
        assert len(found) == 6
        assert {address for address, _ in found} == {f"127.0.0.{host + 1}"}
        own = range(port + 3 * host, port + 3 * host + 3)
        # Where host 0 listens for messages its coordinator's address says.
        expected = {*own} if host else {*own[1:], coordinator}
        assert expected <= {port for _, port in found}


def garbage() -> Iterator[bytes]:
    """What strangers may send to a port: noise, other protocols, and nearly the one of hosts."""
    chance = random.Random(0)
    yield from (chance.randbytes(1 << power) for power in range(0, 14, 2))
    yield from (bytes(size) for size in (1, 3, 4, 8, 1024))
    yield b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the beginning of TLS
    for line in ("[" * 100_000, '["join"]', '["verdict", 0, "is lost", 2]', '["jax"]'):
        yield line.encode() + b"\n"


def send(port: int, content: bytes) -> None:
    """Send it to a port of this machine, and close the connection, whatever comes back.

    The other end may have closed it before.
    """
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=START_S) as connection,
    ):
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)


def test_what_strangers_send_to_open_ports(processes: Processes):
    """Nothing happens; but JAX ends a process by what comes to its port for requests."""
    coordinator, port = free_port(), free_block()
    own = (WORKER, *PATIENT, "--transfer-port", str(port))
    processes.start_hosts(2, *own, coordinator=f"127.0.0.1:{coordinator}")
    wait_until_summing(processes)
    requests, messages = port + 2, port + 3
    [arrays] = {port for _, port in listens_on(processes, 1)} - {requests, messages}
    for content in garbage():
        for open_port in (coordinator, messages, arrays):
            send(open_port, content)
    # A host of this run that comes when it has begun is to try again.
    with pytest.raises(TemporaryError, match="the run started without this host"):
        enter(ClusterConfig(connect_timeout_s=60.0), f"127.0.0.1:{coordinator}", 2, 1)
    assert [process.poll() for process in processes.processes] == [None, None], processes.outputs()
    assert "Traceback" not in processes.outputs()
    send(requests, bytes(4))
    assert processes.exit_code(1, START_S) == -signal.SIGABRT


@pytest.mark.nightly
@pytest.mark.alone
def test_clocks_are_compared_with_that_of_host_0(processes: Processes):
    processes.start_hosts(3, WORKER, "--seconds", "0.5", last=("--clock-ahead-s", "100"))
    for host, expected in enumerate([0.0, 0.0, -100.0]):
        assert processes.exit_code(host, START_S) == 0, processes.output(host)
        printed = re.search("clock offset (.*), (.*) s", processes.output(host))
        assert printed
        assert float(printed[1]) == pytest.approx(expected, abs=0.0 if host == 0 else 0.05)
        assert float(printed[2]) < 2.0


def test_a_host_alone_that_has_waited_too_long_says_so(processes: Processes):
    processes.start(WORKER, "--late-at", "5")
    assert_stopped_by(
        processes, 0, f"{processes.name(0)}: nothing came from node 7 for 300 s.", START_S
    )


def test_a_host_alone_talks_with_itself():
    with connect(Config()) as membership:
        assert (membership.index, membership.count) == (0, 1)
        membership.put("key", "old")
        membership.put("key", "new")
        assert membership.get("key", 0.0, 0) == "new"
        barrier(membership, "all", 0.0)
        threading.Timer(0.1, membership.put, ("later", "value")).start()
        assert membership.get("later", 10.0, 0) == "value"
        with pytest.raises(TimeoutError, match=r"timed out after 0.1 s waiting for 'never'"):
            membership.get("never", 0.1, source=0)
        with pytest.raises(ValueError, match="characters exceed"):
            membership.put("key", "x" * (1 << 20))


def test_an_error_of_a_host_alone_is_raised():
    with pytest.raises(ValueError, match="mine"), connect(Config()):
        raise ValueError("mine")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((None, 2, None), "--coordinator"),
        ((None, None, 0), "--coordinator"),
        (("localhost:1234", None, 0), "--hosts"),
        (("localhost:1234", 2, None), "--host-id"),
        (("localhost:1234", 0, 0), "--hosts"),
        (("localhost:1234", 2, 2), "--host-id"),
        (("localhost:1234", 2, -1), "--host-id"),
        (("localhost", 2, 0), "--coordinator"),
        (("localhost:http", 2, 0), "--coordinator"),
        ((":1234", 2, 0), "--coordinator"),
        # Others could come to such an address.
        (("192.0.2.1:1234", 2, 0), "cluster.secret"),
        (("192.0.2.1:1234", 2, 1), "cluster.secret"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: tuple[str | None, int | None, int | None], field: str
):
    with pytest.raises(InputError) as caught:
        enter(ClusterConfig(), *arguments)
    assert (caught.value.field, caught.value.exit_code) == (field, INPUT_ERROR_EXIT_CODE)


def test_an_address_of_no_machine_cannot_be_listened_on(capfd: pytest.CaptureFixture[str]):
    """By RFC 5737 it belongs to none."""
    with pytest.raises(InputError, match=r"--coordinator = '192\.0\.2\.1:1234'") as caught:
        enter(ClusterConfig(insecure=True), "192.0.2.1:1234", 2, 0)
    assert caught.value.exit_code == INPUT_ERROR_EXIT_CODE
    warned = capfd.readouterr().err
    assert warned.startswith("warning: cluster.insecure: anyone who reaches 192.0.2.1 can ")
    assert warned.count("\n") == 1


def test_a_host_with_a_secret_listens_on_no_public_address(tmp_path: Path):
    """Before it is found out that the address is of no machine, which stands for such a one."""
    (tmp_path / "secret").write_text("theSecretThatBothHostsOfThisRunHave")
    config = ClusterConfig(secret=str(tmp_path / "secret"))
    with pytest.raises(InputError, match=r"192\.0\.2\.1 is not a private address") as caught:
        enter(config, "192.0.2.1:1234", 2, 0)
    assert caught.value.field == "cluster.insecure_transfers"
    with pytest.raises(InputError, match="this host cannot listen on this address"):
        enter(replace(config, insecure_transfers=True), "192.0.2.1:1234", 2, 0)


def test_a_port_of_host_0_that_is_taken_may_be_free_later():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TemporaryError, match=f"{address}.*this host cannot listen on"):
            enter(ClusterConfig(), address, 2, 0)


def test_distributed_without_a_cluster_is_refused():
    with pytest.raises(InputError, match="--distributed"):
        enter(ClusterConfig(), detect=True)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "vienna", "192.0.2.1"])
def test_an_address_that_is_not_this_hosts_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(BIND_VARIABLE, address)
    with pytest.raises(InputError) as caught:
        enter(ClusterConfig(), "127.0.0.1:1234", 2, 0)
    assert caught.value.field == BIND_VARIABLE


def test_a_configured_address_that_is_not_this_hosts_is_refused():
    with pytest.raises(InputError, match=r"cluster\.bind_address = '0\.0\.0\.0'"):
        ClusterConfig(bind_address="0.0.0.0")
    with pytest.raises(InputError, match=r"cluster\.bind_address = '192\.0\.2\.1'"):
        enter(ClusterConfig(bind_address="192.0.2.1"), "127.0.0.1:1234", 2, 0)


def test_a_name_that_means_loopback_here_only_is_replaced():
    # What a machine's own name means to it on Debian, where others know another address.
    own = {
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if not address.address.startswith(("127.", "::1"))
    }
    with contextlib.suppress(InputError):  # on a machine without a network
        assert reachable_address("127.0.1.1", "vienna") in own
    assert reachable_address("127.0.0.1", "localhost") == "127.0.0.1"
    assert reachable_address("127.0.0.1", "127.0.0.1") == "127.0.0.1"
    assert reachable_address("10.0.0.1", "vienna") == "10.0.0.1"


def test_ports_of_the_transfer_server():
    expected = {0: "127.0.0.1:0", 2: "127.0.0.1:0"}
    assert Membership(ClusterConfig(), 1, 3).transfer_addresses() == expected
    port = free_block()
    # Of three hosts, the first has three ports.
    first = ClusterConfig(transfer_port=port - 3)
    expected = {0: f"127.0.0.1:{port}", 2: f"127.0.0.1:{port + 2}"}
    assert Membership(first, 1, 3).transfer_addresses() == expected
    with (
        socket.create_server(("127.0.0.1", port + 2)),
        pytest.raises(TemporaryError, match="in use"),
    ):
        Membership(first, 1, 3).transfer_addresses()
    # Where it listens for messages it does already.
    with socket.create_server(("127.0.0.1", port + 1)):
        assert Membership(first, 1, 3).transfer_addresses() == expected
    with pytest.raises(InputError, match="Write at most 65527"):
        Membership(ClusterConfig(transfer_port=65528), 1, 3).transfer_addresses()
    for number in (0, 65536):
        with pytest.raises(InputError, match=r"cluster\.transfer_port"):
            ClusterConfig(transfer_port=number)


def test_no_two_hosts_listen_on_one_port():
    config, hosts = ClusterConfig(transfer_port=20000), 5
    ports = [config.port(host, other, hosts) for host in range(hosts) for other in range(hosts)]
    assert sorted(ports) == [*range(20000, 20000 + hosts**2)]
    # The first of them keep theirs, however many may come.
    first = {(i, j): config.port(i, j, 3) for i in range(5) for j in range(5)}
    assert sorted(first.values()) == sorted(ports)
    assert all(first[i, j] == 20000 + 3 * i + j for i in range(3) for j in range(3))
    assert min(port for pair, port in first.items() if max(pair) == 4) == 20016
    assert [config.with_ports(3, extra_hosts) for extra_hosts in (0, 4, 1000)] == [0, 4, 210]
    assert ClusterConfig(transfer_port=65530).with_ports(3, 4) == 0
    assert ClusterConfig().with_ports(3, 1000) == 1000


def test_a_team_keeps_the_ports_of_its_hosts():
    """Whoever leads: each host listens for each other where it did in the whole run."""
    config = ClusterConfig(transfer_port=free_block())
    membership = Membership(config, 2, 4)
    team = membership.group_of(Generation(2, (0, 2, 3), (7, 7, 7), leader=3, step=0))
    assert team.hosts == (3, 0, 2)
    of_run = membership.transfer_addresses()
    assert team.transfer_addresses() == {0: of_run[3], 1: of_run[0]}


@pytest.mark.parametrize("field", ["heartbeat_timeout_s", "connect_timeout_s", "rejoin_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_timeouts_are_positive(field: str, value: float):
    with pytest.raises(InputError, match=f"cluster.{field}"):
        ClusterConfig(**{field: value})  # pyright: ignore[reportArgumentType]


def test_another_program_on_the_port_is_not_taken_for_host_0():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=answer).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TemporaryError, match="is not host 0 of a run"):
            enter(ClusterConfig(connect_timeout_s=5.0), address, 2, 1)


@pytest.mark.nightly
def test_a_host_that_answers_no_more_while_links_are_measured_is_named(
    processes: Processes, tmp_path: Path
):
    config, output = write_config(tmp_path, plan="auto"), tmp_path / "case.yaml"
    # Silence would be noticed late.
    impatient = settings(network__deadline_s=3, cluster__heartbeat_timeout_s=2 * START_S)
    measure = ("-m", "skippipe_jax", "measure", "--config", config, "-o", output)
    processes.start_hosts(2, *measure, *impatient)
    # Before, JAX itself waits for the devices of all hosts.
    processes.wait_until(lambda: "links opened" in processes.output(0), START_S)
    processes.processes[1].send_signal(signal.SIGSTOP)
    assert processes.exit_code(0, START_S) == LOST_HOST_EXIT_CODE, processes.outputs()
    # Where it waits is by chance: for a message, or for a transfer.
    late = r"timed out (after 3 s )?waiting for .* from host 1 \((network\.deadline_s = 3 s|since )"
    assert re.search(late, processes.output(0)), processes.output(0)
    assert "Traceback" not in processes.output(0)
    assert not output.exists()
