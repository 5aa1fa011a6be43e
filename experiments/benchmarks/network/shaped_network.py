"""A real network on one machine, whose links are as slow as they are told to be.

    with ShapedNetwork(rates) as network:
        subprocess.run([*network.command(host=0), "python", "-m", "skippipe_jax.train", ...])

Every host is a network namespace with one interface; a bridge in a namespace of its own joins them,
so that nothing is seen, filtered or left in the network of the machine itself. On its interface a
host has one `htb` class per other host, which `u32` filters find by the address: every directed
link has its own rate, whatever the others carry. If the host has a connection, these classes share
the rate of a parent, and one class at the switch limits what the host receives. There is no added
latency; `delays` adds some.

It needs Linux, root and iproute2 (`ip` and `tc`).
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
from jaxtyping import Float
from skippipe_sched.errors import InputError

T = TypeVar("T")

# From <linux/sched.h>.
NETWORK_NAMESPACE = 0x40000000
FIRST_ADDRESS = ipaddress.IPv4Address("10.77.0.1")
PREFIX_LENGTH = 16
INTERFACE = "eth0"
NETWORK_FILES = Path("/etc/netns")
NAME = re.compile(r"shaped-(\d+)-\d+-\w+")  # the process that made it, its number there, the host
HOSTS_FILE = "127.0.0.1 localhost\n{address} {hostname}\n"

# Packets to this address reach all hosts, none of which takes them in.
NOBODY = "02:00:00:ff:ff:ff"
NOT_SHAPED_BYTES_PER_S = 10e9
# What a link may send at once after a rest: enough that a timer which fires late loses little, and
# so little that a transfer does not look quicker than the link.
BURST_S = 0.0005
SMALLEST_BURST_BYTES = 3028
# What waits for a link, two pieces of TCP at least: a small message behind a large one is delayed
# by a tenth of a second, not by seconds.
QUEUE_S = 0.1
SMALLEST_QUEUE_BYTES = 32768
# What TCP hands to an interface in one piece. The usual 64 kB would take a quarter of a second on
# the slowest links; single packets would keep a small machine busy with nothing else.
LARGEST_PIECE_BYTES = 8192
# A TCP packet with an IP header of 20 bytes, less than 64 bytes in all, and no flag but ACK. Real
# hosts acknowledge many packets with one; here it is one for one or two, which would fill a link
# whose other direction is much quicker.
ACKNOWLEDGEMENT = (
    "match ip protocol 6 0xff match u8 0x05 0x0f at 0 "
    "match u16 0 0xffc0 at 2 match u8 0x10 0xff at 33"
)
# The class of connections that are silenced; `silence` puts its filters before all others.
SILENCE = "1:fffe"
# The class of a host's connection, above those of its links, and the one of what it receives.
CONNECTION, DOWNLINK = "1:fffd", "1:1"

_numbers = itertools.count()


class ShapedNetwork:
    """Hosts joined by links of given rates; a context manager, in which the network exists.

    On leaving, the processes that still run on its hosts are killed and everything is removed. What
    a killed process left behind is removed when the next network starts.
    """

    def __init__(
        self,
        rates: Float[np.ndarray, "hosts hosts"],
        connections: Float[np.ndarray, "hosts 2"] | None = None,
    ):
        """Take the rate from the host of the row to that of the column, in bytes per second.

        Rates are of Ethernet packets, as `tc` counts them: TCP carries 95.6% of them as payload.
        `np.inf` is a link that is not shaped; the diagonal means nothing. `connections` has the
        rates that all links of a host share: of what it sends, and of what it receives.

        Raises:
            InputError: rates are not a square array of positive numbers.
        """
        self.rates = np.array(rates, float)
        if self.rates.ndim != 2 or self.rates.shape[0] != self.rates.shape[1]:
            raise InputError(
                "rates", self.rates.shape, "is not square", "Pass a row and a column for each host"
            )
        for source, target in self._links():
            _check_rate(f"rates[{source}, {target}]", self.rates[source, target])
        unlimited = np.full((len(self.rates), 2), np.inf)
        self._connections = unlimited if connections is None else np.array(connections, float)
        for host, of_host in enumerate(self._connections):
            for rate in of_host:
                _check_rate(f"connections[{host}]", rate)
        self._prefix = f"shaped-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._prefix}-switch"

    def command(self, host: int) -> list[str]:
        """The words before a command that run it on a host."""
        return ["ip", "netns", "exec", self.namespace(host)]

    def command_at_switch(self) -> list[str]:
        """Return the words before a command that run it where the ports of all hosts are."""
        return ["ip", "netns", "exec", self._switch]

    def call(self, host: int, function: Callable[[], T]) -> T:
        """Call a function in a thread of its own, whose sockets are those of a host."""

        def entered() -> T:
            with Path("/run/netns", self.namespace(host)).open() as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NETWORK_NAMESPACE):
                    raise OSError(ctypes.get_errno(), "the thread cannot enter the namespace")
            return function()

        with ThreadPoolExecutor(1) as threads:
            return threads.submit(entered).result()

    def port(self, host: int) -> str:
        """Return the interface at the switch that a host is plugged into."""
        return _port(host)

    def namespace(self, host: int) -> str:
        """The name of a host's network namespace."""
        return f"{self._prefix}-{host}"

    def address(self, host: int) -> str:
        """The IP address of a host, known inside the network only."""
        return str(FIRST_ADDRESS + host)

    def set_link(self, host: int, up: bool) -> None:
        """Cut a host off from all others, or join it again.

        Packets get lost in silence, as in a network far away: the host keeps its address and sees
        no error.
        """
        bridge = ["master", "bridge"] if up else ["nomaster"]
        _run("ip", "-n", self._switch, "link", "set", _port(host), *bridge)

    def set_paths(self, pairs: Iterable[tuple[int, int]], up: bool) -> None:
        """Cut the directed links of these pairs of hosts, or join them again.

        Packets get lost in silence here too; all other links of both hosts go on.
        """
        for source, target in pairs:
            address = _hardware(target) if up else NOBODY
            neighbour = f"neigh replace {self.address(target)} lladdr {address} dev {INTERFACE}"
            _batch("ip", self.namespace(source), [neighbour])

    def silence(self, source: int, target: int, ports: tuple[int, int]) -> None:
        """Lose from now on what a connection sends from a port of `source` to one of `target`.

        Neither end sees an error, and all other connections of both hosts go on.
        """
        source_port, target_port = ports
        there = self.address(target)
        _batch(
            "tc",
            self.namespace(source),
            [
                f"class replace dev {INTERFACE} parent 1: classid {SILENCE} htb rate 1000bps "
                f"quantum {LARGEST_PIECE_BYTES}",
                # No packet is so small that it could wait here.
                f"qdisc replace dev {INTERFACE} parent {SILENCE} bfifo limit 1",
                f"filter add dev {INTERFACE} parent 1: protocol ip prio 1 u32 "
                f"match ip dst {there} match ip sport {source_port} 0xffff "
                f"match ip dport {target_port} 0xffff flowid {SILENCE}",
            ],
        )

    def set_rate(self, source: int, target: int, bytes_per_s: float) -> None:
        """Change the rate of a directed link from now on.

        Raises:
            InputError: the rate is not a positive number.
        """
        _check_rate("bytes_per_s", bytes_per_s)
        self.rates[source, target] = bytes_per_s
        _batch("tc", self.namespace(source), self._link(source, target))

    def __enter__(self) -> Self:
        """Make the network.

        Raises:
            InputError: this machine or this user cannot.
        """
        require_root_and_tools()
        _remove(name for name in _names() if not Path("/proc", _process(name)).exists())
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the network, and the processes that are left in it."""
        self._remove()

    def _make(self) -> None:
        hosts = range(len(self.rates))
        namespaces = [self._switch, *map(self.namespace, hosts)]
        _batch("ip", None, [f"netns add {namespace}" for namespace in namespaces])
        _batch("ip", self._switch, ["link add bridge type bridge", "link set bridge up"])
        _batch("ip", self._switch, (line for host in hosts for line in self._cable(host)))
        for host in hosts:
            folder = NETWORK_FILES / self.namespace(host)
            folder.mkdir(parents=True)
            # Or else libraries that look up the host's own name find an address of the machine.
            names = HOSTS_FILE.format(address=self.address(host), hostname=socket.gethostname())
            (folder / "hosts").write_text(names)
            _batch("ip", self.namespace(host), self._interface(host))
            _batch("tc", self.namespace(host), self._shapes(host))
            _batch("tc", self._switch, self._downlink(host))

    def _cable(self, host: int) -> list[str]:
        port = _port(host)
        end = f"name {INTERFACE} address {_hardware(host)} netns {self.namespace(host)}"
        return [f"link add {port} type veth peer {end}", f"link set {port} master bridge up"]

    def _interface(self, host: int) -> list[str]:
        others = (target for source, target in self._links() if source == host)
        return [
            "link set lo up",
            f"addr add {self.address(host)}/{PREFIX_LENGTH} dev {INTERFACE}",
            f"link set {INTERFACE} gso_max_size {LARGEST_PIECE_BYTES}",
            f"link set {INTERFACE} up",
            # Or else a host that is cut off is told so: who was its neighbour does not answer.
            *(
                f"neigh add {self.address(other)} lladdr {_hardware(other)} dev {INTERFACE}"
                for other in others
            ),
        ]

    def _shapes(self, source: int) -> list[str]:
        filters = f"filter add dev {INTERFACE} parent 1: protocol ip prio 2 u32"
        lines = [
            f"qdisc add dev {INTERFACE} root handle 1: htb",  # what has no class is not shaped
            f"{filters} {ACKNOWLEDGEMENT} flowid 1:",  # which is no class
        ]
        if np.isfinite(uplink := self._connections[source, 0]):
            lines += [_shaping_class(INTERFACE, "1:", CONNECTION, uplink, uplink)]
        for target in (target for start, target in self._links() if start == source):
            lines += self._link(source, target)
            lines += [f"{filters} match ip dst {self.address(target)} flowid {_class_id(target)}"]
        return lines

    def _link(self, source: int, target: int) -> list[str]:
        """Return the lines that make or change the class of a directed link, and its queue."""
        rate, uplink = self.rates[source, target], self._connections[source, 0]
        if np.isinf(uplink):
            return _shaped(INTERFACE, "1:", _class_id(target), rate, rate)
        # Links share the connection equally, and each takes what the others leave, up to its rate.
        equal = min(rate, uplink / (len(self.rates) - 1))
        return _shaped(INTERFACE, CONNECTION, _class_id(target), equal, min(rate, uplink))

    def _downlink(self, host: int) -> list[str]:
        if np.isinf(rate := self._connections[host, 1]):
            return []
        port = _port(host)
        return [
            f"qdisc add dev {port} root handle 1: htb",
            f"filter add dev {port} parent 1: protocol ip prio 2 u32 {ACKNOWLEDGEMENT} flowid 1:",
            *_shaped(port, "1:", DOWNLINK, rate, rate),
            f"filter add dev {port} parent 1: protocol ip prio 2 u32 "
            f"match ip dst {self.address(host)} flowid {DOWNLINK}",
        ]

    def _links(self) -> Iterable[tuple[int, int]]:
        return itertools.permutations(range(len(self.rates)), 2)

    def _remove(self) -> None:
        _remove(name for name in _names() if name.startswith(f"{self._prefix}-"))


def require_root_and_tools() -> None:
    """Check that this user can make a network here.

    Raises:
        InputError: the user is not root, or `ip` or `tc` is missing.
    """
    if os.geteuid() != 0:
        raise InputError(
            "user", os.geteuid(), "must be root to shape a network", "Run this as root"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise InputError("PATH", os.environ.get("PATH"), f"has no `{tool}`", "Install iproute2")


def _check_rate(field: str, bytes_per_s: float) -> None:
    if not bytes_per_s > 0:
        raise InputError(field, float(bytes_per_s), "must be positive", "Pass bytes per second")


def _port(host: int) -> str:
    return f"host{host}"


def _hardware(host: int) -> str:
    return f"02:00:00:00:{host >> 8:02x}:{host & 255:02x}"


def _class_id(target: int) -> str:
    return f"1:{target + 1:x}"


def _shaped(interface: str, parent: str, name: str, rate: float, most: float) -> list[str]:
    """Return the lines that make or replace a class and its queue."""
    queue = max(min(most, NOT_SHAPED_BYTES_PER_S) * QUEUE_S, SMALLEST_QUEUE_BYTES)
    return [
        _shaping_class(interface, parent, name, rate, most),
        f"qdisc replace dev {interface} parent {name} bfifo limit {queue:.0f}",
    ]


def _shaping_class(interface: str, parent: str, name: str, rate: float, most: float) -> str:
    """Return the line of a class that has a rate, and up to `most` if its parent has more."""
    rate, most = min(rate, NOT_SHAPED_BYTES_PER_S), min(most, NOT_SHAPED_BYTES_PER_S)
    burst = max(most * BURST_S, SMALLEST_BURST_BYTES)
    # The quantum shares what classes lend each other; without it `tc` warns.
    sizes = f"burst {burst:.0f} cburst {burst:.0f} quantum {LARGEST_PIECE_BYTES}"
    return (
        f"class replace dev {interface} parent {parent} classid {name} "
        f"htb rate {rate:.0f}bps ceil {most:.0f}bps {sizes}"
    )


def _names() -> set[str]:
    """The namespaces of all shaped networks on this machine, whole or half made."""
    listed = (line.split()[0] for line in _run("ip", "netns", "list").splitlines())
    folders = (folder.name for folder in NETWORK_FILES.glob("shaped-*"))
    return {name for name in (*listed, *folders) if NAME.fullmatch(name)}


def _process(name: str) -> str:
    return NAME.fullmatch(name)[1]  # pyright: ignore[reportOptionalSubscript]


def _remove(names: Iterable[str]) -> None:
    for name in names:
        if Path("/run/netns", name).exists():
            for process in _run("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                    os.kill(int(process), signal.SIGKILL)
            _run("ip", "netns", "delete", name)
        shutil.rmtree(NETWORK_FILES / name, ignore_errors=True)


def _batch(tool: str, namespace: str | None, lines: Iterable[str]) -> None:
    """Run many lines of `ip` or `tc` as one process."""
    inside = [] if namespace is None else ["-n", namespace]
    _run(tool, *inside, "-batch", "-", lines="\n".join(lines) + "\n")


def _run(*command: str, lines: str | None = None) -> str:
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InputError(
            "network",
            " ".join(command),
            done.stderr.strip(),
            "Use a Linux kernel with network namespaces, veth, bridge, htb and u32",
        )
    return done.stdout
