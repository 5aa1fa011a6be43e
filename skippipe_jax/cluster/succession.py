"""The generations of a run as one host lives through them: what the run is told, and asks."""

from __future__ import annotations

import threading
from collections.abc import Callable

from skippipe_jax.cluster.board import NOBODY, Board
from skippipe_jax.consensus.generations import Apply, Decision, Enter, Generation, LeftOut

Totals = tuple[float, ...]
Counted = Callable[[Totals], None]
"""Called with the totals of all hosts, once a step counts."""


class Succession:
    """Takes in what `Control` tells on the event loop, for the run in another thread.

    Attributes:
        entered: the generation that was entered last, or None.
    """

    def __init__(self, board: Board):
        """Begin outside of all generations; `board` follows them."""
        self.entered: Generation | None = None
        self._following: tuple[Generation, ...] = ()
        self._board = board
        self._lock = threading.Lock()
        self._counted: Counted | None = None
        self._when_ended: Callable[[], None] | None = None

    def next(self, after: int, timeout_s: float) -> Generation | None:
        """Wait for the generation that this host enters after another; None if it takes too long.

        None is passed over, though it may have ended: all may have gone back in it.
        """

        def found() -> Generation | None:
            last = self._board.generation
            return next((own for own in self._following if after < own.number <= last), None)

        with self._lock:
            self._following = tuple(own for own in self._following if own.number > after)
        self._board.wait_for(lambda: found() is not None, timeout_s)
        return found()

    def expect(self, generation: int, counted: Counted) -> None:
        """Call `counted` once the next step counts, unless the generation has ended."""
        with self._lock:
            if self._board.generation == generation:
                self._counted = counted

    def when_ended(self, generation: int, then: Callable[[], None]) -> None:
        """Call `then` when a generation ends, or at once if it has."""
        with self._lock:
            self._when_ended = then
            has_ended = self._board.generation != generation
        if has_ended:
            then()

    def follow(self, decision: Decision) -> None:
        """Do what was decided: apply the step that this host contributed to, enter, or leave."""
        match decision:
            case Apply(_, outcome):
                if (counted := self._counted) is not None:
                    counted(outcome)
            case Enter(generation):
                with self._lock:
                    self.entered = generation
                    self._following += (generation,)
                self._end(generation.number)
            case LeftOut():
                with self._lock:
                    # It comes back without a state, or goes back with all: all entered is over.
                    self._following = ()
                self._end(NOBODY)

    def ends(self) -> None:
        """No generation comes any more: whoever waits for something in one is told so."""
        self._end(NOBODY)

    def _end(self, following: int) -> None:
        with self._lock:
            self._board.begin(following)
            then, self._when_ended, self._counted = self._when_ended, None, None
        if then is not None:
            then()
