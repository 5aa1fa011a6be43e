"""Parameters of a planning method in addition to its case: a seed, a budget, and a callback."""

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
# Time limit of the proof of a bound over placements.
DEFAULT_BOUND_BUDGET_S = 300.0
# Steps that are expected to end later than this share of the budget are reduced.
EXPECTED_SHARE = 0.97
Placement = tuple[tuple[int, ...], ...]


@dataclass
class End:
    """Reasons for the early end of a search and its parts.

    `cut_short`: its steps were not done. `interrupted`: the user ended it. `interpreted`: the
    search was not compiled when it ended, and has done little. `uncompilable`: compiling it has
    failed, so it never will be.
    """

    cut_short: bool = False
    interrupted: bool = False
    interpreted: bool = False
    uncompilable: bool = False


@dataclass
class Search:
    """Seed, budget in seconds, optional placement to keep, and best results so far.

    With `begin`, a plan whose stages and paths are as large as the case's, a method that supports
    it also starts from there, and only from there if it `improves`.

    A method runs a number of steps that depends on the budget alone (`steps`), so the same seed and
    budget give the same plan on every machine that is fast enough. The clock is only the last
    resort: `fitted` reduces the steps that would take too long, and once `budget_s` is over, or the
    user interrupts, `stopped` returns true, and the method returns its best result; `end` records
    both. A search that is not `timed` runs all steps, however long they take.

    `watch`, if given, is called with the search on every progress: `share` of the budget is used,
    `best_s` is the best iteration so far, `bound_s` a lower bound, if known. A machine's first
    search has to be compiled first; unless it `waits_for_compiler`, it begins in plain Python. The
    budget does not include that wait.
    """

    seed: int = 0
    budget_s: float = DEFAULT_BUDGET_S
    placement: Placement | None = None
    begin: Plan | None = None
    watch: Callable[[Search], None] | None = None
    waits_for_compiler: bool = True
    improves: bool = False
    timed: bool = True
    end: End = field(default_factory=End)
    best_s: float = field(default=float("inf"), init=False)
    bound_s: float | None = field(default=None, init=False)
    _start_s: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self):
        """Reject an invalid seed or budget."""
        if self.seed < 0:
            raise InputError("--seed", self.seed, "must not be negative", "Give 0 or more")
        if not 0 < self.budget_s < float("inf"):
            problem = "must be a finite time above 0"
            raise InputError("--budget", self.budget_s, problem, "Give a number above 0")
        # Imported only here: modules that only read the default budget do not load NumPy.
        import numpy as np

        self.random = np.random.default_rng(self.seed)

    def start_clock(self) -> None:
        """Count the budget from now on: earlier work, such as compiling, is not searching."""
        self._start_s = time.monotonic()

    def part(self, share: float) -> Search:
        """Return a separate search with a share of the budget and the same callback."""
        return replace(self, budget_s=share * self.budget_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was started."""
        return time.monotonic() - self._start_s

    @property
    def share(self) -> float:
        """Used share of the budget."""
        return min(1.0, self.elapsed_s / self.budget_s)

    def steps(self, per_second: float) -> int:
        """Return the steps that the budget pays for, at a nominal number of steps a second."""
        return max(1, int(self.budget_s * per_second))

    def stopped(self) -> bool:
        """Return whether to end now, before all steps are done."""
        over = self.end.interrupted or (self.timed and self.elapsed_s >= self.budget_s)
        self.end.cut_short |= over
        return over

    def fitted(self, steps: float, expected_s: float) -> float:
        """Return `steps`, or fewer if all are expected to take longer than the budget has left."""
        left_s = max(0.0, EXPECTED_SHARE * self.budget_s - self.elapsed_s)
        if not self.timed or expected_s <= left_s:
            return steps
        self.end.cut_short = True
        return steps * left_s / expected_s

    def found(self, iteration_s: float) -> None:
        """Report a plan, and with it that the search continues."""
        self.best_s = min(self.best_s, iteration_s)
        if self.watch is not None:
            self.watch(self)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C in this context end the search with its best plan so far.

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
