"""The hosts that train together, and this one among them, as all that trains knows them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from skippipe_jax.cluster.succession import Counted
from skippipe_jax.consensus.generations import Copies, Generation
from skippipe_jax.errors import GenerationEnded

NO_GENERATION = Generation(0, (), (), 0, 0)
"""That of hosts which are always the same: nobody lacks a state, and no stage is lost."""


class Group(ABC):
    """Hosts that train together: those of a run (`Membership`), or of a generation (`Team`).

    They are counted from 0, and host 0 leads. Where they are always the same, this answers what a
    generation does of which nothing has changed.

    Attributes:
        index: this host among them.
        count: their number.
        is_distributed: whether one JAX has the devices of all.
        timeout_s: how long they wait for each other before they train.
        generation: that of these hosts; `NO_GENERATION` where they are always the same.
        hosts: their numbers in the run, in their order.
    """

    index: int
    count: int
    is_distributed: bool = False
    timeout_s: float
    generation: Generation = NO_GENERATION
    hosts: Sequence[int]

    @property
    def is_elastic(self) -> bool:
        """Tell whether it ends when a host is lost, and others go on."""
        return self.generation.number > 0

    @property
    def fresh(self) -> frozenset[int]:
        """The hosts that have no state yet, and take it from others."""
        return frozenset(map(self.hosts.index, self.generation.fresh))

    @property
    def apart(self) -> frozenset[int]:
        """The hosts that do not reach the folder of the run."""
        return frozenset(map(self.hosts.index, self.generation.apart))

    @property
    def holders(self) -> list[list[int]]:
        """The hosts that hold the state of each stage; none where all have what they serve."""
        return [list(map(self.hosts.index, own)) for own in self.generation.holders]

    @abstractmethod
    def here(self) -> dict[str, Any]:
        """Describe this host to the others: its number in the run, its process, its address."""

    @abstractmethod
    def put(self, key: str, value: str) -> None:
        """Tell every host a value, replacing an earlier one; return before they know it."""

    @abstractmethod
    def get(self, key: str, timeout_s: float, source: int | None = None) -> str:
        """Return the latest value of a key, waiting for it if nobody has put it yet, and forget it.

        `source` is the host that should put it, where there is one, for the error message.

        Raises:
            PeerTimeout: says what was waited for, from whom, and since when.
            GenerationEnded: if the generation ends before it is there.
        """

    @property
    @abstractmethod
    def address(self) -> str:
        """The IP address by which the others reach this host, and on which it listens."""

    @abstractmethod
    def transfer_addresses(self) -> dict[int, str]:
        """Return where this host's transfer servers, by other host, take requests: ``IP:PORT``.

        Raises:
            InputError: if there are no such ports for all hosts.
            TemporaryError: if one of this host's is taken.
        """

    @abstractmethod
    def clock_offset_s(self) -> float:
        """Return what to add to this host's `time.time()` to get that of host 0.

        Raises:
            PeerTimeout: if that does not answer in time.
            GenerationEnded: if the generation ends before it does.
        """

    @property
    def has_ended(self) -> bool:
        """Tell whether the hosts have gone on as another generation."""
        return False

    def require_goes_on(self) -> None:
        """Raise `GenerationEnded` if it has ended."""
        if self.has_ended:
            raise GenerationEnded

    @abstractmethod
    def when_ended(self, then: Callable[[], None]) -> None:
        """Call `then` when it ends, from another thread."""

    @abstractmethod
    def contribute(
        self, step: int, totals: Sequence[float], counted: Counted, copies: Copies = ()
    ) -> None:
        """Add totals to a step of which this host holds the averaged gradients, and these copies.

        `counted` is called with those of all hosts once the step counts, maybe from another thread.
        """

    @abstractmethod
    def saved(self, step: int) -> None:
        """Tell that the checkpoint of a step is whole."""
