"""What it costs in loss that replicas take steps of their own and are averaged behind them.

    python -m experiments.paper.outer_averaging              trains what is missing, and prints it

First settings of `averaging: {mode: outer}` are tried, with one seed and one arm, on the tests of
Python's standard library, which the campaign's source leaves out: so nothing is chosen by the text
that is reported. Beside them stands the same run with gradients averaged in every iteration. Then
the control and the arm with a third of the stages skipped are trained once more for each seed with
the best setting, the same in all but that: for as many iterations as the campaign's own run
of that seed, which averages gradients in every iteration, and for as many as take the time of the
control by the planner's clock. Summaries are committed, so each run is trained once, and figures
are of the seeds that are there. (The seconds in summaries are those of exact averaging, for which
the arms' plans were made; those of the figures are not.)
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from skippipe_sched.problem.averaging import parse_averaging
from skippipe_sched.timing.simulate import simulate_plan

from experiments.paper import intervals, jobs, plans, study_command
from experiments.paper.campaign import Run
from experiments.paper.intervals import HOW, by_seed, paired, with_ends
from experiments.paper.jobs import Job
from experiments.paper.summary import Summary

# A fragment is whole blocks of every stage, and the campaign's stages have two.
SENT = {"fragments": 2, "delay": 1, "dtype": "int8"}
EXACT = "exact"
CONTROL = "full"
# Arms of the campaign, and what it calls the same in the time of the control.
EQUAL_TIME = {"full": "full", "skip33": "skip33_equal_time"}
SEEDS = 5


@dataclass(frozen=True)
class Setting:
    """What of the section `averaging` is tried.

    Attributes:
        every: iterations in which everything is averaged once.
        exact_steps: first iterations, which average gradients.
        rate, momentum: of the outer optimizer.
    """

    every: int
    exact_steps: int
    rate: float
    momentum: float

    @property
    def name(self) -> str:
        """How its figures and files are called."""
        return f"every{self.every}-exact{self.exact_steps}-{self.rate:g}-{self.momentum:g}"

    def section(self) -> dict[str, Any]:
        """Return the section `averaging` of a run."""
        own = {"rate": self.rate, "momentum": self.momentum, "exact_steps": self.exact_steps}
        return {"mode": "outer", "every": self.every, **SENT, **own}


# After 99 exact iterations of 300, and cycles of 20 or 5, the last fragment is sent at the end of
# iteration 299, and applied as the run ends. After 150 of them it is sent after iteration 290: what
# replicas learn by themselves in the nine that are left does not count.
TRIED = (
    Setting(20, 99, 1.0, 0.0),
    Setting(2, 0, 1.0, 0.5),
    Setting(20, 99, 1.0, 0.5),
    Setting(20, 99, 1.0, 0.7),
    Setting(20, 99, 0.7, 0.9),
    Setting(5, 99, 1.0, 0.5),
    Setting(20, 150, 1.0, 0.5),
    Setting(20, 99, 1.0, 0.9),
    Setting(20, 150, 1.0, 0.7),
    Setting(20, 150, 1.0, 0.6),
)
OTHER_TEXT = "test/*.py"
SEED, SEQUENCES = 5, 512
# Skipping leaves each replica fewer microbatches of its own, so it is the harder of the two.
ARM = "skip33"


@dataclass(frozen=True)
class OuterRun:
    """An arm of the campaign with a seed, trained with a setting.

    `equal_time`: for as long as the control takes, not for as many iterations.
    """

    setting: Setting
    arm: str
    seed: int
    equal_time: bool

    @property
    def name(self) -> str:
        """How its files are called."""
        length = "equal_time-" if self.equal_time else ""
        return f"{self.setting.name}-{self.arm}-{length}{self.seed}"

    @property
    def exact(self) -> Run:
        """The campaign's run that it stands beside."""
        return Run(EQUAL_TIME[self.arm] if self.equal_time else self.arm, self.seed)


