"""Runs that train in processes of their own, two at a time on one thread each, each once.

A job is a configuration. It trains in a folder of its own, goes on where it was when it is asked
for again, and ends as a summary of a few KB (see `summary`), which says by a digest for what it
holds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml
from skippipe_sched import fields
from skippipe_sched.errors import InputError, run_command
from skippipe_sched.problem.plan import Plan, load_plan
from tqdm import tqdm

from experiments.paper.summary import Summary
from skippipe_jax.storage import run_folder

REPOSITORY = Path(__file__).parents[2]
# Two runs at once on one thread each are quicker, on two cores, than one after the other on two.
AT_ONCE = 2
ONE_THREAD = {
    "JAX_PLATFORMS": "cpu",
    "PJRT_NPROC": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OPENBLAS_NUM_THREADS": "1",
}
SECONDS_BETWEEN_LOOKS = 0.5


def plan_of(config: Mapping[str, Any]) -> Plan:
    """The plan that a configuration names by its place in the repository."""
    return _plan(REPOSITORY / config["plan"]["file"])


_plan = functools.cache(load_plan)


def digest_of(whole: Any) -> str:
    """What two runs have in common that are the same run, wherever and whenever they train."""
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Job:
    """A run to train and to sum up.

    Attributes:
        name: how its files are called.
        digest: of all that it comes from.
        config: its configuration as a file holds it, but for its folder.
        results: the folder of its summary.
        command: what makes the summary, as the summary says.
        quick: whether it is summed up on little text.
        first: a command before the training: a module and its arguments.
        flags: of XLA, beside those for one thread.
    """

    name: str
    digest: str
    config: Mapping[str, Any]
    results: Path
    command: str
    quick: bool = False
    first: tuple[str, ...] = ()
    flags: str = ""

    @property
    def output(self) -> Path:
        """The file of its summary."""
        return self.results / f"{self.name}.json"

    @property
    def work(self) -> int:
        """What it costs in proportion: visits of stages of one data node."""
        return self.config["train"]["steps"] * len(plan_of(self.config).microbatches[0])

    def summary(self) -> Summary | None:
        """What it has found, if it has been trained as it is now."""
        if not self.output.exists():
            return None
        found = Summary(**fields.load_json(self.output, str(self.output)))
        return found if found.digest == self.digest else None


def train(jobs: Sequence[Job], folder: Path) -> None:
    """Train those of the jobs that have not been, working in `folder`.

    Ctrl-C stops after a checkpoint of each run that is training, and the next call goes on.

    Raises:
        InputError: if one fails, after the others.
    """
    missing = [job for job in jobs if job.summary() is None]
    if missing:
        print(f"{len(jobs) - len(missing)} of {len(jobs)} runs have been trained", flush=True)
        _Training(missing, folder).run()


class _Process:
    """A job at work: training, or being summed up after that."""

    def __init__(self, job: Job, folder: Path):
        self.job, self.folder = job, folder
        self.run_dir = folder / "runs" / f"{job.name}-{job.digest}"
        self.begun_s = time.monotonic()
        self.log = self._open_log()
        commands = [job.first, self._training(), self._summing_up()]
        self.commands = deque(command for command in commands if command)
        self.process = self._start()

    def _open_log(self) -> IO[str]:
        logs = self.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return (logs / f"{self.job.name}.log").open("a")

    def _training(self) -> Sequence[str]:
        path = self.folder / "configs" / f"{self.job.name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        config = {**self.job.config, "run_dir": str(self.run_dir)}
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        resume = ["--resume"] if run_folder.is_run(self.run_dir) else []
        return ["skippipe_jax.train", "--config", str(path), *resume]

    def _summing_up(self) -> Sequence[str]:
        job = self.job
        job.results.mkdir(parents=True, exist_ok=True)
        quick = ["--quick"] if job.quick else []
        given = ["--command", job.command, "--digest", job.digest, "--output", str(job.output)]
        return ["experiments.paper.summary", str(self.run_dir), *given, *quick]

    def _start(self) -> subprocess.Popen[bytes]:
        flags = f"{ONE_THREAD['XLA_FLAGS']} {self.job.flags}".strip()
        # In a process group of its own: Ctrl-C comes to the campaign alone, which passes it on.
        return subprocess.Popen(
            ["nice", sys.executable, "-m", *self.commands.popleft()],
            cwd=REPOSITORY,
            env=os.environ | ONE_THREAD | {"XLA_FLAGS": flags},
            stdout=self.log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def goes_on(self) -> bool:
        """Whether there is more to wait for; starts the next command when one has ended."""
        if self.process.poll() is None:
            return True
        if self.process.returncode != 0 or not self.commands:
            self.log.close()
            return False
        self.process = self._start()
        return True

    def stop(self) -> None:
        """Let it save a checkpoint and end."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()
        self.log.close()


class _Training:
    """Trains the missing jobs, and says how long that will take."""

    def __init__(self, missing: Sequence[Job], folder: Path):
        self.folder = folder
        self.waiting = deque(missing)
        self.live: list[_Process] = []
        self.left = {job.name: job.work for job in missing}
        self.done = 0
        self.begun_s = time.monotonic()

    def run(self) -> None:
        failed = []
        with tqdm(total=len(self.left), unit="run", disable=None) as bar:
            try:
                while self.waiting or self.live:
                    while self.waiting and len(self.live) < AT_ONCE:
                        self.live.append(_Process(self.waiting.popleft(), self.folder))
                    time.sleep(SECONDS_BETWEEN_LOOKS)
                    for process in list(self.live):
                        if not process.goes_on():
                            self.live.remove(process)
                            bar.update()
                            if process.process.returncode == 0:
                                self.tell(process)
                            else:
                                failed.append(process)
            finally:
                for process in self.live:
                    process.stop()
        if failed:
            raise InputError(
                "run",
                ", ".join(process.job.name for process in failed),
                "failed, and the others have been trained",
                f"Look at {failed[0].log.name}",
            )

    def tell(self, process: _Process) -> None:
        """Print what a run has found, and how long the others will take at the pace so far."""
        job = process.job
        self.done += self.left.pop(job.name)
        found = Summary(**fields.load_json(job.output, str(job.output)))
        hours = sum(self.left.values()) / self.done * (time.monotonic() - self.begun_s) / 3600
        tqdm.write(
            f"{job.name}: held-out loss {found.loss:.4f} after {found.steps} iterations; "
            f"{(time.monotonic() - process.begun_s) / 60:.1f} min; {len(self.left)} runs, about "
            f"{hours:.1f} h, to go"
        )
        sys.stdout.flush()


def stoppable(command: Callable[[], int]) -> int:
    """Run a command that trains runs, which Ctrl-C and SIGTERM stop; returns the exit code."""
    # A shell that starts a command in the background lets it ignore SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    return run_command(command, "stopped; the same command goes on")
