"""Process group of one generation.

Its hosts are numbered from 0 like those of a run, the leader first, so that the operations of
`agreement` work in a team as in a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skippipe_jax.cluster.generation_queue import Counted
from skippipe_jax.cluster.group import Group
from skippipe_jax.cluster.mailboxes import named
from skippipe_jax.consensus.generations import Copies, Generation, Held, RolledBack, Saved

if TYPE_CHECKING:
    from skippipe_jax.cluster.membership import Membership


class Team(Group):
    """Group of a generation's hosts, the leader first; each host has its own JAX runtime."""

    # Long, since a wait may be for a state over a slow link or an upload; the loss of a host ends
    # the team, and with it every wait.
    timeout_s = 3600.0

    def __init__(self, membership: Membership, generation: Generation):
        """Create the group of a generation's members, this host among them."""
        leader = generation.leader
        self.generation = generation
        self.hosts = (leader, *(host for host in generation.members if host != leader))
        self.count = len(self.hosts)
        self.index = self.hosts.index(membership.index)
        self._membership = membership

    @property
    def has_ended(self) -> bool:
        """True if the hosts have continued as another generation."""
        return self._membership.generation_number != self.generation.number

    def here(self) -> dict[str, Any]:
        """Describe this host to the others."""
        return self._membership.here()

    def put(self, key: str, value: str) -> None:
        """Send a value to every host."""
        self._membership.put(self._named(key), value)

    def get(self, key: str, timeout_s: float, source: int | None = None) -> str:
        """Wait for the value of a key, remove it and return it."""
        of_run = None if source is None else self.hosts[source]
        return self._membership.get(self._named(key), timeout_s, of_run, self.generation.number)

    def contribute(
        self, step: int, totals: Sequence[float], counted: Counted, copies: Copies = ()
    ) -> None:
        """Report totals and buddy checkpoints of a step whose averaged gradients this host has."""
        number = self.generation.number
        self._membership.succession.expect(number, counted)
        self._membership.control.tell(Held(number, step, tuple(totals), copies))

    def when_ended(self, then: Callable[[], None]) -> None:
        """Call `then` when the team ends, from another thread."""
        self._membership.succession.when_ended(self.generation.number, then)

    def saved(self, step: int) -> None:
        """Report that the checkpoint of a step is complete."""
        self._membership.control.tell(Saved(step))

    def gone_back(self, step: int) -> Team:
        """Report the rollback of all members to an earlier step; return the team after it."""
        self._membership.control.tell(RolledBack(self.generation.number, step))
        return Team(self._membership, replace(self.generation, step=step))

    @property
    def address(self) -> str:
        """IP address at which the others reach this host."""
        return self._membership.address

    def transfer_addresses(self) -> dict[int, str]:
        """Return the addresses of this host's transfer servers by other member.

        The address for a host is the same in every generation; see `Membership`.
        """
        of_run = self._membership.transfer_addresses(self.hosts)
        return {place: of_run[host] for place, host in enumerate(self.hosts) if place != self.index}

    def clock_offset_s(self) -> float:
        """Return the seconds to add to this host's clock to get that of the leader."""
        return self._membership.clock_offset_s(self.hosts[0], self.generation.number)

    def _named(self, key: str) -> str:
        return named(self.generation.number, key)