@functools.cache
def iteration_s(arm: str, every: int | None = None) -> float:
    """Seconds of an iteration of an arm by the planner, with outer averaging if it has a cycle.

    Nodes, paths and order are those of the arm's plan, which was made for exact averaging.
    """
    plan = plans.plan_of(arm)
    if every is not None:
        policy = parse_averaging({"mode": "outer", "every": every, **SENT}, "averaging")
        plan = replace(plan, case=replace(plan.case, averaging=policy))
    return simulate_plan(plan).iteration_s


def clock_s(arm: str, section: Mapping[str, Any], steps: int) -> float:
    """Seconds of so many iterations by the planner, of which the first may be exact."""
    exact_steps = min(section["exact_steps"], steps)
    own_s = iteration_s(arm, section["every"])
    return exact_steps * iteration_s(arm) + (steps - exact_steps) * own_s


def steps_within(arm: str, section: Mapping[str, Any], limit_s: float) -> int:
    """The most iterations that take at most so long and end as a cycle has been applied."""
    exact_steps, every = section["exact_steps"], section["every"]
    left_s = limit_s - exact_steps * iteration_s(arm)
    cycles = int((left_s / iteration_s(arm, every) - SENT["delay"]) // every)
    return exact_steps + cycles * every + SENT["delay"]


class Study(study_command.CampaignStudy):
    """The runs with outer averaging, beside those of the campaign."""

    NAME = "outer_averaging"

    def trials(self) -> dict[str, Job]:
        """Describe the runs by which a setting is chosen, by name; the exact one first."""
        tried = {setting.name: self._trial(setting.name, setting) for setting in TRIED}
        return {EXACT: self._trial(EXACT, None)} | tried

    def _trial(self, name: str, setting: Setting | None) -> Job:
        config: Mapping[str, Any] = self.campaign.config(Run(ARM, SEED))
        config = config | {"validation": config["validation"] | {"sequences": SEQUENCES}}
        if setting is not None:
            config = config | {"averaging": setting.section()}
        other = {"source": "text", "path": str(Path(sysconfig.get_path("stdlib"), OTHER_TEXT))}
        return Job(
            name=f"{ARM}-{name}",
            # Without the path of the text: where the library lies differs by machine.
            digest=jobs.json_digest([config, OTHER_TEXT, jobs.plan_of(config).to_json()]),
            config=config | {"data": config["data"] | other},
            results=self.summaries / "trials",
            folder=self.folder,
            command=self.command,
            # Their losses are those of validation; nothing else of the summary is of use here.
            quick=True,
        )

    def losses(self) -> dict[str, float]:
        """Return held-out losses at the end of trained trials, on the other text, by name."""
        found = {name: job.summary() for name, job in self.trials().items()}
        return {name: own.curve[-1][-1] for name, own in found.items() if own is not None}

    def runs(self) -> list[OuterRun]:
        """Return runs with the best setting so far, of equal data and of equal time."""
        losses = self.losses()
        trained = [setting for setting in TRIED if setting.name in losses]
        best = min(trained, key=lambda setting: losses[setting.name], default=None)
        return [
            OuterRun(best, arm, seed, equal_time)
            for equal_time in (False, True)
            if best is not None
            for seed in range(SEEDS)
            for arm in EQUAL_TIME
        ]

    def config(self, run: OuterRun) -> dict[str, Any]:
        """The campaign's configuration of its arm with outer averaging, and as long as it is."""
        config = self.campaign.config(Run(run.arm, run.seed))
        steps = config["train"]["steps"]
        section = run.setting.section()
        if run.equal_time:
            steps = steps_within(run.arm, section, steps * iteration_s(CONTROL))
        return config | {"train": config["train"] | {"steps": steps}, "averaging": section}

    def job(self, run: OuterRun) -> Job:
        """A run as it is trained."""
        return self.job_of(run.name, self.config(run))

    def digest(self) -> str:
        """Of all that the study comes from."""
        own = [job.digest for job in self.tasks()]
        return jobs.json_digest(own + [self.campaign.digest(run.exact) for run in self.runs()])

    def tasks(self) -> list[Job]:
        """Name the trials, and the runs as far as a setting has been tried."""
        return [*self.trials().values(), *map(self.job, self.runs())]

    def train(self) -> None:
        """Train what is missing, trials first."""
        jobs.train(list(self.trials().values()), self.folder)
        super().train()

    def figures(self) -> dict[str, Any]:
        """What is written, of the runs that have been trained."""
        losses = self.losses()
        minus_exact = {name: round(loss - losses[EXACT], 4) for name, loss in losses.items()}
        del minus_exact[EXACT]
        of_trials = {"text": OTHER_TEXT, "arm": ARM, "seed": SEED, "loss": losses}
        settings = dict.fromkeys(run.setting for run in self.runs())
        found = {run: self.job(run).summary() for run in self.runs()}
        return {
            "digest": self.digest(),
            "trials": of_trials | {"minus_exact": minus_exact},
            "sent": SENT,
            "interval": HOW,
            "iteration_s": {
                arm: {"exact": round(iteration_s(arm), 3)}
                | {own.name: round(iteration_s(arm, own.every), 3) for own in settings}
                for arm in EQUAL_TIME
            },
            "equal_data": {own.name: self._compared(own, False, found) for own in settings},
            "equal_time": {own.name: self._compared(own, True, found) for own in settings},
            "not_trained": [run.name for run, own in found.items() if own is None],
        }

    def _compared(
        self, setting: Setting, equal_time: bool, found: Mapping[OuterRun, Summary | None]
    ) -> dict[str, Any]:
        """Of each arm with a setting the losses beside the campaign's, and the differences.

        At equal time also from the control, which has had as long.
        """
        of_arm = {
            arm: self._of_arm(OuterRun(setting, arm, 0, equal_time), found) for arm in EQUAL_TIME
        }
        others = ("exact", "full_exact") if equal_time else ("exact",)
        for other in others:
            differences = {
                arm: paired(own["loss"]["outer"], own["loss"][other])
                for arm, own in of_arm.items()
                if own["loss"]["outer"]
            }
            for arm, interval in intervals.figures(differences).items():
                of_arm[arm][f"minus_{other}"] = interval
        return of_arm

    def _of_arm(self, first: OuterRun, found: Mapping[OuterRun, Summary | None]) -> dict[str, Any]:
        """How long an arm is trained, and its losses of the first seeds up to one that is missing.

        `first` is its run with the first seed.
        """
        config = self.config(first)
        steps, section = config["train"]["steps"], config["averaging"]
        seeds = [run for run in found if replace(run, seed=0) == first]
        done = list(takewhile(lambda run: found[run] is not None, seeds))
        losses = {
            "outer": [own.loss for run in done if (own := found[run]) is not None],
            "exact": [self.campaign.trained(run.exact).loss for run in done],
        }
        if first.equal_time:
            controls = (Run(CONTROL, run.seed) for run in done)
            losses["full_exact"] = [self.campaign.trained(run).loss for run in controls]
        hours = round(clock_s(first.arm, section, steps) / 3600, 2)
        return {"steps": steps, "averaging": section, "hours": hours, "loss": losses}


def table(figures: Mapping[str, Any]) -> str:
    """The figures for a reader: a line for each setting that was tried, and for each arm."""
    trials = figures["trials"]
    lines = [f"held-out loss [nats per byte] on other text, {trials['arm']}, minus exact:"]
    lines += [f"{name:32s} {loss:+.4f}" for name, loss in trials["minus_exact"].items()]
    for kind, title in (("equal_data", "equal bytes"), ("equal_time", "equal time")):
        lines.append(f"held-out loss, outer minus exact, {title}:")
        for name, arms in figures[kind].items():
            lines += [_line(name, arm, own) for arm, own in arms.items() if "minus_exact" in own]
    if figures["not_trained"]:
        lines.append(f"{len(figures['not_trained'])} runs have not been trained")
    return "\n".join(lines)


def _line(setting: str, arm: str, own: Mapping[str, Any]) -> str:
    loss = own["loss"]
    each = by_seed(paired(loss["outer"], loss["exact"]))
    return f"{setting} {arm:8s} {own['steps']} iterations: {each}; " + ", ".join(
        f"{key.replace('_', ' ')} {with_ends(own[key])}"
        for key in ("minus_exact", "minus_full_exact")
        if key in own
    )


if __name__ == "__main__":
    sys.exit(study_command.run(Study, __doc__, table))
