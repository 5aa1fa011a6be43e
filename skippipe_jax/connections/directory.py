"""Hosts of a run and their addresses, as one host has them, and the checks of a hello.

Nothing here waits or sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.connections.addresses import parse_address
from skippipe_jax.connections.hello import Hello, Welcome

HOST_ID = "--host-id"
"""Field of the errors by which a host is refused because of its id."""


class Directory:
    """Hosts of a run, as one host has them.

    Attributes:
        hello: hello of this host.
        names: printable names of the hosts that have connected, by host id.
        addresses: listening addresses of the other hosts, by host id.
        has_begun: True once all hosts have connected.
        outlives: True in an elastic run, which lost hosts may rejoin.
        is_outside: True while this host is not a member: it has been lost and rejoins.
    """

    def __init__(self, hello: Hello):
        """Start with this host only."""
        self.hello = hello
        self.names = {hello.host: hello.name}
        self.addresses: dict[int, str] = {}
        self.has_begun = False
        self.outlives = False
        self.is_outside = False

    @property
    def others(self) -> list[int]:
        """All other hosts: those that the run starts with, and those that joined since."""
        everybody = {*range(self.hello.hosts), *self.addresses}
        return sorted(everybody - {self.hello.host})

    @property
    def unused_ids(self) -> list[int]:
        """Ids of extra hosts that have never been taken."""
        extra_hosts = range(self.hello.hosts, self.hello.places)
        return [
            host for host in extra_hosts if host != self.hello.host and host not in self.addresses
        ]

    def begin(self) -> None:
        """Begin the run on host 0, once all hosts have connected."""
        self.hello = replace(self.hello, start=self.hello.process)
        self.has_begun = True

    def come_back(self) -> None:
        """Make this host one that rejoins a run that has begun."""
        self.has_begun = self.outlives = self.is_outside = True
        self.hello = replace(self.hello, comes_back=True)

    def welcome(self, received: int) -> Welcome:
        """Return the welcome for an accepted host with `received` messages."""
        own, addresses = self.hello, self.addresses | {self.hello.host: self.hello.address}
        return Welcome(own.host, own.name, own.start, addresses, own.process, received)

    def learn(self, welcome: Welcome) -> None:
        """Add the start and the addresses of a welcome; known values are kept."""
        self.hello = replace(self.hello, start=self.hello.start or welcome.start)
        theirs = {host: own for host, own in welcome.addresses.items() if host != self.hello.host}
        self.addresses = theirs | self.addresses

    def address(self, host: int) -> tuple[str, int]:
        """Return the host and port where another host listens."""
        return parse_address("address", self.addresses[host])

    def is_another_run(self, error: InputError) -> bool:
        """Return True if a refusal comes from another run, or is temporary."""
        return isinstance(error, TemporaryError) or error.field in self.hello.run.identity

    def refusal(self, hello: Hello, *, is_there: bool) -> InputError | None:
        """Return why a host is refused, else None; `is_there` is True if its id is in use."""
        own, problem = self.hello, None
        unlike = own.unlike(hello)
        if unlike is not None:
            return unlike
        knows_start = own.start > 0 or own.host == 0
        # Two rejoining hosts do not make a run: neither of them has found it.
        are_both_outside = self.is_outside and hello.start == 0
        if knows_start and hello.start not in (0, own.start):
            problem = "this process belongs to an earlier start of the run"
        elif hello.comes_back and (not self.outlives or are_both_outside):
            problem = "the run has not started, or is not elastic"
        elif self.has_begun and not self.outlives:
            problem = "the run started without this host, or is ending"
        if problem is not None:
            return TemporaryError(HOST_ID, hello.host, problem, "Stop it, and restart all hosts")
        if hello.host == own.host or is_there:
            problem = f"{self.names[hello.host]} already uses this id"
            return InputError(HOST_ID, hello.host, problem, "Give every host its own id")
        return None

    def waits_for(self, missing: Sequence[int]) -> str:
        """Describe which hosts this one waits for, and how many have connected."""
        count = len(self.others)
        return f"waiting for {_named(missing)} ({count - len(missing)} of {count} connected)"

    def late(self, missing: Sequence[int], timeout_s: float) -> TemporaryError:
        """Return the error about hosts that have not connected in time."""
        limit = f"cluster.connect_timeout_s = {timeout_s:g} s"
        return TemporaryError(
            "--hosts",
            self.hello.hosts,
            f"{_named(missing)} did not connect within {limit}",
            "Check that every host runs with its own --host-id and the same --coordinator and "
            "--hosts, or increase cluster.connect_timeout_s",
        )


def _named(hosts: Sequence[int]) -> str:
    return f"host{'s' * (len(hosts) > 1)} {', '.join(map(str, hosts))}"
