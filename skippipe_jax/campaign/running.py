"""Execution of tasks as child processes, several at a time, each after the tasks that it needs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from skippipe_sched.errors import TEMPORARY_EXIT_CODE, InputError
from tqdm import tqdm

from skippipe_jax.campaign.restart_policy import RestartPolicy
from skippipe_jax.storage.run_lock import flock

# On two cores, two parallel runs with one thread each are faster than two sequential runs with two.
AT_ONCE = 2
ONE_THREAD = {
    "JAX_PLATFORMS": "cpu",
    "PJRT_NPROC": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OPENBLAS_NUM_THREADS": "1",
}
POLL_S = 0.2
# Restarts of a command that ended with a temporary failure, over about five minutes.
MOST_TRIES = 10

Command = Sequence[str]
"""Module and its arguments, as for ``python -m``."""


class Task(Protocol):
    """Work for child processes that is done once.

    Attributes:
        name: unique; the log is named after it.
        needs: names of the tasks that must be done before it starts.
        work: cost, relative to other tasks.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def needs(self) -> Collection[str]: ...  # noqa: D102
    @property
    def work(self) -> float: ...  # noqa: D102

    def is_done(self) -> bool:
        """Return whether nothing is left to do."""
        ...

    def commands(self) -> Sequence[Callable[[], Command]]:
        """Return functions that make the commands; each is called when its command starts."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Return environment variables to add for its processes."""
        ...

    def found(self) -> str:
        """Summarize the result in a line, once the task is done."""
        ...


def run_all(
    tasks: Sequence[Task], logs: Path, at_once: int = AT_ONCE, where: Path | None = None
) -> None:
    """Run the tasks that are not done, `at_once` at a time, each after those that it needs.

    On Ctrl-C all processes save their state and end; the next call continues. If this process was
    killed and the processes of a task live on, the next call waits for them. Logs are written to
    `logs`; processes start in the folder `where`, or in the current one.

    Raises:
        InputError: if a task fails, after the others have ended; or if tasks need each other, or
            one that does not exist.
    """
    in_order = ordered(tasks)
    missing = [task for task in in_order if not task.is_done()]
    if missing:
        done = len(in_order) - len(missing)
        print(f"{done} of {len(in_order)} runs have been trained", flush=True)
        _Running(missing, logs, at_once, where).run()


def ordered(tasks: Sequence[Task]) -> list[Task]:
    """Sort tasks topologically, and otherwise in the given order.

    Raises:
        InputError: if tasks need each other, or one that does not exist.
    """
    by_name = {task.name: task for task in tasks}
    for task in tasks:
        unknown = [name for name in task.needs if name not in by_name]
        if unknown:
            problem = f"does not exist, but {task.name} needs it"
            raise InputError("needs", unknown[0], problem, "Add this task, or change the needs")
    ordered: dict[str, Task] = {}
    remaining = list(tasks)
    while remaining:
        ready = [task for task in remaining if all(name in ordered for name in task.needs)]
        if not ready:
            cycle = ", ".join(task.name for task in remaining)
            raise InputError("needs", cycle, "these tasks need each other", "Remove the cycle")
        ordered |= {task.name: task for task in ready}
        remaining = [task for task in remaining if task.name not in ordered]
    return list(ordered.values())


