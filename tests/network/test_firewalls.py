"""Who is kept from the ports of a run by the recipes for WireGuard and for other networks.

An interface of the name wg0 stands for WireGuard's: what is looked at is what comes by other ways.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.network.test_shaped_network import needs_root

LAUNCH = Path(__file__).parents[2] / "experiments" / "launch"
ADDRESS, PORT = "10.88.0.1", 8476
# Keys are no matter here, and the programs that make them are missing on many machines.
WG = """\
case $1 in
    genkey) head -c 32 /dev/urandom | base64 ;;
    pubkey) base64 -d | sha256sum | head -c 44 ;;
esac
"""
LISTEN = f"""\
import socket
with socket.create_server(("{ADDRESS}", {PORT})) as server:
    print("listening", flush=True)
    while True:
        server.accept()[0].close()
"""
CONNECT = f"""\
import socket
socket.create_connection(("{ADDRESS}", {PORT}), timeout=1).close()
"""


def run(*command: str | Path, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def hooks(tmp_path: Path) -> dict[str, str]:
    """What wg-quick runs at site 0 beside its own, by when."""
    (tmp_path / "wg").write_text(f"#!/usr/bin/env bash\n{WG}")
    (tmp_path / "wg").chmod(0o755)
    endpoints = ("203.0.113.10:51820", "198.51.100.20:51820")
    path = f"{tmp_path}:{os.environ['PATH']}"
    run("bash", LAUNCH / "wireguard.sh", tmp_path / "vpn", *endpoints, PATH=path)
    text = (tmp_path / "vpn" / "0" / "wg0.conf").read_text()
    section = text.split("[Peer]")[0]
    assert "#" not in section  # wg-quick would leave out the rest of the line.
    found = dict(re.findall(r"^(P\w+(?:Up|Down)) = (.*)$", section, re.M))
    return {when: hook.replace("%i", "wg0") for when, hook in found.items()}


def test_what_does_not_come_through_wireguard_is_dropped_before_there_is_an_address(
    hooks: dict[str, str], tmp_path: Path
):
    """What nft is told, whether it is installed here or not."""
    assert hooks.keys() == {"PreUp", "PostDown"}
    stand_in = tmp_path / "nft"
    stand_in.write_text('#!/usr/bin/env bash\necho "$# $1"\n')
    stand_in.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    table = "table ip skippipe-wg0"
    assert run("bash", "-c", hooks["PreUp"], PATH=path).rstrip() == (
        f"1 add {table}; delete {table}; {table} {{ chain others "
        "{ type filter hook prerouting priority raw; "
        "iifname != { lo, wg0 } ip daddr 10.88.0.0/24 drop; }; }"
    )
    assert run("bash", "-c", hooks["PostDown"], PATH=path).rstrip() == f"1 delete {table}"
    # Where there is no nft, the site does not come up.
    (tmp_path / "empty").mkdir()
    bash = shutil.which("bash")
    assert bash is not None
    missing = {"PATH": str(tmp_path / "empty")}
    ended = subprocess.run([bash, "-c", hooks["PreUp"]], env=missing, capture_output=True)
    assert ended.returncode == 127


@pytest.fixture
def site() -> Iterator[dict[str, list[str]]]:
    """How a command runs at a site, at its neighbour in one network, and at another site."""
    names = {name: f"wg-{os.getpid()}-{name}" for name in ("site", "neighbour", "peer")}
    try:
        for name in names.values():
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for other, interface, addresses in (
            ("neighbour", "lan", ("192.0.2.1/24", "192.0.2.2/24")),
            ("peer", "wg0", (f"{ADDRESS}/24", "10.88.0.2/24")),
        ):
            ends = ("site", names["site"]), (other, names[other])
            peer = ("peer", "name", interface, "netns", names[other])
            here = ("name", interface, "netns", names["site"])
            run("ip", "link", "add", *here, "type", "veth", *peer)
            for (_, name), address in zip(ends, addresses, strict=True):
                run("ip", "-n", name, "address", "add", address, "dev", interface)
                run("ip", "-n", name, "link", "set", interface, "up")
        # The neighbour is told by nobody but itself that the way is through the site.
        run("ip", "-n", names["neighbour"], "route", "add", "10.88.0.0/24", "via", "192.0.2.1")
        yield {place: ["ip", "netns", "exec", name] for place, name in names.items()}
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "delete", name], check=False)


needs_nft = pytest.mark.skipif(
    shutil.which("nft") is None, reason="needs nft: only what it is told was looked at"
)


@contextlib.contextmanager
def listening(site: dict[str, list[str]]) -> Iterator[None]:
    """A server at the site, in the private network."""
    command = [*site["site"], sys.executable, "-c", LISTEN]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        yield
    finally:
        server.kill()
        server.communicate()


def reaches(site: dict[str, list[str]]) -> dict[str, bool]:
    """Who can connect to the server."""
    ended = {
        place: subprocess.run([*words, sys.executable, "-c", CONNECT], stderr=subprocess.DEVNULL)
        for place, words in site.items()
    }
    return {place: process.returncode == 0 for place, process in ended.items()}


ALL = {"site": True, "neighbour": True, "peer": True}


@pytest.mark.nightly
@needs_root
@needs_nft
def test_a_neighbour_reaches_nothing_that_listens_in_the_private_network(
    hooks: dict[str, str], site: dict[str, list[str]]
):
    with listening(site):
        assert reaches(site) == ALL  # Otherwise there would be nothing to stop.
        for _ in range(2):  # also over the rules of a start that failed
            run(*site["site"], "bash", "-c", hooks["PreUp"])
        assert reaches(site) == ALL | {"neighbour": False}
        run(*site["site"], "bash", "-c", hooks["PostDown"])
        assert reaches(site) == ALL


# Other networks.


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """What nft is told of a run of two hosts, without the neighbour."""
    (tmp_path / "hosts").write_text(f"# host 0 first\nalice {ADDRESS}\nbob 10.88.0.2\n")
    (tmp_path / "rules").write_text(
        run("bash", LAUNCH / "firewall.sh", tmp_path / "hosts", "20000", PORT=str(PORT))
    )
    return tmp_path / "rules"


def test_strangers_are_kept_from_all_ports_of_a_run(rules: Path, tmp_path: Path):
    """What nft is told, whether it is installed here or not."""
    lines = [line.strip() for line in rules.read_text().splitlines()]
    assert lines[:2] == ["table inet skippipe-run", "delete table inet skippipe-run"]
    assert lines[4:-2] == [
        "type filter hook input priority filter",
        "iifname lo accept",
        "ct state established,related accept",
        f"ip saddr {{ {ADDRESS},10.88.0.2 }} accept",
        f"tcp dport {PORT} drop",
        # As many as `ClusterConfig.port` needs.
        "tcp dport 20000-20003 drop",
        "tcp dport {}-{} drop".format(
            *Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        ),
    ]
    (tmp_path / "hosts").write_text("alice 2001:db8::1\nbob 10.88.0.2\n")
    mixed = run("bash", LAUNCH / "firewall.sh", tmp_path / "hosts", "20000")
    assert "ip saddr { 10.88.0.2 } accept" in mixed
    assert "ip6 saddr { 2001:db8::1 } accept" in mixed


@pytest.mark.nightly
@needs_root
@needs_nft
def test_only_the_hosts_of_a_run_reach_it(rules: Path, site: dict[str, list[str]]):
    with listening(site):
        assert reaches(site) == ALL
        for _ in range(2):
            run(*site["site"], "nft", "-f", rules)
        assert reaches(site) == ALL | {"neighbour": False}
