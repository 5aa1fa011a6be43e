"""What hosts tell each other, and how they come to agree, in a few verbs.

Every verb takes a name, which a run uses once, and values that JSON can hold: all hosts get them
as JSON gives them back, whoever told them. A host that fails at making what it should tell says so,
and raises its own error; those that hear of it raise `PeerFailed`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from skippipe_jax.errors import PeerFailed


class Host(Protocol):
    """This host among those of a run, and short messages between them."""

    @property
    def index(self) -> int:
        """Position among the hosts, from 0."""
        ...

    @property
    def count(self) -> int:
        """Number of hosts."""
        ...

    def put(self, key: str, value: str) -> None:
        """Make a value known to all hosts."""
        ...

    def get(self, key: str, timeout_s: float, source: int | None = None) -> str:
        """Return the value of a key, as soon as it is there.

        `source` is the host that should put it, for the message of the error, a TimeoutError
        such as `PeerTimeout`, after `timeout_s` seconds.
        """
        ...


def from_host_0(host: Host, name: str, make: Callable[[], Any], timeout_s: float) -> Any:
    """Return what `make` returns on host 0, the only one to call it. All hosts call this together.

    Raises:
        PeerFailed: `make` has failed on host 0, which raises its error itself.
        TimeoutError: it has not ended within `timeout_s`.
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
    """Return what `make` returns on all `hosts`, by host; every host by default.

    Those of `hosts` call this together. Others may, to know what these tell: they make nothing.

    Raises:
        PeerFailed: `make` has failed on another host, which raises its error itself.
        TimeoutError: a host has not told within `timeout_s`, which counts for all together.
    """
    hosts = list(range(host.count) if hosts is None else hosts)
    if host.index in hosts:
        tell(host, name, make)
    return hear(host, name, hosts, timeout_s)


def agree(
    host: Host,
    name: str,
    value: Any,
    timeout_s: float,
    differing: Callable[[int], Exception],
    hosts: Iterable[int] | None = None,
) -> None:
    """Return if all `hosts`, every host by default, have the same value as the first of them.

    These hosts call this together. The first goes on without waiting for the others.

    Raises:
        Exception: `differing(first)`, on a host whose value is not that of host `first`.
        TimeoutError: the first has not told its value within `timeout_s`.
    """
    first = min(range(host.count) if hosts is None else hosts)
    if host.index == first:
        tell(host, name, lambda: value)
    # A tuple becomes a list on its way, and a number among keys a text.
    elif hear(host, name, [first], timeout_s)[first] != json.loads(json.dumps(value)):
        raise differing(first)


def barrier(host: Host, name: str, timeout_s: float) -> None:
    """Return when every host has come to the barrier of this name.

    Raises:
        TimeoutError: a host has not come within `timeout_s`.
    """
    gather(host, name, lambda: None, timeout_s)


def tell(host: Host, name: str, make: Callable[[], Any]) -> Any:
    """Tell all hosts what `make` returns, or how it fails, and return it as they hear it.

    For those that shall not wait: the others ask for it by `hear`.

    Raises:
        Exception: the error of `make`.
    """
    key = f"{name}/{host.index}"
    try:
        text = json.dumps({"value": make()})
    except Exception as error:
        host.put(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    host.put(key, text)
    return json.loads(text)["value"]


def hear(host: Host, name: str, hosts: Iterable[int], timeout_s: float) -> dict[int, Any]:
    """Wait for what some hosts tell under a name; return it by host.

    Raises:
        PeerFailed: one of them has failed at it.
        TimeoutError: one of them has not told within `timeout_s`, which counts for all together.
    """
    end = time.monotonic() + timeout_s
    heard = {}
    for source in hosts:
        left_s = max(0.0, end - time.monotonic())
        message = json.loads(host.get(f"{name}/{source}", left_s, source))
        if "error" in message:
            raise PeerFailed(f"host {source} has failed at {name!r}: {message['error']}")
        heard[source] = message["value"]
    return heard
