"""Collective operations on small values: gather, broadcast and barrier.

Each operation takes a name, which a group uses once, and JSON values; every host, the sender too,
gets them as decoded from JSON. A host that fails to make its value sends the error and raises it;
the receivers raise `PeerFailed`.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from skippipe_jax.errors import PeerFailed


class Host(Protocol):
    """Interface of this host to the other hosts, with short messages.

    Attributes:
        index: position among the hosts, from 0.
        count: number of hosts.
        hosts: host ids in the run, by position.
    """

    index: int
    count: int
    hosts: Sequence[int]

    @abstractmethod
    def put(self, key: str, value: str) -> None:
        """Send a value to every host, replacing an earlier one; do not wait for its arrival."""

    @abstractmethod
    def get(self, key: str, timeout_s: float, source: int) -> str:
        """Wait for the value of a key from a host, remove it and return it.

        Raises:
            TimeoutError: such as `PeerTimeout`; names the key, the host, and the start of the wait.
            GenerationEnded: if the generation ends first.
        """


def from_host_0(host: Host, name: str, make: Callable[[], Any], timeout_s: float) -> Any:
    """Call `make` on host 0 and return its result on all hosts, which call this together.

    Raises:
        PeerFailed: `make` has failed on host 0, which raises its error itself.
        TimeoutError: `make` has not ended within `timeout_s`.
    """
    if host.index == 0:
        return tell(host, name, make)
    return hear(host, name, [0], timeout_s)[0]


def gather(
    host: Host,
    name: str,
    make: Callable[[], Any],
    timeout_s: float,
    hosts: Iterable[int] | None = None,
) -> dict[int, Any]:
    """Call `make` on each of `hosts` (default: every host) and return the results by host.

    All of `hosts` call this together. Other hosts may call it too, to receive the results only.

    Raises:
        PeerFailed: `make` has failed on another host, which raises its error itself.
        TimeoutError: the values of all hosts have not arrived within `timeout_s` altogether.
    """
    hosts = list(range(host.count) if hosts is None else hosts)
    if host.index in hosts:
        tell(host, name, make)
    return hear(host, name, hosts, timeout_s)


def barrier(host: Host, name: str, timeout_s: float) -> None:
    """Wait until every host has reached the barrier of this name.

    Raises:
        TimeoutError: a host has not reached it within `timeout_s`.
    """
    gather(host, name, lambda: None, timeout_s)


def tell(host: Host, name: str, make: Callable[[], Any]) -> Any:
    """Send the result of `make`, or its error, to all hosts; return the result as they get it.

    It does not wait. The other hosts receive the value by `hear`.

    Raises:
        Exception: the error of `make`.
    """
    key = f"{name}/{host.index}"
    try:
        text = json.dumps({"value": make()})
    except Exception as error:
        kind = type(error).__name__
        host.put(key, json.dumps({"error": f"{kind}: {error}", "kind": kind}))
        raise
    host.put(key, text)
    return json.loads(text)["value"]


def hear(host: Host, name: str, hosts: Iterable[int], timeout_s: float) -> dict[int, Any]:
    """Wait for the values that some hosts send under a name; return them by host.

    Raises:
        PeerFailed: one of the hosts has failed to make its value.
        TimeoutError: the values have not all arrived within `timeout_s` altogether.
    """
    end = time.monotonic() + timeout_s
    heard = {}
    for source in hosts:
        left_s = max(0.0, end - time.monotonic())
        message = json.loads(host.get(f"{name}/{source}", left_s, source))
        if "error" in message:
            text = f"host {host.hosts[source]} failed at {name!r}: {message['error']}"
            raise PeerFailed(text, message["kind"])
        heard[source] = message["value"]
    return heard
