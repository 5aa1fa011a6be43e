"""Latency for the links of a shaped network, in the place of its switch.

    with ShapedNetwork(rates) as network, Delays(network) as delays:
        delays.set(latencies)

`tc` shapes rates; `netem`, which could delay packets too, is missing from many kernels. Here a
process takes every packet at the switch, and hands it on to the host that it is for once the
latency of the link is over. Whatever is sent, acknowledgements too, is on its way for so long.

Packets pass as the kernel has them: large ones uncut, and without the checksums that a network card
would have computed.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Self

import numpy as np
from jaxtyping import Float

from experiments.benchmarks.network.shaped_network import ShapedNetwork

# From <linux/if_packet.h> and <linux/if_ether.h>.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
ALL_PROTOCOLS = 3
VNET_HEADER_BYTES = 10
LARGEST_BYTES = 1 << 17
# A machine that is busy would add to latencies.
PRIORITY = -15


class Delays:
    """Takes packets at the switch of a network, and hands them on after the latency of a link.

    A context manager. While it is there, `ShapedNetwork.set_link` is not to be used.
    """

    def __init__(self, network: ShapedNetwork):
        """Begin with no latency."""
        self._network, self._hosts = network, len(network.rates)

    def __enter__(self) -> Self:
        """Take the place of the switch."""
        module = [sys.executable, "-m", "experiments.benchmarks.network.delays"]
        ports = [self._network.port(host) for host in range(self._hosts)]
        self._process = subprocess.Popen(
            [*self._network.command_at_switch(), *module, *ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in range(self._hosts):
            self._network.set_link(host, up=False)
        self.set(np.zeros((self._hosts, self._hosts)))
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave all to the switch again."""
        self._process.kill()
        self._process.communicate()
        for host in range(self._hosts):
            self._network.set_link(host, up=True)

    def set(self, latencies: Float[np.ndarray, "hosts hosts"]) -> None:
        """Delay what comes from now on, from the host of the row to that of the column [s].

        Raises:
            RuntimeError: if the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # Then it says nothing, either.
            print(json.dumps(latencies.tolist()), file=self._process.stdin, flush=True)
        if not self._process.stdout.readline():
            raise RuntimeError("the process that delays packets has exited; see its output above")


def pass_on(ports: list[str]) -> None:
    """Pass packets from port to port, with the latencies that stdin tells in lines, for ever."""
    os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    sockets = [_opened(port) for port in ports]
    hosts = {own.fileno(): host for host, own in enumerate(sockets)}
    latencies = [[0.0] * len(ports) for _ in ports]
    # When it is due, in which order it came, for whom, and the packet.
    waiting: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    told = bytearray()
    while True:
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            *_, target, packet = heapq.heappop(waiting)
            # What a full queue does not take is lost, as in a network.
            with suppress(BlockingIOError):
                sockets[target].send(packet)
        left_s = max(0.0, waiting[0][0] - now_s) if waiting else None
        for ready in select.select([0, *hosts], [], [], left_s)[0]:
            if ready == 0:
                told += (come := os.read(0, LARGEST_BYTES))
                if not come:
                    return
                if told.endswith(b"\n"):
                    latencies = json.loads(told)
                    told.clear()
                    print("set", flush=True)
                continue
            source, now_s = hosts[ready], time.monotonic()
            with suppress(BlockingIOError):
                while packet := sockets[source].recv(LARGEST_BYTES):
                    target = _target(packet)
                    if target < len(ports):
                        due_s = now_s + latencies[source][target]
                        heapq.heappush(waiting, (due_s, next(order), target, packet))


def _opened(port: str) -> socket.socket:
    own = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    own.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    own.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    own.bind((port, ALL_PROTOCOLS))
    own.setblocking(False)
    return own


def _target(packet: bytes) -> int:
    """Return the host that a packet is for: the end of its hardware address; else a large number.

    What is for all, such as multicast of IPv6, has no host.
    """
    address = packet[VNET_HEADER_BYTES : VNET_HEADER_BYTES + 6]
    return int.from_bytes(address[4:], "big") if address[:4] == b"\x02\0\0\0" else 1 << 16


if __name__ == "__main__":
    pass_on(sys.argv[1:])
