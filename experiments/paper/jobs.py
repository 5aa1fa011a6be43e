"""Runs that train in processes of their own, two at a time on one thread each, each once.

A job is a configuration. It trains in a folder of its own, goes on where it was when it is asked
for again, and ends as a summary of a few KB (see `summary`), which says by a digest for what it
holds.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from skippipe_sched import fields
from skippipe_sched.errors import run_command
from skippipe_sched.problem.plan import Plan, load_plan

from experiments.paper.summary import Summary
from skippipe_jax.campaign import running
from skippipe_jax.campaign.running import AT_ONCE, ONE_THREAD
from skippipe_jax.config.resume import json_digest
from skippipe_jax.storage.run_dir import RunDir

REPOSITORY = Path(__file__).parents[2]


def plan_of(config: Mapping[str, Any]) -> Plan:
    """The plan that a configuration names by its place in the repository."""
    return _plan(REPOSITORY / config["plan"]["file"])


_plan = functools.cache(load_plan)


def slug(arm: str) -> str:
    """Write the name of an arm as a part of a file's name."""
    return arm.replace(", ", "-").replace(" ", "_").replace("%", "")


def read_result(path: Path, digest: str) -> dict[str, Any] | None:
    """Read what a run has found, None if it has not been trained as it is now, by its digest."""
    found = dict(fields.load_json(path, str(path))) if path.exists() else {}
    return found if found.get("digest") == digest else None


@dataclass(frozen=True)
class Job:
    """A run to train and to sum up, as a task of `campaign`.

    Attributes:
        name: how its files are called.
        digest: of all that it comes from.
        config: its configuration as a file holds it, but for its folder.
        results: the folder of its summary.
        folder: where it works.
        command: what makes the summary, as the summary says.
        quick: whether it is summed up on little text.
        flags: of XLA, beside those for one thread.
    """

    name: str
    digest: str
    config: Mapping[str, Any]
    results: Path
    folder: Path
    command: str
    quick: bool = False
    flags: str = ""

    @property
    def output(self) -> Path:
        """The file of its summary."""
        return self.results / f"{self.name}.json"

    def summary(self) -> Summary | None:
        """What it has found, if it has been trained as it is now."""
        found = read_result(self.output, self.digest)
        return None if found is None else Summary(**found)

    def trained(self) -> Summary:
        """Return what it has found, once it has been trained."""
        found = self.summary()
        assert found is not None, self.name
        return found

    @property
    def needs(self) -> tuple[str, ...]:
        """None: every job is a run of its own."""
        return ()

    @property
    def work(self) -> int:
        """What it costs in proportion: visits of stages of one data node."""
        return self.config["train"]["steps"] * len(plan_of(self.config).microbatches[0])

    def is_done(self) -> bool:
        """Whether its summary is there."""
        return self.summary() is not None

    def environment(self) -> dict[str, str]:
        """One thread, and what XLA is told."""
        return ONE_THREAD | {"XLA_FLAGS": f"{ONE_THREAD['XLA_FLAGS']} {self.flags}".strip()}

    def commands(self) -> list[Callable[[], Sequence[str]]]:
        """The training and its summary."""
        return [self._training, self._summing_up]

    def found(self) -> str:
        """Its held-out loss."""
        summary = self.trained()
        return f"held-out loss {summary.loss:.4f} after {summary.steps} steps"

    @property
    def run_dir(self) -> Path:
        """The folder of the run."""
        return self.folder / "runs" / f"{self.name}-{self.digest}"

    def _training(self) -> Sequence[str]:
        path = self.folder / "configs" / f"{self.name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        config = {**self.config, "run_dir": str(self.run_dir)}
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        resume = ["--resume"] if RunDir(self.run_dir).is_run else []
        return ["skippipe_jax.train", "--config", str(path), *resume]

    def _summing_up(self) -> Sequence[str]:
        self.results.mkdir(parents=True, exist_ok=True)
        quick = ["--quick"] if self.quick else []
        given = ["--command", self.command, "--digest", self.digest, "--output", str(self.output)]
        return ["experiments.paper.summary", str(self.run_dir), *given, *quick]


def job_of(
    name: str,
    config: Mapping[str, Any],
    results: Path,
    folder: Path,
    command: str,
    quick: bool = False,
) -> Job:
    """Describe a run that comes from its configuration and its plan alone."""
    digest = json_digest([config, plan_of(config).to_json()])
    return Job(name, digest, config, results, folder, command, quick)


def train(tasks: Sequence[running.Task], folder: Path) -> None:
    """Train those of the runs that have not been, with logs in `folder`.

    Ctrl-C stops after a checkpoint of each run that is training, and the next call goes on.

    Raises:
        InputError: if one fails, after the others.
    """
    running.run_all(tasks, folder / "logs", AT_ONCE, REPOSITORY)


def show(tasks: Sequence[running.Task]) -> None:
    """Print what each run has found, if it has been trained."""
    for task in tasks:
        print(f"{task.name:60s}", task.found() if task.is_done() else "not trained")


def stoppable(command: Callable[[], int]) -> int:
    """Run a command that trains runs, which Ctrl-C and SIGTERM stop; returns the exit code."""
    # A shell that starts a command in the background lets it ignore SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    return run_command(command, "stopped; run the same command to continue")
