"""What nft is told by the recipes for WireGuard and for other networks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "experiments" / "launch"
ADDRESS, PORT = "10.88.0.1", 8476
# Keys are no matter here, and the programs that make them are missing on many machines.
WG = """\
case $1 in
    genkey) head -c 32 /dev/urandom | base64 ;;
    pubkey) base64 -d | sha256sum | head -c 44 ;;
esac
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
