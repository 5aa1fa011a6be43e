"""Trains the runs that the figures need, each once, two at a time, on one thread each.

A run is a file in configs/ and a seed. It trains in a folder of its own, goes on where it was when
the campaign does, and ends as a summary of a few KB (see `summary`), results/runs/ARM-SEED.json.
That says by a digest for which configuration it holds, and a run whose summary is there is never
trained again: so a campaign may take days, and what it found is committed.

    python -m experiments.paper.campaign --folder runs/paper      trains all runs, and draws nothing
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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

PAPER = Path(__file__).parent
REPOSITORY = PAPER.parents[1]
CONFIGS, RESULTS = PAPER / "configs", PAPER / "results" / "runs"
# Two runs at once on one thread each are quicker, on two cores, than one after the other on two.
AT_ONCE = 2
ONE_THREAD = {
    "JAX_PLATFORMS": "cpu",
    "PJRT_NPROC": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OPENBLAS_NUM_THREADS": "1",
}
SECONDS_BETWEEN_LOOKS = 0.5
# The arms, and how many seeds each has. The first are trained first: what the claims need, then
# what explains it.
SEEDS: dict[str, int] = {
    "full": 3,
    "skip33": 3,
    "skip33_random": 1,
    "skip50": 1,
    "skip33_equal_time": 3,
    "skip33_swaps": 1,
    "skip33_ends_full_equal_time": 1,
    "small67": 3,
    "small67_equal_time": 3,
    "skip33_inverse": 1,
    "skip33_ends_full": 1,
    "skip33_inverse_ends_full": 1,
    "skip33_full_every_10": 1,
    "skip33_random_swaps": 1,
    "skip25": 1,
    "small50": 1,
    "full_higher_rate": 1,
    "skip33_higher_rate": 1,
    "skip50_equal_time": 1,
    "skip25_equal_time": 1,
    "skip50_random": 1,
    "skip25_random": 1,
    "skip33_skippipe": 1,
}
# A quick run has so many times fewer iterations, and a model that learns little.
QUICK = 20
QUICK_SIZES = {
    "model": {"width": 16, "heads": 2, "kv_heads": 2, "ffn_width": 32, "context": 32},
    "data": {"sequence_length": 32},
    "plan": {"budget_s": 0.2},
    "validation": {"every": 5, "sequences": 8},
}


@dataclass(frozen=True)
class Run:
    """An arm, which is a configuration, with a seed."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """How its files are called."""
        return f"{self.arm}-{self.seed}"


def runs_of(arms: Iterable[str], quick: bool) -> list[Run]:
    """The runs of these arms, first seeds first; only these if it has to be quick."""
    chosen = [arm for arm in SEEDS if arm in set(arms)]
    most = 1 if quick else max(SEEDS.values())
    return [Run(arm, seed) for seed in range(most) for arm in chosen if seed < SEEDS[arm]]


class Campaign:
    """Where the runs of a campaign train, and where their summaries are."""

    def __init__(self, folder: Path, quick: bool, results: Path = RESULTS):
        """`folder` is worked in; a quick campaign leaves its summaries there, not in `results`."""
        self.folder = folder.resolve()
        self.quick = quick
        self.results = self.folder / "results" if quick else results

    def config(self, run: Run) -> dict[str, Any]:
        """The configuration of a run as a file holds it, but for its folder."""
        tree = dict(fields.load_yaml(CONFIGS / f"{run.arm}.yaml", "config"))
        del tree["run_dir"]
        if self.quick:
            tree = shrunken(tree)
        # Random paths, and others that are drawn again, are others for each seed.
        return tree | {"seed": run.seed, "plan": tree["plan"] | {"seed": 100 * run.seed}}

    def digest(self, run: Run) -> str:
        """What two runs have in common that are the same run, wherever and whenever they train."""
        config = self.config(run)
        whole = [config, _plan_of(config).to_json()]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]

    def summary(self, run: Run) -> Summary | None:
        """What has been found by a run, if it has been trained as its configuration says now."""
        path = self.results / f"{run.name}.json"
        if not path.exists():
            return None
        found = Summary(**fields.load_json(path, str(path)))
        return found if found.digest == self.digest(run) else None

    def finished(self, runs: Iterable[Run]) -> dict[str, list[Summary]]:
        """The summaries that are there, by arm, in the order of their seeds."""
        found: dict[str, list[Summary]] = {}
        for run in sorted(runs, key=lambda run: run.seed):
            summary = self.summary(run)
            if summary is not None:
                found.setdefault(run.arm, []).append(summary)
        return found

    def train(self, runs: Sequence[Run]) -> dict[str, list[Summary]]:
        """The summaries of these runs; those that are missing are trained.

        Ctrl-C stops after a checkpoint of each run that is training, and the next call goes on.
        """
        missing = [run for run in runs if self.summary(run) is None]
        if missing:
            print(f"{len(runs) - len(missing)} of {len(runs)} runs have been trained", flush=True)
            _Training(self, missing).run()
        return self.finished(runs)


def shrunken(tree: dict[str, Any]) -> dict[str, Any]:
    """A configuration that trains in seconds, on the same paths and by the same recipe."""
    small = tree | {
        section: tree[section] | sizes for section, sizes in QUICK_SIZES.items() if section in tree
    }
    small["train"] = {"steps": tree["train"]["steps"] // QUICK}
    small["optimizer"] = tree["optimizer"] | {"warmup_steps": 1}
    recipe = dict(tree.get("recipe", {}))
    if "phases" in recipe:
        recipe["phases"] = [
            phase | {"from_step": phase["from_step"] // QUICK} for phase in recipe["phases"]
        ]
    return small | {"recipe": recipe}


def _plan_of(config: dict[str, Any]) -> Plan:
    return load_plan(REPOSITORY / config["plan"]["file"])


class _Job:
    """A run that is training, or being summed up after that."""

    def __init__(self, campaign: Campaign, run: Run):
        self.campaign, self.run = campaign, run
        self.digest = campaign.digest(run)
        self.folder = campaign.folder / "runs" / f"{run.name}-{self.digest}"
        self.output = campaign.results / f"{run.name}.json"
        self.begun_s = time.monotonic()
        self.log = self._open_log()
        self.commands = deque([self._training(), self._summing_up()])
        self.process = self._start()

    def _open_log(self) -> IO[str]:
        logs = self.campaign.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return (logs / f"{self.run.name}.log").open("a")

    def _training(self) -> list[str]:
        path = self.campaign.folder / "configs" / f"{self.run.name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        config = self.campaign.config(self.run) | {"run_dir": str(self.folder)}
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        resume = ["--resume"] if run_folder.is_run(self.folder) else []
        return ["skippipe_jax.train", "--config", str(path), *resume]

    def _summing_up(self) -> list[str]:
        self.campaign.results.mkdir(parents=True, exist_ok=True)
        quick = ["--quick"] if self.campaign.quick else []
        given = ["--arm", self.run.arm, "--digest", self.digest, "--output", str(self.output)]
        return ["experiments.paper.summary", str(self.folder), *given, *quick]

    def _start(self) -> subprocess.Popen[bytes]:
        # In a process group of its own: Ctrl-C comes to the campaign alone, which passes it on.
        return subprocess.Popen(
            ["nice", sys.executable, "-m", *self.commands.popleft()],
            cwd=REPOSITORY,
            env=os.environ | ONE_THREAD,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    def goes_on(self) -> bool:
        """Whether there is more to wait for; starts the summing up when the training has ended."""
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
    """Trains the missing runs of a campaign, and says how long that will take."""

    def __init__(self, campaign: Campaign, missing: Sequence[Run]):
        self.campaign = campaign
        self.waiting = deque(missing)
        self.live: list[_Job] = []
        self.left = {run: _work(campaign, run) for run in missing}
        self.done = 0
        self.begun_s = time.monotonic()

    def run(self) -> None:
        failed = []
        with tqdm(total=len(self.left), unit="run", disable=None) as bar:
            try:
                while self.waiting or self.live:
                    while self.waiting and len(self.live) < AT_ONCE:
                        self.live.append(_Job(self.campaign, self.waiting.popleft()))
                    time.sleep(SECONDS_BETWEEN_LOOKS)
                    for job in list(self.live):
                        if not job.goes_on():
                            self.live.remove(job)
                            bar.update()
                            if job.process.returncode == 0:
                                self.tell(job)
                            else:
                                failed.append(job)
            finally:
                for job in self.live:
                    job.stop()
        if failed:
            raise InputError(
                "run",
                ", ".join(job.run.name for job in failed),
                "failed, and the others have been trained",
                f"Look at {failed[0].log.name}",
            )

    def tell(self, job: _Job) -> None:
        """Print what a run has found, and how long the others will take at the pace so far."""
        self.done += self.left.pop(job.run)
        found = Summary(**fields.load_json(job.output, str(job.output)))
        hours = sum(self.left.values()) / self.done * (time.monotonic() - self.begun_s) / 3600
        tqdm.write(
            f"{job.run.name}: held-out loss {found.loss:.4f} after {found.steps} iterations; "
            f"{(time.monotonic() - job.begun_s) / 60:.1f} min; {len(self.left)} runs, about "
            f"{hours:.1f} h, to go"
        )
        sys.stdout.flush()


def _work(campaign: Campaign, run: Run) -> int:
    """What a run costs in proportion: visits of stages of one data node."""
    config = campaign.config(run)
    return config["train"]["steps"] * len(_plan_of(config).microbatches[0])


def stoppable(command: Callable[[], int]) -> int:
    """Run a command that trains runs, which Ctrl-C and SIGTERM stop; returns the exit code."""
    # A shell that starts a command in the background lets it ignore SIGINT.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    return run_command(command, "stopped; the same command goes on")


def main() -> int:
    """Parse the command line and train; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.paper.campaign", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="(%(default)s)")
    parser.add_argument("--only", nargs="+", choices=SEEDS, default=list(SEEDS), help="arms (all)")
    parser.add_argument("--list", action="store_true", help="say which runs are there, train none")
    arguments = parser.parse_args()
    return stoppable(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    campaign = Campaign(arguments.folder, quick=False)
    runs = runs_of(arguments.only, quick=False)
    if not arguments.list:
        campaign.train(runs)
    for run in runs:
        found = campaign.summary(run)
        print(f"{run.name:30s}", "not trained" if found is None else f"{found.loss:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
