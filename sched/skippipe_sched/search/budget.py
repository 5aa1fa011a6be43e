"""What a planning method is given besides its case: a seed, a budget, and who watches it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from skippipe_sched.errors import InputError

if TYPE_CHECKING:
    from skippipe_sched.problem.plan import Plan

DEFAULT_BUDGET_S = 10.0
# What the proof of a bound over placements may take.
DEFAULT_BOUND_BUDGET_S = 300.0
Placement = tuple[tuple[int, ...], ...]


@dataclass
class End:
    """The end of a search and its parts: before their steps were done, because a user wished so.

    `interpreted`: the search was not compiled when it ended, and has done little. `uncompilable`:
    it never will be, as compiling it has failed.
    """

    cut_short: bool = False
    interrupted: bool = False
    interpreted: bool = False
    uncompilable: bool = False


@dataclass
class Search:
    """A seed, a budget in seconds, a placement to keep if one is given, and what was found so far.

    With `begin`, a plan whose stages and paths are as large as the case's, a method that can begins
    there too, and nowhere else if it `improves`.

    A method does a number of steps that follows from the budget alone (`steps`), so the same seed
    and budget give the same plan on every machine that is quick enough. The clock is only the
    last resort: once `budget_s` is over, or the user asks for the end, `stopped` says so, and the
    method returns the best that it has; `end` tells that this happened.

    `watch`, if given, is called with the search whenever it has come further: `share` of the budget
    is used, `best_s` is the best iteration so far, `bound_s` what none can beat, if that is known.
    A machine's first search has to be compiled before; unless it `waits_for_compiler`, it begins
    in plain Python. No budget counts that wait.
    """

    seed: int = 0
    budget_s: float = DEFAULT_BUDGET_S
    placement: Placement | None = None
    begin: Plan | None = None
    watch: Callable[[Search], None] | None = None
    waits_for_compiler: bool = True
    improves: bool = False
    end: End = field(default_factory=End)
    best_s: float = field(default=float("inf"), init=False)
    bound_s: float | None = field(default=None, init=False)
    _start_s: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self):
        """Refuse what is no seed or no budget."""
        if self.seed < 0:
            raise InputError("--seed", self.seed, "must not be negative", "Give 0 or more")
        if not 0 < self.budget_s < float("inf"):
            raise InputError(
                "--budget", self.budget_s, "must be a time in seconds", "Give a number above 0"
            )
        # Only here: what knows a budget's default need not wait for NumPy.
        import numpy as np

        self.random = np.random.default_rng(self.seed)

    def start_clock(self) -> None:
        """Count the budget from now on: what comes before is no searching (compiling, say)."""
        self._start_s = time.monotonic()

    def part(self, share: float) -> Search:
        """Return a search of its own with a share of the budget, watched by the same."""
        return replace(self, budget_s=share * self.budget_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was started."""
        return time.monotonic() - self._start_s

    @property
    def share(self) -> float:
        """The share of the budget that is used."""
        return min(1.0, self.elapsed_s / self.budget_s)

    def steps(self, per_second: float) -> int:
        """Count the steps that the budget pays for, at a nominal number of steps a second."""
        return max(1, int(self.budget_s * per_second))

    def stopped(self) -> bool:
        """Tell whether to return now, before all steps are done."""
        over = self.end.interrupted or self.elapsed_s >= self.budget_s
        self.end.cut_short |= over
        return over

    def found(self, iteration_s: float) -> None:
        """Tell of a plan, and with it that the search goes on."""
        self.best_s = min(self.best_s, iteration_s)
        if self.watch is not None:
            self.watch(self)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C end the search with its best plan so far, while this lasts.

        A second one ends the program, as usual.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(number: int, frame: object) -> None:
            del number, frame
            self.end.interrupted = True
            signal.signal(signal.SIGINT, before)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
