"""Execution of tasks as child processes, several at a time, each after the tasks that it needs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

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
        asyncio.run(_Campaign(missing, logs, at_once, where).run())


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


class _Campaign:
    """Execution of the missing tasks, which are sorted; it also estimates the remaining time."""

    def __init__(self, missing: Sequence[Task], logs: Path, at_once: int, where: Path | None):
        self.missing, self.logs, self.where = missing, logs, where
        self.gate = asyncio.Semaphore(at_once)
        self.running: dict[str, asyncio.Task[bool]] = {}
        self.remaining = {task.name: task.work for task in missing}
        self.failed: list[str] = []
        self.work_done, self.begun_s = 0.0, time.monotonic()

    async def run(self) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        with tqdm(total=len(self.missing), unit="run", disable=None) as bar:
            for task in self.missing:
                self.running[task.name] = asyncio.create_task(self._run_after_needs(task, bar))
            try:
                await asyncio.gather(*self.running.values())
            finally:
                for running in self.running.values():
                    running.cancel()
                await asyncio.gather(*self.running.values(), return_exceptions=True)
        if self.failed:
            problem = "failed; the tasks that do not need it are done"
            names, first = ", ".join(self.failed), self._log(self.failed[0])
            raise InputError("run", names, problem, f"{_last_error(first)}Read {first}")

    def _log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    async def _run_after_needs(self, task: Task, bar: tqdm[Any]) -> bool:
        """Run a task once those that it needs are done; return whether it is done."""
        for name in task.needs:
            if name in self.running and not await self.running[name]:
                return False
        async with self.gate:
            begun_s = time.monotonic()
            with self._log(task.name).open("a") as log:
                is_done = await self._run(task, log)
        bar.update()
        if is_done:
            self._print_result(task, time.monotonic() - begun_s)
        else:
            self.failed.append(task.name)
        return is_done

    async def _run(self, task: Task, log: IO[str]) -> bool:
        """Run the commands of a task one after another; return whether it is done.

        Its processes hold a lock on its log while any of them lives. If they outlive a killed
        parent, the task waits for their end and then does the rest.
        """
        if not flock(log.fileno()):
            tqdm.write(f"{task.name}: waiting for processes of an earlier command to end")
            while not flock(log.fileno()):
                await asyncio.sleep(POLL_S)
        if task.is_done():
            return True
        tries = RestartPolicy(MOST_TRIES)
        for command in task.commands():
            started_s = time.monotonic()
            while code := await self._run_command(task, command(), log):
                pause_s, lived_s = None, time.monotonic() - started_s
                if code == TEMPORARY_EXIT_CODE:  # No other process takes over its work.
                    pause_s = tries.pause_s(code, lived_s, misses_others=True)
                if pause_s is None:
                    return False
                last_error = _last_error(self._log(task.name))
                tqdm.write(f"{task.name} failed; retry in {pause_s:g} s. {last_error}".rstrip())
                await asyncio.sleep(pause_s)
                started_s = time.monotonic()
        return True

    async def _run_command(self, task: Task, command: Command, log: IO[str]) -> int:
        """Run a command and return its exit code; if canceled, let it save its state and end."""
        process = await asyncio.create_subprocess_exec(
            *("nice", sys.executable, "-m", *command),
            cwd=self.where,
            env=os.environ | task.environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            # A separate process group, so that only this process gets Ctrl-C and forwards it.
            process_group=0,
        )
        try:
            return await process.wait()
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            raise

    def _print_result(self, task: Task, seconds: float) -> None:
        """Print the result of a task, and the estimated time of the remaining tasks."""
        self.work_done += self.remaining.pop(task.name)
        elapsed_s = time.monotonic() - self.begun_s
        hours = sum(self.remaining.values()) / self.work_done * elapsed_s / 3600
        tqdm.write(
            f"{task.name}: {task.found()}; {seconds / 60:.1f} min; "
            f"{len(self.remaining)} runs left, about {hours:.1f} h"
        )
        sys.stdout.flush()


def _last_error(log: Path) -> str:
    """Return the last line of a log if it is an error message, else ""."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return f"Its last line is: {lines[-1]} " if lines and lines[-1].startswith("error:") else ""


def thread_environment(at_once: int) -> Mapping[str, str]:
    """Return environment variables that give each of `at_once` processes its share of the cores."""
    cores = max(1, (os.cpu_count() or 1) // at_once)
    shares = {"PJRT_NPROC": str(cores), "OPENBLAS_NUM_THREADS": str(cores)}
    if cores == 1:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD['XLA_FLAGS']}"
        shares["XLA_FLAGS"] = flags.strip()
    return shares
