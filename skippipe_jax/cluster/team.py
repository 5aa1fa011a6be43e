"""The hosts of one generation, as a run sees them: a run of so many hosts, until it ends.

A host of a team is counted from 0 like those of a run, the leader first: whatever all hosts of a
run settle among them, those of a team settle in the same way, by the same verbs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skippipe_jax.cluster.board import TeamEnded, named
from skippipe_jax.cluster.succession import Counted
from skippipe_jax.consensus.generations import Copies, Generation, Held

if TYPE_CHECKING:
    from skippipe_jax.cluster.membership import Membership


class Team:
    """This host among those of a generation.

    Attributes:
        generation: see there.
        hosts: the members as the run counts them, in the order in which the team does.
        index: this host among them, from 0.
        is_distributed: no JAX has the devices of several hosts.
    """

    is_distributed = False

    def __init__(self, membership: Membership, generation: Generation):
        """The members of a generation, this host among them."""
        leader = generation.leader
        self.generation = generation
        self.hosts = (leader, *(host for host in generation.members if host != leader))
        self.index = self.hosts.index(membership.index)
        self._membership = membership

    @property
    def fresh(self) -> frozenset[int]:
        """The hosts that have no state yet, and take it from others."""
        return frozenset(map(self.hosts.index, self.generation.fresh))

    @property
    def holders(self) -> list[list[int]]:
        """The hosts that hold the state of each stage; none where all have what they serve."""
        return [list(map(self.hosts.index, own)) for own in self.generation.holders]

    @property
    def count(self) -> int:
        """The number of hosts."""
        return len(self.hosts)

    @property
    def has_ended(self) -> bool:
        """Whether the hosts have gone on as another generation."""
        return self._membership.generation != self.generation.number

    def require_goes_on(self) -> None:
        """Raise `TeamEnded` if it has ended."""
        if self.has_ended:
            raise TeamEnded

    def here(self) -> dict[str, Any]:
        """What the others are told of this host: its number in the run, its process, its port."""
        return {
            "host": self._membership.index,
            "pid": os.getpid(),
            "address": self._membership.control_address,
        }

    def put(self, key: str, value: str) -> None:
        """Make a value known to all hosts, as `Membership.put` does."""
        self._membership.put(self._named(key), value)

    def get(self, key: str, timeout_s: float, source: int | None = None) -> str:
        """Return the value of a key, as `Membership.get` does.

        Raises:
            TeamEnded: if the team ends before.
        """
        of_run = None if source is None else self.hosts[source]
        return self._membership.get(self._named(key), timeout_s, of_run, self.generation.number)

    def contribute(
        self, step: int, totals: Sequence[float], counted: Counted, copies: Copies = ()
    ) -> None:
        """This host holds the averaged gradients of a step, and these copies; it adds totals.

        `counted` is called once the step counts, from another thread.
        """
        held = Held(self.generation.number, step, tuple(totals), copies)
        self._membership.contribute(held, counted)

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call `then` when the team ends, from another thread."""
        self._membership.when_ended(self.generation.number, then)

    def saved(self, step: int) -> None:
        """Tell that the checkpoint of a step is whole."""
        self._membership.control.saved(step)

    def gone_back(self, step: int) -> Team:
        """The team after an earlier step than its own, to which all of it goes back."""
        self._membership.control.went_back(self.generation.number, step)
        return Team(self._membership, replace(self.generation, step=step))

    @property
    def address(self) -> str:
        """The IP address by which the others reach this host."""
        return self._membership.address

    def transfer_addresses(self) -> dict[int, str]:
        """Where this host's transfer server for each other member takes requests.

        It is where that for the same host of the run always does, as `Membership` says it.
        """
        of_run = self._membership.transfer_addresses(self.hosts)
        return {place: of_run[host] for place, host in enumerate(self.hosts) if place != self.index}

    def clock_offset_s(self) -> float:
        """What to add to this host's clock for that of the leader.

        Raises:
            TeamEnded: if the team ends before the leader has told its own.
        """
        return self._membership.clock_offset_s(self.hosts[0], self.generation.number)

    def _named(self, key: str) -> str:
        return named(self.generation.number, key)
