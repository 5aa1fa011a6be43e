"""The hosts of one generation, as a run sees them: a run of so many hosts, until it ends.

A host of a team is counted from 0 like those of a run, the leader first: whatever all hosts of a
run settle among them, those of a team settle in the same way, by the same verbs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skippipe_jax.cluster.board import named
from skippipe_jax.cluster.group import Group
from skippipe_jax.cluster.succession import Counted
from skippipe_jax.consensus.generations import Copies, Generation, Held, Saved, WentBack

if TYPE_CHECKING:
    from skippipe_jax.cluster.membership import Membership


class Team(Group):
    """This host among those of a generation, the leader first; no JAX has devices of several."""

    # If one is lost the team ends, and with it every wait; what is waited for may be a state that
    # comes over a slow link, or the end of an upload.
    timeout_s = 3600.0

    def __init__(self, membership: Membership, generation: Generation):
        """Take the members of a generation, this host among them."""
        leader = generation.leader
        self.generation = generation
        self.hosts = (leader, *(host for host in generation.members if host != leader))
        self.count = len(self.hosts)
        self.index = self.hosts.index(membership.index)
        self._membership = membership

    @property
    def has_ended(self) -> bool:
        """Tell whether the hosts have gone on as another generation."""
        return self._membership.generation_number != self.generation.number

    def here(self) -> dict[str, Any]:
        """Describe this host to the others."""
        return self._membership.here()

    def put(self, key: str, value: str) -> None:
        """Tell every host a value."""
        self._membership.put(self._named(key), value)

    def get(self, key: str, timeout_s: float, source: int | None = None) -> str:
        """Return the value of a key."""
        of_run = None if source is None else self.hosts[source]
        return self._membership.get(self._named(key), timeout_s, of_run, self.generation.number)

    def contribute(
        self, step: int, totals: Sequence[float], counted: Counted, copies: Copies = ()
    ) -> None:
        """Add totals to a step of which this host holds the averaged gradients, and copies."""
        number = self.generation.number
        self._membership.succession.expect(number, counted)
        self._membership.control.tell(Held(number, step, tuple(totals), copies))

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call `then` when the team ends, from another thread."""
        self._membership.succession.when_ended(self.generation.number, then)

    def saved(self, step: int) -> None:
        """Tell that the checkpoint of a step is whole."""
        self._membership.control.tell(Saved(step))

    def gone_back(self, step: int) -> Team:
        """Return the team after an earlier step than its own, to which all of it goes back."""
        self._membership.control.tell(WentBack(self.generation.number, step))
        return Team(self._membership, replace(self.generation, step=step))

    @property
    def address(self) -> str:
        """The IP address by which the others reach this host."""
        return self._membership.address

    def transfer_addresses(self) -> dict[int, str]:
        """Return where this host's transfer server for each other member takes requests.

        It is where that for the same host of the run always does, as `Membership` says it.
        """
        of_run = self._membership.transfer_addresses(self.hosts)
        return {place: of_run[host] for place, host in enumerate(self.hosts) if place != self.index}

    def clock_offset_s(self) -> float:
        """Return what to add to this host's clock for that of the leader."""
        return self._membership.clock_offset_s(self.hosts[0], self.generation.number)

    def _named(self, key: str) -> str:
        return named(self.generation.number, key)
