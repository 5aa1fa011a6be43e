"""Process group: interface of a host to the hosts that train together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from skippipe_jax.cluster.agreement import Host
from skippipe_jax.cluster.inbox import Counted
from skippipe_jax.consensus.generations import Copies, Generation
from skippipe_jax.errors import GenerationEnded

NO_GENERATION = Generation(0, (), (), 0, 0)
"""Generation of a group with fixed hosts: no host lacks a state, and no stage is lost."""


class Group(Host):
    """Hosts that train together: all hosts of a run (`Membership`) or a generation (`Team`).

    Hosts are numbered from 0, and host 0 leads. A group with fixed hosts behaves like a generation
    in which nothing has changed.

    Attributes:
        is_distributed: whether one JAX runtime has the devices of all hosts.
        timeout_s: seconds that hosts wait for each other before training.
        generation: generation of these hosts; `NO_GENERATION` for fixed hosts.
        hosts: host ids in the run, by position.
    """

    is_distributed: bool = False
    timeout_s: float
    generation: Generation = NO_GENERATION
    hosts: Sequence[int]

    @property
    def is_elastic(self) -> bool:
        """True if the group ends when a host is lost, and the other hosts continue."""
        return self.generation.number > 0

    @property
    def fresh(self) -> frozenset[int]:
        """Hosts without a state, which they receive from others."""
        return frozenset(map(self.hosts.index, self.generation.fresh))

    @property
    def apart(self) -> frozenset[int]:
        """Diskless hosts, which do not reach the folder of the run."""
        return frozenset(map(self.hosts.index, self.generation.apart))

    @property
    def holders(self) -> list[list[int]]:
        """Hosts that hold the state of each stage; empty if all hold what they serve."""
        return [list(map(self.hosts.index, own)) for own in self.generation.holders]

    @abstractmethod
    def here(self) -> dict[str, Any]:
        """Describe this host to the others: host id, process id, address."""

    @property
    @abstractmethod
    def address(self) -> str:
        """IP address at which the others reach this host, and on which it listens."""

    @abstractmethod
    def transfer_addresses(self) -> dict[int, str]:
        """Return the addresses of this host's transfer servers by other host, ``IP:PORT``.

        Raises:
            InputError: if there are not enough ports for all hosts.
            TemporaryError: if a port of this host is taken.
        """

    @abstractmethod
    def clock_offset_s(self) -> float:
        """Return the seconds to add to this host's `time.time()` to get that of host 0.

        Raises:
            PeerTimeout: if host 0 does not answer in time.
            GenerationEnded: if the generation ends first.
        """

    @property
    def has_ended(self) -> bool:
        """True if the hosts have continued as another generation."""
        return False

    def require_current(self) -> None:
        """Raise `GenerationEnded` if the generation has ended."""
        if self.has_ended:
            raise GenerationEnded

    @abstractmethod
    def when_ended(self, then: Callable[[], None]) -> None:
        """Call `then` when the group ends, from another thread."""

    @abstractmethod
    def contribute(
        self, step: int, totals: Sequence[float], counted: Counted, copies: Copies = ()
    ) -> None:
        """Report totals and buddy checkpoints of a step, whose averaged gradients this host holds.

        `counted` is called, maybe in another thread, with the totals of all hosts upon the commit.
        """

    @abstractmethod
    def saved(self, step: int) -> None:
        """Report that the checkpoint of a step is complete."""
