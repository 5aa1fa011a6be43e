"""The planner in a process of its own, which is ready before it is needed.

It takes little from training: another interpreter, with a low priority. Not the lowest, by which it
would get nothing where all cores are busy. To load and to compile it takes far longer than a search
may, so both are done while nothing is searched for.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from skippipe_sched.problem.plan import Plan

from skippipe_jax.training.callback import Callback

# Beside what keeps a core busy it gets a quarter of that.
LOW_PRIORITY = ("nice", "-n", "5")

# A run that has begun has enough to do; one that ends soon needs no search. Hosts prepare one after
# another, as many of them may share a machine.
PREPARES_AFTER_S = 20.0

# So many keep in memory what a search needs: whoever leads, and who does when it is lost.
READY_HOSTS = 2

# Of a search that is made only so that all is loaded and compiled.
SHORTEST_BUDGET_S = 0.01


class SearchProcess:
    """Runs commands of the planner, one after another, until it is closed."""

    def __init__(self):
        """Start it."""
        nice = LOW_PRIORITY if shutil.which(LOW_PRIORITY[0]) else ()
        self._lock, self._is_closed = threading.Lock(), False
        self._folder = tempfile.TemporaryDirectory(prefix="skippipe-search-")
        self._errors = Path(self._folder.name, "errors.txt")
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*nice, sys.executable, "-m", "skippipe_sched.standby"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,  # What is not taken is not kept.
                start_new_session=True,  # Signals to this host are not for the search.
            )

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, by itself or because it was closed."""
        return self._process.poll() is not None

    def run(self, words: Sequence[str]) -> int:
        """The exit code of a command, once those before and it have ended, or the process has."""
        source, target = self._pipes
        with self._lock:
            if not self._is_closed:
                try:
                    target.write(json.dumps(words).encode() + b"\n")
                except BrokenPipeError:
                    return self._process.wait()  # Its exit code tells why.
                if answer := source.readline():
                    return int(answer)
        return self._process.wait()

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        source, target = self._process.stdout, self._process.stdin
        assert source is not None, "is a pipe"
        assert target is not None, "is a pipe"
        return source, target

    def last_words(self) -> str:
        """The last line that it has written to its standard error."""
        said = self._errors.read_text(errors="replace").split("\n")
        return next((line for line in reversed(said) if line.strip()), "it says nothing")

    def interrupt(self) -> None:
        """End the search that is under way."""
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End it, whatever it is at."""
        self._process.kill()
        self._process.wait()
        with self._lock:  # Whoever waits for an answer has got none.
            if not self._is_closed:
                self._is_closed = True
                for pipe in self._pipes:
                    pipe.close()
                self._folder.cleanup()


class Standby:
    """The search process of a host, which is kept from one generation of hosts to the next."""

    def __init__(self, method: str):
        """Searches are by this method; start nothing yet."""
        self._method = method
        self._kept: SearchProcess | None = None
        self._others: list[SearchProcess] = []
        self._has_prepared = False

    def process(self) -> SearchProcess:
        """The process, which is started if there is none."""
        if self._kept is None or self._kept.has_ended:
            self._kept = SearchProcess()
        return self._kept

    def prepare(self, plan: Plan, *, stays: bool) -> None:
        """Begin to load and compile what a search needs, such as one for the case of a plan.

        What is compiled is kept on this machine; with `stays`, what is loaded stays in memory.
        """
        is_there = self._kept is not None and not self._kept.has_ended
        if is_there or (self._has_prepared and not stays):
            return
        self._has_prepared = True
        process = self.process() if stays else SearchProcess()
        if not stays:
            self._others.append(process)

        def search() -> None:
            with tempfile.TemporaryDirectory(prefix="skippipe-prepare-") as folder:
                case, found = Path(folder, "case.yaml"), Path(folder, "plan.json")
                case.write_text(json.dumps(dict(plan.case.source)), encoding="utf-8")
                words = ["plan", str(case), "--method", self._method, "-o", str(found)]
                # If that fails, the search that is needed will say why.
                process.run([*words, "--budget", f"{SHORTEST_BUDGET_S:g}"])
            if not stays:
                process.close()

        threading.Thread(target=search, daemon=True).start()

    def close(self) -> None:
        """End whatever runs."""
        for process in (*self._others, *([self._kept] if self._kept else [])):
            process.close()


class Preparing(Callback):
    """Prepares a search once a generation of hosts has lasted for a while."""

    def __init__(self, standby: Standby, plan: Plan, place: int):
        """For the case of a plan, on the host that has this place among those of its team."""
        self._standby, self._plan, self._stays = standby, plan, place < READY_HOSTS
        self._at_s = time.monotonic() + PREPARES_AFTER_S * (1 + place)
        self._is_done = False

    def after_step(self, trainer: Any, metrics: Mapping[str, Any]) -> None:
        """Prepare it, if it is time."""
        del trainer, metrics
        if not self._is_done and time.monotonic() > self._at_s:
            self._is_done = True
            # If that fails, the search that is needed will say why.
            with suppress(OSError):
                self._standby.prepare(self._plan, stays=self._stays)
