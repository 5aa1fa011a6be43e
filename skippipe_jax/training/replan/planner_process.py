"""Planner in a separate process, which is warmed up before it is needed.

The process has a low priority, so that it takes little from training, but not the lowest, with
which it would starve when all cores are busy. Loading and compiling take far longer than the budget
of a search, so both are done in advance.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from skippipe_sched.methods import DEFAULT_METHOD, begins_from_plans, path_length_of
from skippipe_sched.problem.case import Case
from skippipe_sched.problem.plan import Plan, load_plan

from skippipe_jax import log
from skippipe_jax.clock import SYSTEM_CLOCK, Clock
from skippipe_jax.config.cluster import ReplanConfig
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.training.callbacks.base import Callback, RunView

# With nice 5 it gets a quarter as much time as a process that keeps the same core busy.
LOW_PRIORITY = ("nice", "-n", "5")

# Seconds until a host warms up: not during the start of a run, nor for a run that ends soon. Hosts
# warm up one after another, as many of them may share a machine.
PREPARES_AFTER_S = 20.0

# Hosts that keep a warm process in memory: the leader, and its successor.
READY_HOSTS = 2

# Within this budget in seconds, a search finds more if it only improves the current plan.
IMPROVES_WITHIN_S = 2.0

# Budget in seconds of a search that only serves to load and compile.
SHORTEST_BUDGET_S = 0.01


class PlannerProcess:
    """Process that runs commands of the planner, one after another, until it is closed."""

    def __init__(self):
        """Start the process."""
        nice = LOW_PRIORITY if shutil.which(LOW_PRIORITY[0]) else ()
        self._lock, self._is_closed = threading.Lock(), False
        self._folder = tempfile.TemporaryDirectory(prefix="skippipe-search-")
        self._errors = Path(self._folder.name, "errors.txt")
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*nice, sys.executable, "-m", "skippipe_sched.command_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,  # A failed write leaves nothing to flush.
                start_new_session=True,  # Shield the search from signals to this host.
            )
        assert self._process.stdout is not None, "is a pipe"
        assert self._process.stdin is not None, "is a pipe"
        self._answers, self._commands = self._process.stdout, self._process.stdin

    @property
    def has_ended(self) -> bool:
        """True if the process has ended, by itself or by `close`."""
        return self._process.poll() is not None

    def run(self, command: Sequence[str]) -> int:
        """Run a command after earlier ones; return its exit code, or that of an ended process."""
        with self._lock:
            if not self._is_closed:
                try:
                    self._commands.write(json.dumps(command).encode() + b"\n")
                except BrokenPipeError:
                    return self._process.wait()  # Its exit code gives the reason.
                if answer := self._answers.readline():
                    return int(answer)
        return self._process.wait()

    def last_error_line(self) -> str:
        """Return the last line of its standard error."""
        lines = self._errors.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no error output")

    def interrupt(self) -> None:
        """Interrupt the current search."""
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        with self._lock:  # Wait until `run` has returned.
            if not self._is_closed:
                self._is_closed = True
                self._answers.close()
                self._commands.close()
                self._folder.cleanup()


class WarmPlanner:
    """Search process of a host, kept across generations of hosts."""

    def __init__(self):
        """Start nothing yet."""
        self._kept: PlannerProcess | None = None
        self._others: list[PlannerProcess] = []
        self._has_prepared = False

    def process(self) -> PlannerProcess:
        """Return the process; start one if there is none."""
        if self._kept is None or self._kept.has_ended:
            self._kept = PlannerProcess()
        return self._kept

    def warm_up(self, plan: Plan, *, stays: bool) -> None:
        """Start to load and compile the code of a search, by searching the case of a plan.

        Compiled code is cached on this machine; with `stays`, the process is kept too.
        """
        is_running = self._kept is not None and not self._kept.has_ended
        if is_running or (self._has_prepared and not stays):
            return
        self._has_prepared = True
        process = self.process() if stays else PlannerProcess()
        if not stays:
            self._others.append(process)

        def search() -> None:
            with tempfile.TemporaryDirectory(prefix="skippipe-prepare-") as folder:
                path = Path(folder, "case.yaml")
                # A failure is ignored: the real search reports it.
                process.run(_plan_command(plan.case, path, SHORTEST_BUDGET_S))
            if not stays:
                process.close()

        threading.Thread(target=search, daemon=True).start()

    def close(self) -> None:
        """Kill all processes."""
        for process in (*self._others, *([self._kept] if self._kept else [])):
            process.close()


class PlanSearch:
    """Search for the best plan of each of some cases, one after another, within one budget."""

    def __init__(
        self,
        cases: Sequence[Case],
        current: Plan,
        config: ReplanConfig,
        seed: int,
        process: PlannerProcess,
        then: Callable[[Sequence[Plan]], None],
    ):
        """Start the search, from the plan `current` for a case that it fits.

        At the end `then` is called with the plans found, from a separate thread, so that it does
        not wait for the end of a step.
        """
        self._process, self._then = process, then
        self._is_closed, self._is_over = threading.Event(), threading.Event()
        budget_s = config.budget_s / len(cases)
        folder = tempfile.TemporaryDirectory(prefix="skippipe-replan-")
        self._cases = [Path(folder.name, f"case{number}.yaml") for number in range(len(cases))]
        commands: list[list[str]] = []
        for path, case in zip(self._cases, cases, strict=True):
            command = [*_plan_command(case, path, budget_s), "--seed", str(seed)]
            fits = current.fits(case, path_length_of(DEFAULT_METHOD, case))
            if fits and begins_from_plans(DEFAULT_METHOD):
                current.save(Path(folder.name, "standing"))
                option = "--improve" if budget_s <= IMPROVES_WITHIN_S else "--begin"
                command += [option, str(Path(folder.name, "standing"))]
            commands.append(command)
        threading.Thread(target=self._search, args=(folder, commands), daemon=True).start()

    def _search(
        self, folder: tempfile.TemporaryDirectory[str], commands: Sequence[list[str]]
    ) -> None:
        with folder:
            for command in commands:
                if self._is_closed.is_set():
                    return
                code = self._process.run(command)
                if code and not self._is_closed.is_set():
                    why = self._process.last_error_line()
                    log.info(f"the search for a better plan failed with exit code {code}: {why}")
            plans = [load_plan(path) for path in sorted(Path(folder.name).glob("case*.json"))]
        if not self._is_closed.is_set():
            self._then(plans)
        self._is_over.set()

    def is_over(self) -> bool:
        """Return whether all cases have been searched."""
        return self._is_over.is_set()

    def close(self) -> None:
        """Interrupt the search if it is not over, without waiting for its end."""
        self._is_closed.set()
        if not self._is_over.is_set():
            for path in self._cases:
                path.unlink(missing_ok=True)  # A search that has yet to read it fails at once.
            self._process.interrupt()


def _plan_command(case: Case, path: Path, budget_s: float) -> list[str]:
    """Write a case to a path, and return the command that writes a plan for it next to it."""
    path.write_text(json.dumps(dict(case.source)), encoding="utf-8")
    files = [str(path), "-o", str(path.with_suffix(".json"))]
    return ["plan", *files, "--method", DEFAULT_METHOD, "--budget", f"{budget_s:g}", "--compiled"]


class PlannerWarmup(Callback):
    """Callback that warms up the planner once a generation has lasted for a while."""

    def __init__(self, planner: WarmPlanner, plan: Plan, rank: int, clock: Clock = SYSTEM_CLOCK):
        """Schedule the warm-up for the case of a plan; `rank` is the index of this host."""
        self._planner, self._plan, self._stays = planner, plan, rank < READY_HOSTS
        self._clock, self._at_s = clock, clock.now() + PREPARES_AFTER_S * (1 + rank)
        self._is_done = False

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Warm up the planner, if it is due."""
        if not self._is_done and self._clock.now() > self._at_s:
            self._is_done = True
            # A failure is ignored: the real search reports it.
            with suppress(OSError):
                self._planner.warm_up(self._plan, stays=self._stays)
