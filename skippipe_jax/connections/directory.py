"""Who the hosts of a run are and where they listen, as one host knows it, and who may still come.

Nothing here waits or sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax.connections.addresses import parse_address
from skippipe_jax.connections.hello import Hello, Welcome

HOST_ID = "--host-id"
"""The field by which a host is refused for its number."""


class Directory:
    """What one host knows of all.

    Attributes:
        hello: who this host is.
        names: those of the hosts that it has met, for readers.
        addresses: where the others listen.
        has_begun: whether all hosts have been there.
        outlives: whether hosts may be lost and come back.
        is_outside: whether this host was lost itself, and is not back yet.
    """

    def __init__(self, hello: Hello):
        """Know nobody but the host itself."""
        self.hello = hello
        self.names = {hello.host: hello.name}
        self.addresses: dict[int, str] = {}
        self.has_begun = False
        self.outlives = False
        self.is_outside = False

    @property
    def others(self) -> list[int]:
        """All other hosts: those that the run begins with, and those that have come since."""
        everybody = {*range(self.hello.hosts), *self.addresses}
        return sorted(everybody - {self.hello.host})

    @property
    def never_taken(self) -> list[int]:
        """The places to which nobody has come yet."""
        spare = range(self.hello.hosts, self.hello.places)
        return [host for host in spare if host != self.hello.host and host not in self.addresses]

    def begin(self) -> None:
        """Begin the run, on host 0: all are there."""
        self.hello = replace(self.hello, start=self.hello.process)
        self.has_begun = True

    def come_back(self) -> None:
        """Look for a run that has begun."""
        self.has_begun = self.outlives = self.is_outside = True
        self.hello = replace(self.hello, comes_back=True)

    def told(self, received: int) -> dict[str, Any]:
        """Return what a host is told that is let in, from which so many messages have come."""
        own, addresses = self.hello, self.addresses | {self.hello.host: self.hello.address}
        told = Welcome(own.host, own.name, own.start, addresses, own.process, received)
        return told.to_json()

    def learn(self, told: Welcome) -> None:
        """Take in what a host tells that has been called, but for what is known already."""
        self.hello = replace(self.hello, start=self.hello.start or told.start)
        theirs = {host: own for host, own in told.addresses.items() if host != self.hello.host}
        self.addresses = theirs | self.addresses

    def address(self, host: int) -> tuple[str, int]:
        """Return where another host listens, as far as known."""
        return parse_address("address", self.addresses[host])

    def is_another_run(self, error: InputError) -> bool:
        """Tell whether a refusal comes from a run that this host cannot be of."""
        return isinstance(error, TemporaryError) or error.field in self.hello.run.identity

    def refusal(self, hello: Hello, *, is_there: bool) -> InputError | None:
        """Return why a host cannot come in, if so; `is_there` tells whether its number is taken."""
        own, problem = self.hello, None
        unlike = own.unlike(hello)
        if unlike is not None:
            return unlike
        knows_start = own.start > 0 or own.host == 0
        # Of two that both look for the run neither has found it, however long they wait together.
        are_both_outside = self.is_outside and hello.start == 0
        if knows_start and hello.start not in (0, own.start):
            problem = "it is left of an earlier start of the run"
        elif hello.comes_back and (not self.outlives or are_both_outside):
            problem = "no run has begun here that goes on without it"
        elif self.has_begun and not self.outlives:
            problem = "the run has begun without this host, or is at its end"
        if problem is not None:
            return TemporaryError(HOST_ID, hello.host, problem, "End it, and start all hosts again")
        if hello.host == own.host or is_there:
            problem = f"{self.names[hello.host]} has joined with this id"
            return InputError(HOST_ID, hello.host, problem, "give every host its own id")
        return None

    def waits_for(self, missing: Sequence[int]) -> str:
        """Say for which of the other hosts this one waits, and how many have come."""
        count = len(self.others)
        hosts = f"host{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return f"waiting for {hosts} ({count - len(missing)} of {count} have come)"

    def late(self, missing: Iterable[int], timeout_s: float) -> TemporaryError:
        """Make the error about hosts that have not come in time."""
        return TemporaryError(
            "--hosts",
            self.hello.hosts,
            f"of these, {list(missing)} did not connect within {timeout_s:g} s",
            "start every host with its own --host-id and the same --coordinator and --hosts, "
            "or give them more time in cluster.connect_timeout_s",
        )
