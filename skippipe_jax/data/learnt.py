"""Which tokens of a text are learnt, as the stretches that are: of conversations, the answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int64, Integer


@dataclass(frozen=True, eq=False)
class Learnt:
    """Stretches of tokens, in order, none within another; what lies in none is not learnt.

    Attributes:
        starts: the first token of each stretch.
        ends: the token after its last.
    """

    starts: Int64[np.ndarray, " stretch"]
    ends: Int64[np.ndarray, " stretch"]

    @classmethod
    def where(cls, is_learnt: Bool[np.ndarray, " token"]) -> Learnt:
        """Return the stretches of the tokens for which this is true."""
        switches = np.diff(is_learnt.astype(np.int8), prepend=0, append=0)
        return cls(np.flatnonzero(switches == 1), np.flatnonzero(switches == -1))

    @cached_property
    def _totals(self) -> Int64[np.ndarray, " stretch_or_none"]:
        """How many tokens the first stretches hold, from none of them to all."""
        return np.concatenate([[0], np.cumsum(self.ends - self.starts)])

    @property
    def count(self) -> int:
        """How many tokens are learnt."""
        return int(self._totals[-1])

    def before(self, places: Integer[np.ndarray, " place"]) -> Int64[np.ndarray, " place"]:
        """Return how many learnt tokens come before each place."""
        begun = np.searchsorted(self.starts, places)
        # Of the stretch that began last, a part may lie behind the place.
        ends = np.concatenate([[0], self.ends])[begun]
        return self._totals[begun] - np.maximum(ends - places, 0)

    def of(self, start: int, stop: int) -> Bool[np.ndarray, " token"]:
        """For each token of a span, whether it is learnt."""
        first, last = np.searchsorted(self.ends, start, "right"), np.searchsorted(self.starts, stop)
        found = np.zeros(stop - start, bool)
        for begin, end in zip(self.starts[first:last], self.ends[first:last], strict=True):
            found[max(begin - start, 0) : end - start] = True
        return found
