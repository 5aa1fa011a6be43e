"""Generations of a run on one host, as decided by the consensus and awaited by training."""

from __future__ import annotations

import threading
from collections.abc import Callable

from skippipe_jax.cluster.mailboxes import NOBODY, Mailboxes
from skippipe_jax.consensus.generations import Apply, Decision, Enter, Generation, NotMember

Totals = tuple[float, ...]
Counted = Callable[[Totals], None]
"""Function that is called with the totals of all hosts when a step commits."""


class GenerationQueue:
    """Hand-over of decisions from `Control` on the event loop to the training thread.

    Attributes:
        entered: the newest generation that this host has entered, or None.
    """

    def __init__(self, board: Mailboxes):
        """Start outside of all generations, whose numbers `board` follows."""
        self.entered: Generation | None = None
        self._following: tuple[Generation, ...] = ()
        self._board = board
        self._lock = threading.Lock()
        self._counted: Counted | None = None
        self._when_ended: Callable[[], None] | None = None

    def next(self, after: int, timeout_s: float) -> Generation | None:
        """Wait for the generation that this host enters after another; None after `timeout_s`.

        Every generation is returned, even one that has ended: all hosts may have rolled back in it.
        """

        def found() -> Generation | None:
            last = self._board.generation
            return next((own for own in self._following if after < own.number <= last), None)

        with self._lock:
            self._following = tuple(own for own in self._following if own.number > after)
        self._board.wait_for(lambda: found() is not None, timeout_s)
        return found()

    def expect(self, generation: int, counted: Counted) -> None:
        """Call `counted` when the next step commits, unless the generation has ended."""
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
        """Carry out a decision: apply a step, enter a generation, or leave it."""
        match decision:
            case Apply(_, outcome):
                if (counted := self._counted) is not None:
                    counted(outcome)
            case Enter(generation):
                with self._lock:
                    self.entered = generation
                    self._following += (generation,)
                self._end(generation.number)
            case NotMember():
                with self._lock:
                    # This host rejoins without a state, or all roll back: pending ones are void.
                    self._following = ()
                self._end(NOBODY)

    def ends(self) -> None:
        """End the last generation; all waits in it raise `GenerationEnded`."""
        self._end(NOBODY)

    def _end(self, following: int) -> None:
        with self._lock:
            self._board.begin(following)
            then, self._when_ended, self._counted = self._when_ended, None, None
        if then is not None:
            then()