class _Process:
    """Running task, which executes its commands one after another.

    Its processes hold a lock on its log while any of them lives. If they outlive a killed parent,
    the task waits for their end and then does the rest.
    """

    def __init__(self, task: Task, logs: Path, where: Path | None):
        self.task, self.where = task, where
        self.begun_s = time.monotonic()
        logs.mkdir(parents=True, exist_ok=True)
        self.log: IO[str] = (logs / f"{task.name}.log").open("a")
        self.waiting: deque[Callable[[], Command]] = deque()
        self.starts_s: float | None = None
        self.tries, self.started_s = RestartPolicy(MOST_TRIES), 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self.is_done = False
        self._begin()
        if self.process is None and not self.is_done:
            tqdm.write(f"{task.name}: waiting for processes of an earlier command to end")

    def _begin(self) -> None:
        """Start the first command, unless processes of an earlier call still run."""
        if not flock(self.log.fileno()):
            return
        if self.task.is_done():
            self.is_done = True
        else:
            self.waiting.extend(self.task.commands())
            self._start()

    def _start(self) -> None:
        self.starts_s, self.started_s = None, time.monotonic()
        # A separate process group, so that only this process gets Ctrl-C and forwards it.
        self.process = subprocess.Popen(
            ["nice", sys.executable, "-m", *self.waiting[0]()],
            cwd=self.where,
            env=os.environ | self.task.environment(),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def poll(self) -> bool:
        """Start the next command if the current one has ended; return whether the task runs."""
        if self.process is None and not self.is_done:
            self._begin()
        code = None if self.process is None else self.process.poll()
        if code == TEMPORARY_EXIT_CODE and self._tries_again():
            return True
        if code == 0:
            self.waiting.popleft()
            self.is_done = not self.waiting
            if self.waiting:
                self._start()
        runs = not self.is_done and code in (None, 0)
        if not runs:
            self.log.close()
        return runs

    def _tries_again(self) -> bool:
        """Restart the same command after a pause; return whether an attempt is left."""
        now_s = time.monotonic()
        if self.starts_s is None:
            lived_s = now_s - self.started_s
            # No other process takes over its work.
            pause_s = self.tries.pause_s(TEMPORARY_EXIT_CODE, lived_s, misses_others=True)
            if pause_s is None:
                return False
            self.starts_s = now_s + pause_s
            last_error = _last_error(self.log.name)
            tqdm.write(f"{self.task.name} failed; retry in {pause_s:g} s. {last_error}".rstrip())
        elif now_s > self.starts_s:
            self._start()
        return True

    def terminate(self) -> None:
        """Send SIGTERM, so that the process saves its state and ends; `wait` waits for that."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()

    def wait(self) -> None:
        """Wait for the end of its process."""
        if self.process is not None:
            self.process.wait()
        self.log.close()


class _Running:
    """Scheduler of the missing tasks, which also estimates the remaining time."""

    def __init__(self, missing: Sequence[Task], logs: Path, at_once: int, where: Path | None):
        self.logs, self.at_once, self.where = logs, at_once, where
        self.waiting = list(missing)
        self.live: list[_Process] = []
        self.remaining = {task.name: task.work for task in missing}
        self.failed: list[_Process] = []
        self.work_done = 0.0
        self.begun_s = time.monotonic()

    def run(self) -> None:
        with tqdm(total=len(self.remaining), unit="run", disable=None) as bar:
            try:
                while self.live or self._ready():
                    self._start_ready()
                    time.sleep(POLL_S)
                    for process in [process for process in self.live if not process.poll()]:
                        self.live.remove(process)
                        bar.update()
                        if process.is_done:
                            self._print_result(process)
                        else:
                            self.failed.append(process)
            finally:
                for process in self.live:
                    process.terminate()
                for process in self.live:
                    process.wait()
        if self.failed:
            names = ", ".join(process.task.name for process in self.failed)
            first = self.failed[0].log.name
            problem = "failed; the tasks that do not need it are done"
            raise InputError("run", names, problem, f"{_last_error(first)}Read {first}")

    def _ready(self) -> list[Task]:
        """Return the waiting tasks whose needs are met."""
        return [
            task for task in self.waiting if not any(name in self.remaining for name in task.needs)
        ]

    def _start_ready(self) -> None:
        for task in self._ready()[: self.at_once - len(self.live)]:
            self.waiting.remove(task)
            self.live.append(_Process(task, self.logs, self.where))

    def _print_result(self, process: _Process) -> None:
        """Print the result of a task, and the estimated time of the remaining tasks."""
        task, now_s = process.task, time.monotonic()
        self.work_done += self.remaining.pop(task.name)
        hours = sum(self.remaining.values()) / self.work_done * (now_s - self.begun_s) / 3600
        tqdm.write(
            f"{task.name}: {task.found()}; {(now_s - process.begun_s) / 60:.1f} min; "
            f"{len(self.remaining)} runs left, about {hours:.1f} h"
        )
        sys.stdout.flush()


def _last_error(log: str) -> str:
    """Return the last line of a log if it is an error message, else ""."""
    lines = Path(log).read_text(encoding="utf-8", errors="replace").splitlines()
    return f"Its last line is: {lines[-1]} " if lines and lines[-1].startswith("error:") else ""


def thread_environment(at_once: int) -> Mapping[str, str]:
    """Return environment variables that give each of `at_once` processes its share of the cores."""
    cores = max(1, (os.cpu_count() or 1) // at_once)
    shares = {"PJRT_NPROC": str(cores), "OPENBLAS_NUM_THREADS": str(cores)}
    if cores == 1:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD['XLA_FLAGS']}"
        shares["XLA_FLAGS"] = flags.strip()
    return shares
